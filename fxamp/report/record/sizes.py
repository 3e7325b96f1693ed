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
from torch.utils.flop_counter import FlopCounterMode

from passes._torch import FakeTensorMode, pytree, quiet_fakes, storage_id
from passes.contract.errors import FxampError
from passes.contract.policy import dtype_name
from passes.graph.notes import is_inserted
from passes.graph.values import no_autocast

from ...trust.preserved import same_random_state
from ...trust.tensors import held, kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Size:
    """The costs of one node.

    Attributes:
        dtypes: dtypes of its floating results, without "torch.".
        shapes: shapes of its results, at the example's sizes.
        read_bytes: bytes of the tensors that it reads.
        bytes: bytes of its results.
        flops: floating-point operations of its forward, by torch's formulas; 0 if torch has none for it.
        saved_bytes: bytes of the storages that it is the first to keep for backward, parameters excluded. What a fused
            kernel, such as that of an LSTM, keeps internally is not seen.
    """

    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    read_bytes: int = 0
    bytes: int = 0
    flops: int = 0
    saved_bytes: int = 0


class SizeError(FxampError):
    """A graph cannot be run on fake tensors."""


def sizes_of(
    module: GraphModule, casts: bool = True, autocast: tuple[str, torch.dtype] | None = None
) -> dict[Node, Size]:
    """Return the costs of every node.

    Args:
        module: a graph whose placeholders have the example's shapes and dtypes in `meta["val"]`.
        casts: False leaves out inserted casts, so that the user's graph is measured.
        autocast: device and dtype of a `torch.autocast` to run under; None for none.

    Raises:
        SizeError: Nothing is known of its inputs, or it needs the values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [_example(node, mode) for node in module.graph.find_nodes(op="placeholder")]
    walk = _Walk(module, mode, casts)
    ambient = no_autocast() if autocast is None else torch.autocast(autocast[0], dtype=autocast[1])
    opaque = module.graph.find_nodes(op="call_module")  # modules that read their own tensors, and may write to them
    saving = torch.autograd.graph.saved_tensors_hooks(walk.saves, lambda tensor: tensor)
    try:
        with (
            kept(held(module).values() if opaque else ()), same_random_state(), ambient, torch.enable_grad(),
            quiet_fakes(), mode, walk.counter, saving,
        ):  # fmt: skip
            walk.run(*inputs, enable_io_processing=False)
    except Exception as e:  # an op may fail in any way on tensors without values
        logger.debug("not sized", exc_info=True)
        raise SizeError(f"the graph cannot be sized: {type(e).__name__}: {str(e).strip().splitlines()[:1]}") from e
    return walk.sizes


def _example(node: Node, mode: FakeTensorMode) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        with mode:
            made = torch.empty([_hint(n) for n in value.shape], dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad and value.is_floating_point())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _hint(value)
    if value is None:
        raise SizeError(f"the graph cannot be sized: nothing is known of its input '{node.name}'; give example inputs")
    return value


def _hint(size: Any) -> Any:
    return size if isinstance(size, (int, float)) else size.node.hint


class _Walk(Interpreter):
    """Runs every node, and records its costs."""

    def __init__(self, module: GraphModule, mode: FakeTensorMode, casts: bool) -> None:
        super().__init__(module)
        self._mode, self._casts = mode, casts
        self.sizes: dict[Node, Size] = {}
        self.counter: Any = FlopCounterMode(display=False)
        self._saved = 0  # bytes, by the node that runs
        self._alive: dict[int, Any] = {}  # the storages that were saved: the id of one that is freed is used again

    def run_node(self, n: Node) -> Any:
        if not self._casts and is_inserted(n):
            return self.env[n.all_input_nodes[0]]
        before, self._saved = self.counter.get_total_flops(), 0
        made = super().run_node(n)
        if n.op.startswith("call"):
            given, results = _tensors([self.env.get(o) for o in n.all_input_nodes]), _tensors(made)
            self.sizes[n] = Size(
                tuple(dtype_name(t.dtype) for t in results), tuple(tuple(map(int, t.shape)) for t in results),
                sum(t.nbytes for t in given), sum(t.nbytes for t in results),
                self.counter.get_total_flops() - before, self._saved,
            )  # fmt: skip
        return made

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
