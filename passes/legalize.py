"""Pass 1: bring a captured graph into the form the rules speak of. Values do not change.

Before: wrap_with_set_grad_enabled(False, body, x)      After: prev = is_grad_enabled(); set_grad(False); ...; set_grad(prev)
Before: einsum("bi,ij->bj", x, w)                       After: the permutes, views and bmm that einsum runs for these shapes
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from . import ops
from ._torch import enter_autocast, exit_autocast
from .rules import lookup
from .values import SET_GRAD

_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def inline_regions(graph: Graph, constants: dict[str, Any]) -> int:
    """Replace the exporter's grad-mode and autocast regions by their bodies; return how many.

    Either becomes a switch before and after it. What an autocast region says is also left on its nodes, in
    `meta["autocast_region"]` as (device type, enabled, dtype), for the colours that take the switches' place.
    """
    edits = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and _hop_name(node) in _REGIONS:
            edits += 1 + _inline(graph, node, constants)
    return edits


def drop_autocast_switches(graph: Graph) -> int:
    """Erase the switches of inlined autocast regions, once casts say what is to run in which dtype; return how many."""
    switches = [n for n in graph.nodes if n.op == "call_function" and n.target in (enter_autocast, exit_autocast)]
    for node in reversed(switches):
        graph.erase_node(node)
    return len(switches)


def _hop_name(node: Node) -> str:
    target = node.target
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""


def _inline(graph: Graph, node: Node, constants: dict[str, Any]) -> int:
    if _hop_name(node) == "wrap_with_set_grad_enabled":
        enabled, holder, *args = node.args
        region = node.meta.get("autocast_region")
    else:
        device, dtype, enabled, cache, holder, *args = node.args
        region = (str(device), bool(enabled), dtype)
    body = _body(holder, constants)
    with graph.inserting_before(node):
        if _hop_name(node) == "wrap_with_set_grad_enabled":
            before = graph.call_function(torch.is_grad_enabled)
            graph.call_function(SET_GRAD, (enabled,))
            leave = (SET_GRAD, before)
        else:
            leave = (exit_autocast, graph.call_function(enter_autocast, (device, dtype, enabled, cache)))
        copied: dict[Node, Any] = {}
        placeholders = iter(args)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copied[inner] = next(placeholders)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], lambda n: copied[n])
            else:
                new = graph.node_copy(inner, lambda n: copied[n])
                if region is not None:
                    new.meta.setdefault("autocast_region", region)
                if new.op == "get_attr":
                    constants[f"{holder.name}_{inner.target}"] = _attribute(body, str(inner.target))
                    new.target = f"_fxamp.{holder.name}_{inner.target}"
                copied[inner] = new
        graph.call_function(leave[0], (leave[1],))
    _replace_outputs(graph, node, result)
    _erase_body(graph, holder, constants)
    edits = 0
    for new in copied.values():
        if isinstance(new, Node) and new.op == "call_function" and _hop_name(new) in _REGIONS:
            edits += 1 + _inline(graph, new, constants)
    return edits


def _body(holder: Any, constants: dict[str, Any]) -> GraphModule:
    body: GraphModule = constants[str(holder.target).removeprefix("_fxamp.")]
    return body


def _attribute(root: Any, path: str) -> Any:
    for atom in path.split("."):
        root = getattr(root, atom)
    return root


def _replace_outputs(graph: Graph, node: Node, result: Any) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(result[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _erase_body(graph: Graph, holder: Node, constants: dict[str, Any]) -> None:
    if holder.users:
        return
    name = str(holder.target).removeprefix("_fxamp.")
    target = holder.target
    graph.erase_node(holder)
    if not any(n.op == "get_attr" and n.target == target for n in graph.nodes):
        constants.pop(name, None)


def decompose_composites(graph: Graph, device: str) -> tuple[int, list[str]]:
    """Replace each op that has no colour of its own by the ops it runs for the shapes at hand.

    Returns the number of ops decomposed and, by name, those that cannot be and stay whole.
    """
    edits, kept = 0, []
    for node in list(graph.nodes):
        if node.op != "call_function" or lookup(ops.name(node), device)[1] != "composite":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and _decompose(graph, node):
            edits += 1
        else:
            kept.append(ops.name(node))
    return edits, kept


_UNROLLS = ("gru", "lstm", "rnn_tanh", "rnn_relu", "quantized_gru")  # one step of graph per step of time


def _decompose(graph: Graph, node: Node) -> bool:
    inputs = node.all_input_nodes
    values = [n.meta.get("val") for n in inputs]
    if ops.name(node) in _UNROLLS or not inputs or not all(isinstance(v, torch.Tensor) for v in values):
        return False
    if not all(hasattr(v, "fake_mode") for v in values):
        return False

    def run(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: given[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(values[0].fake_mode)  # type: ignore[union-attr]
        try:
            body = make_fx(run, _allow_non_fake_inputs=True)(*[v.detach() for v in values])  # type: ignore[union-attr]
        except Exception as e:  # whatever a fake kernel raises: the op stays whole, and the report says so
            logging.getLogger("fxamp").debug("%s stays whole: %s", node.name, e)
            return False
    if any(n.op == "get_attr" for n in body.graph.nodes):
        return False
    copied: dict[Node, Any] = {}
    places = iter(inputs)
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copied[inner] = next(places)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], lambda n: copied[n])
            else:
                copied[inner] = graph.node_copy(inner, lambda n: copied[n])
                for key in ("nn_module_stack", "stack_trace", "autocast_region"):
                    copied[inner].meta.pop(key, None)
                    if key in node.meta:
                        copied[inner].meta[key] = node.meta[key]
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    else:
        _replace_outputs(graph, node, result)
    return True


def loosen_assertions(graph: Graph, recoloured: Callable[[Node], bool]) -> int:
    """Drop the device from the exporter's assertions, for a module can be moved, and the dtype where it has changed."""
    edits = 0
    for node in graph.nodes:
        if ops.name(node) != "_assert_tensor_metadata" or not isinstance(node.args[0], Node):
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
        if recoloured(node.args[0]):
            node.args, node.kwargs = node.args[:3], {k: v for k, v in node.kwargs.items() if k != "dtype"}
        edits += 1
    return edits
