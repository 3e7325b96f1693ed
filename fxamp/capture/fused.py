"""Attention that eager evaluation without gradients runs as one fused kernel, where a capture has the plain ops.

The fused kernel rounds in other places, so those ops may differ from what the model itself gives under autocast. What
makes torch choose it is read off the module; it also depends on masks and on the inputs, which are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph

from passes.graph.notes import note
from passes.graph.values import module_stack


def note_fused(
    graph: Graph, model: nn.Module, kinds: tuple[type[nn.Module], ...], evaluates: Callable[[str], bool]
) -> None:
    """Note on each call whether eager evaluation runs it inside a fused kernel.

    Args:
        graph: nodes have the paths of their modules in the model.
        model: with the modules of the graph.
        kinds: of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, those whose fused kernel is not captured.
        evaluates: says for the path of a module whether it may be in eval mode, without gradients.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return
    modules = {path: m for path, m in model.named_modules() if isinstance(m, kinds)}
    fused = {path for path, m in modules.items() if evaluates(path) and _may_be_fused(m)}
    for node in graph.nodes if fused else ():
        if node.op.startswith("call") and any(path in fused for path, _ in module_stack(node)):
            note(node, fused=True)


def _may_be_fused(module: nn.Module) -> bool:
    attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    if not isinstance(attention, nn.MultiheadAttention):
        return False
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    whole = attention.in_proj_weight is not None and attention.in_proj_bias is not None
    return plain and whole and attention.batch_first and attention.num_heads % 2 == 0


def without_gradients(module: nn.Module) -> bool:
    """Say whether a call of a module now records no gradients of its parameters."""
    return not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters())
