"""A dispatch mode that sees every op of a step: where it belongs, its dtypes, its FLOPs, and the bytes that it moves.

    a node       of an emitted graph, which runs node by node meanwhile
    a region     a graph that another compiler has compiled: what it dispatches is seen, what its kernels do is not
    outside      code outside of all graphs, by the user's line
    own          fxamp's own code, and torch's: copies of weights, the loss scale, gradients that are summed

An op in backward belongs where the op of the forward belongs that autograd recorded: both have one sequence number.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

import passes
from passes._torch import OpOverload, own_schema, pytree
from passes.contract.plan import Decision
from passes.contract.policy import dtype_name
from passes.graph.values import LOW_DTYPES, no_autocast
from passes.ops.rules import LOW, RULES

from .._torch import (
    MODULE_CALLS,
    Kernel,
    current_autograd_node,
    dispatch_modes,
    recorded_by_inductor,
    sequence_number,
    sequence_of,
    storage_id,
    without_modes,
)
from .interpret import Ops, Run
from .places import node_keys
from .tensors import strided

_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.dirname(__file__), passes.__file__)
)
USER_FILES = set[str]()  # files of fxamp's own with models such as users write
# What functions of fxamp's are that call the user's code, for `Place.by`, by the identity of their code: a hash of code
# reads all of it.
CALLERS = dict[int, str]()
_TO = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
_COPIES, _UNSCALE = torch.ops.aten._foreach_copy_.default, torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
Dtypes = tuple[str, ...]
LOW_NAMES: Dtypes = tuple(map(dtype_name, LOW_DTYPES))
Compile = Callable[[dict[str, Any], list[Any]], Callable[..., Any]]
_INSTEAD: ContextVar[Callable[[Any, GraphModule, tuple[Any, ...]], Any] | None] = ContextVar("instead", default=None)


@dataclass(frozen=True)
class Place:
    """Where an op belongs."""

    kind: str  # "node", "region", "outside", "own" or "gradients"
    where: str = ""  # the name of the node, or the user's line as "net.py:12"
    graph: int = -1  # which of the graphs that ran it is in
    module: str = ""  # for code outside of graphs: the path of the module
    inside: bool = False  # it is code outside of graphs, in a call of a view
    backward: bool = False  # it is in backward
    # for code outside of graphs: what called it, if that is known: "a method of a view", "a hook of backward"
    by: str = ""


@dataclass(frozen=True)
class Seen:
    """One kind of op at one place."""

    place: Place  # where
    op: str  # its name, such as "addmm"
    operands: Dtypes  # dtypes of its floating operands
    results: Dtypes  # dtypes of its floating results
    product: bool  # it is a matrix product, a convolution or an attention
    computes: bool  # it reads floating values, and makes new ones from them
    reads_parameter: bool  # it reads a parameter or a buffer of the model

    @property
    def dtype(self) -> str:
        """The dtype that it ran in; of a product that of the first operand: attention also reads FP32 statistics."""
        return dtype_of(self.operands or self.results, self.product)


@dataclass
class Sum:
    """How often ops of one kind ran, and what they cost."""

    count: int = 0
    flops: int = 0
    bytes: int = 0
    casts: int = 0
    cast_bytes: int = 0

    def add(self, other: Sum) -> None:
        """Add another sum."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Part:
    """What has a plan in a graph that runs: all of it, or a view that was traced into it."""

    known: Any  # what is known of the graph that was planned
    runner: Any = None  # of the view that was traced; None for a graph that is run by itself
    # the nodes of the plan's graph, by the names that they have in the graph that runs; None where they are the same
    names: Mapping[str, str] | None = None
    lifted: frozenset[str] = frozenset()  # the nodes of the plan's graph that became inputs


