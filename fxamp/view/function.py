"""One function that Dynamo compiles for a view: fresh code with a cache of its own, and the backend that converts.

def forward(model, *args, **kwargs):        # fresh code: the cache is the view's own
    outputs = model(*args, **kwargs)        # the model is an argument, so that a twin runs by the same graphs
    return the outputs, marked as leaving the model, where one graph has all of it

It is called under the view's autocast, and a graph runs with autocast off. What Dynamo captures under another state of
autocast lies in a region of the author's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import enter_autocast, exit_autocast, pytree
from passes.graph.outputs import viewed
from passes.graph.values import LOW_DTYPES

from .._torch import (
    answer_whether_exporting,
    code_being_captured,
    forget_compiled,
    global_module_hooks,
    is_replica_running,
    pop_mode,
    push_mode,
    source_name,
)
from ..capture.backend import inner_of, recompute_as_written, rewrite, run_by
from ..capture.call import Call, current
from ..capture.compiled import Converted, break_of, copied, elsewhere
from ..capture.emitted import Kept, at_call
from ..capture.frames import Frames, forward_of
from ..capture.outputs import is_whole, leaving
from .copies import Lifted, lift, with_copies
from .replay import Replaying
from .state import State, state_of

if TYPE_CHECKING:
    from .runner import Runner

_SWITCHES = (enter_autocast, exit_autocast, leaving)  # of regions, and marks; a graph of these alone is no plan
_OURS = re.compile(rf' *File "{re.escape(__file__)}".*\n.*\n?')  # the frame of the function that is compiled


class Captured(BaseException):
    """Raised in the place of running a graph: Dynamo has stored it, and nothing of the model has run."""


@dataclass(frozen=True)
class Entry:
    """One graph of a view.

    Attributes:
        number: its number, in the order of capture.
        converted: the graph as emitted, and its plan.
        captured: the graph as captured.
        names: the names in the model of the parameters and buffers among its inputs, by place.
        constants: the numbers of the model among its inputs, by place.
        state: what it was captured in.
        seconds: how long the inner backend took.
        kept: what its compiler keeps for backward; None if it runs as it was emitted.
    """

    number: int
    converted: Converted
    captured: GraphModule
    names: Mapping[int, str]
    constants: Mapping[int, Tensor]
    state: State
    seconds: float
    kept: Kept | None = None


class Function:
    """One compiled function of a view: its cache, and what became of the frames that its calls reached.

    Attributes:
        kind: "plain"; or "window", where casts of parameters are inputs.
        method: the name of the method that is captured, "" for a call.
        frames: what Dynamo makes of each frame.
        stale: says, if not None, that what was captured holds no longer.
        called: a call has ended since the function was made, or cleared.
    """

    def __init__(self, runner: Runner, kind: str, method: str) -> None:
        self.runner, self.kind, self.method = weakref.ref(runner), kind, method
        self.stale: Callable[[], bool] | None = None
        self.called = False
        self._author = _code_of(runner.model, method)
        function = function_of(runner, method)
        self._code = function.__code__
        self.codes = {self._code}  # and what Dynamo compiles below a graph break
        ours, runner_of = weakref.ref(self), weakref.ref(runner)

        def fxamp(gm: GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:  # by this name torch logs it
            found: Any = ours()
            run: Callable[..., Any] = found._compiled(gm, inputs)
            return run

        def model_of() -> nn.Module:
            found: Any = runner_of()
            model: nn.Module = found.model
            return model

        def settings() -> dict[str, Any]:
            found: Any = runner_of()
            split = {"optimize_ddp": False} if found.backend == "eager" and is_replica_running() else {}
            return {**found.dynamo_settings, **split}  # gradients of single ops leave early without a split

        answer_whether_exporting()
        self.frames = Frames(function, fxamp, model_of, settings, dynamic=runner.dynamic, fullgraph=runner.fullgraph)
        self.call = self.frames.call
        weakref.finalize(self, forget_compiled, function.__code__)  # torch would keep the graphs of code that is gone

    def refresh(self, model: nn.Module) -> None:
        """Forget what holds no longer; somebody may also have replaced the method of the model's class."""
        author = _code_of(model, self.method)
        if author is not self._author or (self.stale is not None and self.stale()):
            self._author = author
            self.clear()

    def clear(self) -> None:
        """Forget what was compiled, and that Dynamo gave the code up; the plan stays readable."""
        for code in self.codes:
            forget_compiled(code)
        self.frames.forget()
        self.stale, self.called = None, False

    def _compiled(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Convert a graph that Dynamo captures, keep it on the view, and return what its inner compiler makes of it."""
        if not any(n.op.startswith("call") and n.target not in _SWITCHES for n in gm.graph.nodes):
            return _idle(gm.forward, break_of(gm))
        runner: Any = self.runner()
        call = current()
        self.codes.add(code := code_being_captured())
        model = runner.model if call is None else call.model
        state = state_of(model, self.method)
        names = names_in(model)
        named = {i: names[id(v)] for i, v in enumerate(example_inputs) if id(v) in names}
        constants = _constants(gm, example_inputs, named)
        _hide_ours(gm)
        if in_region := call is not None and not runner.in_region():
            _enter_region(gm, runner.device)
        captured = copied(gm)
        for each in (captured, gm) if runner.backend == "eager" else (captured,):
            recompute_as_written(each)
        plan = runner.replayed
        replaying = None if plan is None else Replaying(plan, runner.entries, state, break_of(gm))
        converted, outputs = rewrite(
            gm, example_inputs, runner.policy, runs_on=runner.device, in_region=in_region, costs=runner.costs,
            replayed=replaying,
        )  # fmt: skip
        if replaying is not None:
            runner.note(*replaying.notes(converted.plan))
        run, inner, seconds = self._inner_compiled(gm, example_inputs, converted)
        kept = None if inner == "eager" else Kept(inner)
        number = len(runner.entries)
        if model is not runner.model:  # a twin's, of code that Dynamo captured once more
            same = (e for e in runner.entries if e.state == state and e.converted.computed == converted.computed)
            number = next((e.number for e in same), number)
        if number == len(runner.entries):
            runner.entries.append(Entry(number, converted, captured, named, constants, state, seconds, kept))
        if hooks := _global_hooks():
            self.stale = lambda: _global_hooks() != hooks
        crossing = _Crossing(_read_inputs(converted.graph.graph, example_inputs), converted.read)
        whole = code is self._code and not converted.broke
        run = _numbered(run, captured, number, kept, self.runner, crossing, whole)
        return at_call(run, converted, example_inputs, outputs, partial(_reused, self.runner, number))

    def _inner_compiled(
        self, gm: GraphModule, inputs: Sequence[Any], converted: Converted
    ) -> tuple[Callable[..., Any], Any, float]:
        """Return what runs an emitted graph, what has compiled it, and how long that took.

        What the inner compiler refuses runs node by node, as emitted.
        """
        runner: Any = self.runner()
        inner = inner_of(gm.graph, runner.backend)
        whole, inputs, lifted = gm, list(inputs), list[Lifted]()
        if self.kind == "window":
            whole, inputs, lifted = lift(gm, inputs, sums_inside=inner != "eager")
        started = time.perf_counter()
        try:
            run = run_by(inner, runner.mode, runner.options, whole, inputs, converted)
        except Exception as e:  # whatever a compiler raises
            if inner == "eager":
                raise
            runner.say_refused(inner, e)
            inner, run = "eager", run_by("eager", None, {}, whole, inputs, converted)
        seconds = time.perf_counter() - started
        if lifted:
            run = with_copies(run, lifted, runner.opened)
        return run, inner, seconds


def _constants(gm: GraphModule, inputs: Sequence[Any], named: Mapping[int, str]) -> dict[int, Tensor]:
    """Return the numbers of the model among the inputs of a graph, by place."""
    sources = [source_name(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return {
        i: v.detach().clone() for i, v in enumerate(inputs)
        if isinstance(v, Tensor) and not v.dim() and i not in named and sources[i].startswith("L['model']")
    }  # fmt: skip


def _hide_ours(gm: GraphModule) -> None:
    """Leave the frame of the compiled function out of where nodes were made."""
    for node in gm.graph.nodes:
        if trace := node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _OURS.sub("", trace)


def _idle(run: Callable[..., Any], broke: str) -> Callable[..., Any]:
    """Return a graph without ops that says to the call under way that it ran."""

    def call(*args: Any) -> Any:
        if (under_way := current()) is not None:
            under_way.idle.append(broke)
        return run(*args)

    return call


def _enter_region(gm: GraphModule, device: str) -> None:
    """Put a graph into the autocast region of the author's own that it was captured in."""
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    state = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), None
    with gm.graph.inserting_before(first):
        enter = gm.graph.call_function(enter_autocast, state)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(exit_autocast, (enter,))


