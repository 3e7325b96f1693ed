"""Low copies of parameters that are made once and read by many calls: in a window of TrainStep, and in `frozen`.

In a function that is compiled for a window, the casts of parameters are lifted out of the graph and become its inputs.
A call fetches them from the copies that are open on its view, and casts where none are.

Before: graph(w): to = w.to(bfloat16); linear(x, to)
After:  graph(w, low): linear(x, low)        low = copies.of(w, bfloat16)
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import SET_GRAD, FakeTensor
from passes.contract.errors import CaptureError
from passes.graph.aliases import Aliases, mutated_operands
from passes.graph.notes import is_inserted
from passes.runtime.casts import cast_weight

from .._torch import copy_together, is_stand_in, mark_static_address, of_fixed_sizes, run_as_soon_as_ready


class _Reader(torch.autograd.Function):
    """A second reader of a low copy before backward: its gradient arrives at the master by itself, in FP32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _Copy:
    """The low copy of one parameter.

    Attributes:
        master: the parameter.
        low: the copy, without a history.
        node: the same memory as a cast of the parameter that autograd has recorded; `low`, if the parameter is frozen.
        valid: it holds what the parameter held when it was cast.
        taken: a graph has read `node`, and no backward has run since.
        read: it was read in the present window, or in the last one.
    """

    __slots__ = ("_like", "_state", "low", "master", "node", "read", "taken", "valid")

    def __init__(self, master: Tensor, dtype: torch.dtype, forget: Callable[[Any], None]) -> None:
        self.master = weakref.ref(master, forget)
        with torch.inference_mode(False), torch.set_grad_enabled(master.requires_grad):
            self.node = master.to(dtype, copy=True)
        self.low = self.node.detach()
        if master.requires_grad:
            run_as_soon_as_ready(self.node)
        for tensor in (self.node, self.low):
            mark_static_address(tensor)
        self._like, self.read = _like(master), False
        self.filled(master)

    def filled(self, master: Tensor) -> None:
        """Note that the copy holds what the parameter holds now."""
        self.valid, self.taken, self._state = True, False, _state(master)

    def holds(self, master: Tensor) -> bool:
        """Say whether the parameter is, as far as it can be told, what it was when it was cast."""
        return self.valid and self._state == _state(master)

    def fits(self, master: Tensor | None) -> bool:
        """Say whether the parameter can be cast into this memory."""
        return master is not None and self._like == _like(master)


def _state(master: Tensor) -> tuple[Any, ...]:
    return (None if master.is_inference() else master._version), master.data_ptr(), master.requires_grad


def _like(master: Tensor) -> tuple[Any, ...]:
    return master.shape, master.dtype, master.device, master.stride(), master.requires_grad


class Copies:
    """Low copies of parameters: one buffer for a parameter and dtype, at one address as long as this object lives.

    A parameter that is written to, moved or frozen while copies are open is cast again, into other memory: what was
    saved for a backward stays as it was.

    Args:
        owner: what they are open for, as an error names it.
        keeps_edits_out: read what was cast when the copies were opened, whatever becomes of a parameter; no gradient
            reaches it.

    Attributes:
        casts: how many casts were made.
    """

    def __init__(self, owner: str = "a window of a TrainStep", keeps_edits_out: bool = False) -> None:
        self.owner, self.casts = owner, 0
        self._frozen, self._said = keeps_edits_out, False
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}

    def of(self, master: Tensor, dtype: torch.dtype, flagged: bool = False) -> Tensor:
        """Return the copy of a parameter, which is made if there is none that is valid.

        If it is `flagged`, it requires a gradient as the parameter does, also where none are computed.
        """
        if self._frozen and not self._said and torch.is_grad_enabled() and master.requires_grad:
            self._said = True
            warnings.warn(
                f"a call inside {self.owner} records gradients, and none reaches a weight there: call under "
                "torch.no_grad() for inference, or train outside of the region.", stacklevel=2,
            )  # fmt: skip
        copy = self._copies.get((id(master), dtype))
        if copy is None or not (copy.holds(master) or (self._frozen and copy.valid)):
            copy = self._cast(master, dtype, copy)
        copy.read = True
        if not torch.is_grad_enabled():
            return copy.node if flagged and not torch.is_inference_mode_enabled() else copy.low
        if self._frozen or not master.requires_grad:
            return copy.low
        if not copy.taken:
            copy.taken = True
            return copy.node
        reader: Tensor = _Reader.apply(master, copy.low)  # type: ignore[no-untyped-call]
        run_as_soon_as_ready(reader)
        return reader

    def _cast(self, master: Tensor, dtype: torch.dtype, copy: _Copy | None) -> _Copy:
        key = (id(master), dtype)
        self.casts += 1
        if copy is None or copy.valid or not copy.fits(master):
            ours = weakref.ref(self)
            copy = self._copies[key] = _Copy(master, dtype, lambda _: _forget(ours(), key))
        else:
            with torch.no_grad():
                copy.low.copy_(master)
            copy.filled(master)
        return copy

    def open(self) -> None:
        """Begin a window: cast again, in place and together, all that was read in the last one."""
        read: list[tuple[_Copy, Any]] = [(copy, copy.master()) for copy in self._copies.values() if copy.read]
        found = [(copy, master) for copy, master in read if copy.fits(master)]
        self.end()
        if found and not torch.is_inference_mode_enabled():
            with torch.no_grad():
                copy_together([copy.low for copy, _ in found], [master for _, master in found])
            for copy, master in found:
                copy.filled(master)
            self.casts += len(found)
        for copy in self._copies.values():
            copy.read = False

    def after_backward(self) -> None:
        """Let the next forward read each copy as the first one did."""
        for copy in self._copies.values():
            copy.taken = False

    def end(self) -> None:
        """Say that no copy is valid any more; the memory stays."""
        for copy in self._copies.values():
            copy.valid = False

    def __len__(self) -> int:
        return len(self._copies)


