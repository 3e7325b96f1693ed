"""The costs of each node at the example's sizes: bytes of its values, operations, bytes kept for backward.

The graph runs once on fake tensors, which have dtypes and sizes and no values, so nothing is computed and no device is
needed. Symbolic sizes count as the example had them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from passes._torch import FakeTensorMode, pytree, quiet_fakes
from passes.contract.errors import FxampError
from passes.contract.policy import dtype_name
from passes.graph.notes import is_ours
from passes.graph.values import no_autocast
from passes.runtime import norms

from ..._torch import storage_id
from ...observe.snapshot import same_random_state
from ...observe.tensors import held, kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Size:
    """The costs of one node, as its record has them, and the bytes of the tensors that it reads.

    What a fused kernel, such as that of an LSTM, keeps internally for backward is not seen. On a CPU a layer norm of
    low values with FP32 weights keeps FP32 statistics; those of its fake kernel, which are counted, are low.
    """

    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    read_bytes: int = 0
    bytes: int = 0
    flops: int = 0
    saved_bytes: int = 0


def sizes_of(
    module: GraphModule, casts: bool = True, autocast: tuple[str, torch.dtype] | None = None
) -> dict[Node, Size] | None:
    """Return the costs of every node of a graph, or of the user's graph, without the inserted `casts`.

    It runs under the `torch.autocast` whose device and dtype are given. The costs are not known, None, if nothing is
    known of its inputs in `meta["val"]`, or if it needs the values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    walk = _Walk(module, mode, casts)
    ambient = no_autocast() if autocast is None else torch.autocast(autocast[0], dtype=autocast[1])
    opaque = module.graph.find_nodes(op="call_module")  # modules that read their own tensors, and may write to them
    saving = torch.autograd.graph.saved_tensors_hooks(walk.saves, lambda tensor: tensor)
    try:
        inputs = [_example(node, mode) for node in module.graph.find_nodes(op="placeholder")]
        with (
            kept(held(module).values() if opaque else ()), same_random_state(), ambient, torch.enable_grad(),
            quiet_fakes(), mode, walk.counter, saving,
        ):  # fmt: skip
            walk.run(*inputs, enable_io_processing=False)
    except Exception:  # an op may fail in any way on tensors without values
        logger.debug("not sized", exc_info=True)
        return None
    return walk.sizes


def _example(node: Node, mode: FakeTensorMode) -> Any:
    value = node.meta.get("val")
    if value is None:
        raise FxampError(f"nothing is known of the input '{node.name}'")
    if not isinstance(value, Tensor):
        return _hint(value)
    with mode:
        made = torch.empty([_hint(n) for n in value.shape], dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad and value.is_floating_point())


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


class _Walk(Interpreter):
    """Runs every node, and records its costs."""

    def __init__(self, module: GraphModule, mode: FakeTensorMode, casts: bool) -> None:
        super().__init__(module)
        self._mode, self._casts = mode, casts
        self.sizes: dict[Node, Size] = {}
        self.counter: Any = FlopCounterMode(display=False)
        self._saved = 0  # bytes, by the node that runs, and by what was inserted before it
        self._alive: dict[int, Any] = {}  # the storages that were saved: the id of one that is freed is used again

    def run_node(self, n: Node) -> Any:
        ours = is_ours(n)
        if not self._casts and ours:
            return self.env[n.all_input_nodes[0]]
        before = self.counter.get_total_flops()
        made = super().run_node(n)
        if n.op.startswith("call"):
            given, results = _tensors([self.env.get(o) for o in n.all_input_nodes]), _tensors(made)
            self.sizes[n] = Size(
                tuple(dtype_name(t.dtype) for t in results), tuple(tuple(map(int, t.shape)) for t in results),
                sum(t.nbytes for t in given), sum(t.nbytes for t in results),
                self.counter.get_total_flops() - before, 0 if ours else self._saved,
            )  # fmt: skip
            self._saved = self._saved if ours else 0
        return made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; without casts a norm is whole, as the user's is."""
        whole = target is norms.layer_norm and not self._casts
        return super().call_function(F.layer_norm if whole else target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake copy of a tensor, so that the graph never writes to the model's own."""
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value) if type(value) in (Tensor, nn.Parameter) else value

    def saves(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor that is saved for backward, once."""
        if not isinstance(tensor, nn.Parameter) and storage_id(tensor) not in self._alive:
            self._alive[storage_id(tensor)] = storage = tensor.untyped_storage()
            self._saved += storage.nbytes()
        return tensor


def _tensors(values: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]