def _code_of(model: nn.Module, method: str) -> object:
    return getattr(getattr(type(model), method or "forward", None), "__code__", None)


def function_of(
    runner: Runner, method: str, leave: Callable[[Any], Any] = leaving, reads: Callable[[Any], Any] | None = None,
    **region: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Return the function to compile, with code of its own: `forward(model, *args, **kwargs)`.

    `leave` marks its outputs while it is traced, of which `reads` returns what the code around it reads; None for all.
    With a `region`, further arguments of one, the model is called in an autocast region inside the trace.
    """
    device, low = runner.device, runner.low
    author: Any = getattr(type(runner.model), method) if method else None
    # On the meta device a trace has FP32 where autocast makes low values; O2 casts what half complex numbers are of.
    dtypes = (low, torch.float32, torch.complex64, torch.complex32)
    mark = torch.compiler.allow_in_graph(leave) if runner.restores else None
    autocast, tree_map, tree_leaves, whole = torch.autocast, pytree.tree_map, pytree.tree_leaves, is_whole

    def marked(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mark(value) if mark is not None and value.dtype in dtypes else value
        fields = value.__dict__ if is_dataclass(value) and hasattr(value, "__dict__") else {}
        if isinstance(value, type) or not any(v.dtype == low for v in tree_leaves(fields) if isinstance(v, Tensor)):
            return value
        result = object.__new__(type(value))
        for name, field in fields.items():
            object.__setattr__(result, name, tree_map(marked, field, is_leaf=whole))  # a frozen class has no other way
        return result

    def rounded(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        with autocast(device, dtype=low, **region):
            outputs = model(*args, **kwargs) if author is None else author(model, *args, **kwargs)
        outputs = outputs if reads is None else reads(outputs)
        return outputs if mark is None else tree_map(marked, outputs, is_leaf=whole)

    def plain(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        outputs = model(*args, **kwargs) if author is None else author(model, *args, **kwargs)
        traced = mark is not None and torch.compiler.is_compiling()  # behind a break Python runs this
        return tree_map(marked, outputs, is_leaf=whole) if traced else outputs

    forward: Any = rounded if region and runner.policy.level.rounds else plain
    code = forward.__code__.replace(co_name=f"{method or 'forward'}_of_{type(runner.model).__name__}")
    return types.FunctionType(code, _globals_for(runner.model), closure=forward.__closure__)


def _globals_for(model: nn.Module) -> dict[str, Any]:
    """Return the globals for the function to compile: of a module of the model that Python cannot import, else ours.

    Dynamo imports the module of a function that it inlines, unless it has the globals of the outermost function.
    """
    for forward in dict.fromkeys(forward_of(type(module)) for module in model.modules()):
        found: dict[str, Any] = getattr(forward, "__globals__", globals())
        name = found.get("__name__")
        if name in sys.modules and vars(sys.modules[name]) is not found:
            return found  # another module has this name
        if name is not None and name not in sys.modules and not _is_found(name):
            return found
    return globals()


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def names_in(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters and buffers, by identity."""
    return {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}


def _global_hooks() -> list[int]:
    return [id(hook) for hook in global_module_hooks()]


def _reused(runner_of: weakref.ref[Runner], number: int, converted: Converted, inputs: Sequence[Any]) -> None:
    """Keep a graph of a view for other parameters of its model too."""
    runner: Any = runner_of()
    names = names_in(runner.model)
    if id(inputs[converted.places[0]]) not in names:  # as `functional_call` swaps them
        return
    named = {i: names[id(v)] for i, v in enumerate(inputs) if id(v) in names}
    entry = replace(runner.entries[number], converted=elsewhere(converted, inputs, names), names=named)
    if converted.parameters:
        runner.entries.append(replace(entry, number=len(runner.entries)))
    else:  # a part that torch makes of a graph for DistributedDataParallel, whose parameters were not there
        runner.entries[number] = entry


class _Crossing(NamedTuple):
    """The values at the border of a graph from which others are computed, and which a caller may be handed.

    Attributes:
        inputs: The places of inputs with gradients: an earlier graph of the call may have made them.
        outputs: The places of outputs from which other outputs are computed.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def note(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Note for a call which low values something was computed from in a run of the graph."""
        for value in (*(inputs[i] for i in self.inputs), *(outputs[i] for i in self.outputs)):
            if value.dtype in LOW_DTYPES and value.requires_grad:
                call.read[id(value)] = value


def _read_inputs(graph: Graph, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of the inputs with gradients, parameters aside, from which a graph computes something."""
    values = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    return tuple(
        i for i, (node, value) in enumerate(values)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad and _is_read(node)
    )  # fmt: skip


def _is_read(value: Node) -> bool:
    """Say whether something is computed from a value; a view of it is no more than that."""
    return any(u.op.startswith("call") and (viewed(u) is None or _is_read(u)) for u in value.users)


def _numbered(
    run: Callable[..., Any], captured: GraphModule, number: int, kept: Kept | None, runner_of: weakref.ref[Runner],
    crossing: _Crossing, whole: bool,
) -> Callable[..., Any]:  # fmt: skip
    """Return a compiled graph that says to the call under way that it ran, and does what that call is for.

    If it is the `whole` of the call, it hands out what the model returns.
    """
    crosses = any(crossing)

    def call(*args: Any) -> Any:
        under_way = current()
        if under_way is None:
            return run(*args)
        if under_way.does == "capture":
            raise Captured
        if under_way.does == "compare":
            runner: Any = runner_of()
            with runner.region(cache=False):
                outputs = captured(*args)
            under_way.made += map(weakref.ref, filter(_is_tensor, outputs))
            return outputs
        under_way.ran.append(number)
        under_way.whole = whole
        if under_way.modes:
            with _modes_of(under_way):
                outputs = run(*args)
        else:
            outputs = run(*args)
        if kept is not None:
            kept(args, outputs)
        if not whole:
            under_way.made += map(weakref.ref, filter(_is_tensor, outputs))
        if crosses:
            crossing.note(under_way, args, outputs)
        return outputs

    return call


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@contextlib.contextmanager
def _modes_of(call: Call) -> Iterator[None]:
    """Run with the dispatch modes on that were on when a view was called."""
    modes, call.modes = call.modes, []
    for mode in modes:
        push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop_mode()
        call.modes = modes