@dataclass
class Ran:
    """One graph that ran."""

    number: int  # its number among the graphs that ran
    known: Any  # what is known of the graph that was planned
    graph: GraphModule  # the graph that ran
    by: str  # the compiler that ran it, "" where it ran node by node
    part: Part = field(repr=False)  # which of the nodes that ran are its own
    calls: int = 0  # how often it ran
    # the dtypes of operands and of results of each node, by its name
    nodes: dict[str, tuple[Dtypes, Dtypes]] = field(default_factory=dict)
    # what Inductor has scheduled, of the forward and of the backward; None where it has not compiled it
    kernels: tuple[list[Kernel], list[Kernel]] | None = None

    @cached_property
    def emitted(self) -> dict[str, Node]:
        """The nodes of the graph as it was emitted, by name."""
        return {n.name: n for n in self.known.emitted.graph.nodes}

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key of each call, by name; that of the first reader for a cast."""
        return {n.name: key for n, key in node_keys(self.known.emitted.graph).items()}

    @cached_property
    def decisions(self) -> dict[str, Decision]:
        """What was decided on the graph itself, by key."""
        return {d.key: d for d in self.known.plan.decisions if not d.graph}

    def key(self, name: str) -> str:
        """Return the key of a node."""
        return self.keys.get(name, name)


class Watch(Ops):
    """Records what runs while it is on. Dynamo captures and runs graphs under it as without it.

    Args:
        model: whose modules and parameters are named.
        frame: the code of the function that runs the step; what lies further out is not the user's.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay off while Dynamo traces, and on while its graphs run."""
        return True

    def __init__(self, model: nn.Module, frame: CodeType) -> None:
        super().__init__(self.op)
        self.sums: dict[Seen, Sum] = {}  # what was seen
        self.graphs: list[Ran] = []  # that ran
        # Calls of views that did not run their plan: its model, why, and whether graphs of it ran.
        self.missed: list[tuple[nn.Module, str, bool]] = []
        self.entered: list[Any] = []  # the runners of the views that were called
        self.scaled = False  # a scaler has scaled a loss
        self.unscaled = 0  # how often gradients were unscaled
        self._names = {id(m): path for path, m in model.named_modules()}
        self._parameters = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
        self._frame = frame
        self._place: Place | None = None
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._view: Any = None
        self._numbers: list[int] = []  # of autograd, and the places of the ops that were recorded with them
        self._places: list[Place] = []

    def op(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an op, and note it."""
        out = func(*args, **named)
        inside = (
            [i for i, a in enumerate(args) if isinstance(a, OpOverload)] if not isinstance(func, OpOverload) else ()
        )
        if inside:  # what a checkpoint draws is an op beside the state of a generator, which is given or returned
            self._note(args[inside[0]], args[inside[0] + 1 :], named, out if inside[0] else out[1])
        else:
            self._note(func, args, named, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        place = self._here()
        if func.overloadpacket is _UNSCALE if isinstance(func, OpOverload) else False:
            self.unscaled += 1
        given, made = floats_in((args, named)), floats_in(out)
        if (given or made) and not gives_view(func):
            self._add(place, func, args, named, out, given, made)

    def _add(self, place: Place, func: Any, args: Any, kwargs: Any, out: Any, given: Any, made: Any) -> None:
        op = _name(func)
        reads = any(storage_id(t) in self._parameters for t in given)
        makes = any(isinstance(t, Tensor) for t in pytree.tree_leaves(out))
        computes = bool(given) and makes and not op.endswith("_like") and not op.startswith("new_")
        seen = Seen(place, op, _dtypes(given), _dtypes(made), _is_product(func), computes, reads)
        casts, moved = casts_in(func, args, out), sum(t.nbytes for t in strided((*given, *made)))
        formula = _formula(func)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
        cast_bytes = sum(a.nbytes + b.nbytes for a, b in casts)
        one = Sum(1, flops, moved, int(bool(casts)), cast_bytes)
        self.sums.setdefault(seen, Sum()).add(one)

    def _here(self) -> Place:
        node = current_autograd_node()
        if self._place is None and node is not None:
            return self._in_backward(node)
        place = self._place or self._outside()
        number = sequence_number() - 1  # what an op of autograd is recorded with before it is dispatched
        if number >= 0 and (not self._numbers or number > self._numbers[-1]):
            self._numbers.append(number)
            self._places.append(place)
        return place

    def _in_backward(self, node: Any) -> Place:
        outside = self._outside()
        if outside.kind == "outside":
            return replace(outside, backward=True, by=outside.by or "a hook or a function of autograd")
        at = bisect.bisect_right(self._numbers, sequence_of(node)) - 1
        if node.name() == "torch::autograd::AccumulateGrad" or at < 0:
            return Place("gradients", backward=True)
        return replace(self._places[at], backward=True)

    def _outside(self) -> Place:
        """Return the user's line that is running, the module, and whether it runs in a call of a view."""
        frame: FrameType | None = sys._getframe(2)
        line = module = by = ""
        while frame is not None and frame.f_code is not self._frame:
            code, file = frame.f_code, frame.f_code.co_filename
            if code in MODULE_CALLS:
                module = module or self._names.get(id(frame.f_locals["self"]), "")
            elif file in USER_FILES or not (file.startswith(_PACKAGES) or _is_compiled(frame)):
                line = line or ("" if file.startswith("<") else f"{os.path.basename(file)}:{frame.f_lineno}")
            elif id(code) in CALLERS:
                by = CALLERS[id(code)]
            elif code.co_name == "scale" and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
                self.scaled = True
            frame = frame.f_back
        inside = self._view is not None
        if not line and not module:
            return Place("own", inside=inside)
        return Place("outside", line, -1, module, inside, by=by)

    @contextlib.contextmanager
    def of_view(self, runner: Any) -> Iterator[None]:
        """Say that a view is called inside."""
        before, self._view = self._view, runner
        self.entered.append(runner)
        try:
            yield
        finally:
            self._view = before

    @contextlib.contextmanager
    def of_copies(self) -> Iterator[None]:
        """Say that weights are cast inside, for graphs to read."""
        before, self._place = self._place, Place("own")
        try:
            yield
        finally:
            self._place = before

    def run(
        self, parts: Sequence[Part], graph: GraphModule, by: str, run: Callable[..., Any], args: tuple[Any, ...],
        compile: Compile | None = None,
    ) -> Any:  # fmt: skip
        """Run a graph node by node, or as it is compiled, and record what it does."""
        ran = [self._begun(part, graph, by) for part in parts]
        self.entered += [part.runner for part in parts if part.runner is not None]
        before = self._place
        try:
            if not by:
                return self._steps(graph, ran).start(*args)
            self._place = Place("region", graph=ran[0].number)
            if by == "inductor" and compile is not None:
                run = self._recorded(ran, compile, args)
            return run(*args)
        finally:
            self._place = before

    def _steps(self, graph: GraphModule, ran: Sequence[Ran]) -> Run:
        """Return a run of a graph, node by node, in which each op is known to be at which node of which plan."""
        planned: dict[str, tuple[Ran, Place]] = {}
        for one in ran:
            names = one.part.names if one.part.names is not None else {n.name: n.name for n in graph.graph.nodes}
            planned.update((name, (one, Place("node", of_plan, one.number))) for name, of_plan in names.items())

        def call(run: Run, n: Node) -> Any:
            one, self._place = planned.get(n.name, (None, Place("own")))
            place, made = self._place, run.value_of(n)
            if one is not None:
                one.nodes[place.where] = dtypes_in([run.env.get(o) for o in n.all_input_nodes]), dtypes_in(made)
            return made

        return Run(graph, call)

    def where(self, place: Place) -> str:
        """Return how a place is called."""
        if place.kind == "node":
            return self.graphs[place.graph].key(place.where)
        if place.kind == "region":
            return f"(graph {place.graph}, compiled by {self.graphs[place.graph].by})"
        if place.kind == "outside":
            return place.module or place.where
        return {"gradients": "(gradients)", "own": "(loss, scaling and optimizer)"}[place.kind]

    def _begun(self, part: Part, graph: GraphModule, by: str) -> Ran:
        ran = next((ran for ran in self.graphs if ran.known is part.known), None)
        if ran is None:
            ran = Ran(len(self.graphs), part.known, graph, by, part)
            self.graphs.append(ran)
        ran.calls += 1
        return ran

    def _recorded(self, ran: Sequence[Ran], compile: Compile, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Have Inductor compile a graph once more, so that there is a record of what runs; its caches keep none."""
        found = self._compiled.get(id(ran[0]))
        if found is None:
            for one in ran:
                one.kernels = ([], [])

            def record(backward: bool, parts: list[Kernel]) -> None:
                for one in ran:
                    assert one.kernels is not None
                    names = one.part.names  # of the nodes in the graph of the plan; "" for others
                    one.kernels[backward].extend(
                        parts if names is None else (replace(k, made_from=names.get(k.made_from, "")) for k in parts)
                    )

            options = recorded_by_inductor(record)
            with without_modes(), no_autocast():
                found = self._compiled[id(ran[0])] = compile(options, list(args))
        return found


def watching() -> Watch | None:
    """Return the watch that is on, None where there is none."""
    modes = dispatch_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Watch)), None) if modes else None


@contextlib.contextmanager
def run_instead(run: Callable[[Any, GraphModule, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Run the emitted graphs of views, and those under `visible_graphs`, by something else.

    Args:
        run: called with what is known of a graph, the graph as emitted, and its inputs; returns its outputs.
    """
    token = _INSTEAD.set(run)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def is_run_instead() -> bool:
    """Say whether something else runs emitted graphs."""
    return _INSTEAD.get() is not None


def observed(
    known: Any, graph: GraphModule, by: str, run: Callable[..., Any], args: tuple[Any, ...],
    compile: Compile | None = None,
) -> Any:  # fmt: skip
    """Run a compiled graph so that a watch can see it: what `graph` was compiled to `by` a compiler, "eager" for none.

    `known` is what is known of the graph, or the parts of it that have plans; `compile` compiles it once more, with
    further options and for given inputs.
    """
    whole = not isinstance(known, tuple)
    if (instead := _INSTEAD.get()) is not None:
        return instead(known, graph, args)
    watch = watching()
    if watch is None or known == ():
        return run(*args)
    return watch.run((Part(known),) if whole else known, graph, "" if by == "eager" else by, run, args, compile)


def dtype_of(dtypes: Dtypes, product: bool) -> str:
    """Return the dtype of an op in one word, from those of its operands."""
    return dtypes[0] if product and dtypes else " and ".join(dict.fromkeys(dtypes))


def dtypes_in(values: Any) -> Dtypes:
    """Return the dtypes of the floating and complex tensors in a value, in order."""
    return _dtypes(floats_in(values))


def _dtypes(tensors: Sequence[Tensor]) -> Dtypes:
    return tuple(dtype_name(t.dtype) for t in tensors)


def floats_in(values: Any) -> list[Tensor]:
    """Return the floating and complex tensors in a value, in order."""
    leaves = pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def _is_compiled(frame: FrameType) -> bool:
    """Say whether code is what Inductor has written; it is loaded as a module of torch's."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


@functools.cache
def gives_view(func: Any) -> bool:
    """Say whether an op gives back its operand, or a view of it, and writes nothing."""
    if not isinstance(func, OpOverload):
        return False
    returns = own_schema(func).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@functools.cache
def _name(func: Any) -> str:
    return str(func.overloadpacket).rpartition(".")[2] if isinstance(func, OpOverload) else str(func)


@functools.cache
def _formula(func: Any) -> Any:
    """Return what counts the FLOPs of an op; the fused attention of a CPU counts as that of other devices."""
    if not isinstance(func, OpOverload):
        return None
    alike = getattr(torch.ops.aten, _name(func).replace("_for_cpu", ""), None)
    return flop_registry.get(func.overloadpacket) or (flop_registry.get(alike) if alike is not None else None)


@functools.cache
def _is_product(func: Any) -> bool:
    row = RULES.get(_name(func))
    return _formula(func) is not None or (row is not None and LOW in (row.cpu, row.cuda))


def casts_in(func: Any, args: tuple[Any, ...], out: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that an op casts, each with what it becomes."""
    pairs: list[tuple[Tensor, Tensor]] = []
    if func is _TO:
        pairs = [(args[0], out)]
    elif func is _COPY:
        pairs = [(args[1], args[0])]
    elif func is _COPIES:
        pairs = list(zip(args[1], args[0], strict=True))
    return [(a, b) for a, b in pairs if b.is_floating_point() and a.dtype != b.dtype]