def _forget(copies: Copies | None, key: tuple[int, torch.dtype]) -> None:
    if copies is not None:
        copies._copies.pop(key, None)


class Opened:
    """The copies that are open on a view: one at a time, and not kept alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: weakref.ref[Copies] | None = None

    def __call__(self) -> Copies | None:
        """Return them, None if there are none."""
        return None if self._copies is None else self._copies()

    def open(self, copies: Copies, view: str) -> None:
        """Open copies.

        Raises:
            CaptureError: others are open; `view` is the name that the error gives to the view.
        """
        with self._lock:
            other = self()
            if other is not None and other is not copies:
                raise CaptureError(
                    f"{copies.owner} cannot be opened over {view}, on which {other.owner} is open: end that first. "
                    "TrainStep(weights='per_use') needs no weights of its own, and step.flush() ends a window."
                )
            self._copies = weakref.ref(copies)

    def close(self, copies: Copies) -> None:
        """Close copies, if they are the ones that are open."""
        with self._lock:
            if self() is copies:
                self._copies = None


class Lifted(NamedTuple):
    """A cast of a parameter that is an input of the graph: which input the parameter is, and as `Copies.of` has it."""

    place: int
    dtype: torch.dtype
    flagged: bool


def weight_casts(graph: Graph, kept: Mapping[int, Any], *, sums_inside: bool = False) -> Iterator[tuple[Node, Lifted]]:
    """Yield the casts that can be lifted out of a graph, of which `kept` are the parameters by place.

    A cast stays if the graph may have written to the parameter before. If gradients are summed inside the graph's own
    backward, that of an input is added after that: of three or more the sum would have another order, and the cast
    stays too.
    """
    places = [n for n in graph.nodes if n.op == "placeholder"]
    at = {n: i for i, n in enumerate(places) if i in kept}
    casts = [n for n in graph.nodes if n.op == "call_function" and is_inserted(n) and n.args[0] in at]
    known, counted = set(casts), _with_gradients(graph) if sums_inside else set()
    aliases = Aliases(graph)
    for node in casts:
        master: Any = node.args[0]
        others = [user for user in master.users if user not in known and user in counted]
        leaves = any(user.op == "output" or node in mutated_operands(user) for user in node.users)
        if not leaves and len(others) < 2 and not aliases.epoch(master, node):
            dtype: Any = node.args[1]
            yield node, Lifted(at[master], dtype, node.target is cast_weight)


def _with_gradients(graph: Graph) -> set[Node]:
    """Return the nodes of a graph that run with gradients on."""
    found, enabled = set(), True
    for node in graph.nodes:
        if node.target is SET_GRAD:
            enabled = bool(node.args[0])
        elif enabled:
            found.add(node)
    return found


def is_plain(value: object) -> bool:
    """Say whether a value is a parameter that is a tensor by itself, not a class whose calls gather or exchange it.

    Of a program that runs on fake tensors, its parameters are; of a trace, those that stand for others are not.
    """
    if type(value) is nn.Parameter:
        return True
    return isinstance(value, nn.Parameter) and isinstance(value, FakeTensor) and not is_stand_in(value)


def lift(
    gm: GraphModule, inputs: Sequence[Any], *, sums_inside: bool = False
) -> tuple[GraphModule, list[Any], list[Lifted]]:
    """Return a copy of a graph in which casts of parameters are further inputs, its inputs, and what each casts."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    examples, lifted = list(inputs), list[Lifted]()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    kept = {i: v for i, v in enumerate(inputs) if is_plain(v)}
    for node, what in list(weight_casts(graph, kept, sums_inside=sums_inside)):
        with graph.inserting_after(places[-1]):
            new = graph.placeholder(f"low_{what.place}_{len(lifted)}")
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "example_value")}
        places.append(new)
        lifted.append(what)
        master = inputs[what.place]
        low = master.detach().to(what.dtype).requires_grad_(master.requires_grad)
        examples.append(of_fixed_sizes(low))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return GraphModule(gm, graph), examples, lifted


def with_copies(
    run: Callable[..., Any], lifted: Sequence[Lifted], opened: Callable[[], Copies | None]
) -> Callable[..., Any]:
    """Return a function that calls a graph with the casts that were lifted out of it."""
    return lambda *args: run(*args, *lifted_inputs(lifted, opened, args))


def lifted_inputs(
    lifted: Sequence[Lifted], opened: Callable[[], Copies | None], args: Sequence[Any]
) -> Iterator[Tensor]:
    """Yield the casts that were lifted out of a graph, for the inputs of a call of it."""
    copies = opened()
    low = _cast if copies is None else copies.of
    return (low(args[place], dtype, flagged) for place, dtype, flagged in lifted)


def _cast(master: Tensor, dtype: torch.dtype, flagged: bool) -> Tensor:
    return cast_weight(master, dtype) if flagged else master.to(dtype)
