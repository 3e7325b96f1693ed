"""One function that Dynamo compiles for a view: fresh code with a cache of its own, and the backend that converts.

def forward(model, *args, **kwargs):        # fresh code: the cache is the view's own
    outputs = model(*args, **kwargs)        # the model is an argument, so that a twin runs by the same graphs
    return the outputs, marked as leaving the model, where one graph has all of it

It is called under the view's autocast, and a graph runs with autocast off. What Dynamo captures under another state of
autocast lies in a region of the author's own.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from passes._torch import enter_autocast, exit_autocast, pytree
from passes.graph.aliases import Aliases

from .._torch import (
    answer_whether_exporting,
    code_being_captured,
    forget_compiled,
    forget_later,
    forget_the_gone,
    global_module_hooks,
    is_gathered,
    is_replica_running,
    leave_padding_to_python,
    let_go_of_inputs,
)
from ..capture.backend import compile_by, inner_of, rewrite
from ..capture.call import current
from ..capture.frames import Frames, forward_of
from ..capture.graph import Graph, break_of
from ..capture.graphs import Graphs
from ..capture.lost_backward import refuse_lost_derivatives
from ..capture.outputs import holds_low, is_whole, leaving, meets_low
from ..capture.parameters import low_parameters, lowered_by_forward
from ..capture.run import GraphCall, Kept
from ..capture.scope import stays_spread
from ..errors import in_short
from .copies import Opened, lift, lifted_inputs
from .replay import Replaying
from .settings import Settings

_SWITCHES = (enter_autocast, exit_autocast, leaving)  # of regions, and marks; a graph of these alone is no plan
_OURS = re.compile(rf' *File "{re.escape(__file__)}".*\n.*\n?')  # the frame of the function that is compiled
_STAYS = (
    "outputs that are low under autocast are handed out so, for the model has weights in 16 bits, and which dtypes it "
    "gives alone is not known: {}"
)


class Function:
    """One compiled function of a view; with copies of weights, `opened`, their casts are inputs of its graphs."""

    def __init__(
        self, model: nn.Module, settings: Settings, graphs: Graphs, method: str, opened: Opened | None = None
    ) -> None:
        self.settings, self.graphs, self.method, self.opened = settings, graphs, method, opened
        forget_the_gone()
        self.stale: Callable[[], bool] | None = None  # says that what was captured holds no longer
        self.called = False  # a call has ended since the function was made, or cleared
        self._model, self._author = model, _code_of(model, method)
        function = function_of(model, graphs, method)
        self._code = function.__code__
        self.codes = {self._code}  # and what Dynamo compiles below a graph break
        self._calls: list[GraphCall] = []
        self._low_before: set[str] = set()
        ours, tracing = weakref.ref(self), _tracing_settings(model, settings)  # torch keeps what it calls

        def fxamp(gm: GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:  # by this name torch logs it
            found: Any = ours()
            run: Callable[..., Any] = gm.forward if found.frames.asked(gm) else found._compiled(gm, inputs)
            return run

        def traces_by() -> dict[str, Any]:
            split = {"optimize_ddp": False} if settings.backend == "eager" and is_replica_running() else {}
            return {**tracing, **split}  # gradients of single ops leave early without a split

        def asks() -> bool:
            call, found = current(), ours()
            if found is not None:  # before a call that is captured
                named = (model if call is None else call.model).named_parameters()
                found._low_before = {name for name, _ in low_parameters(named)}
            return graphs.restores and call is not None and meets_low(call.model, (call.args, call.kwargs))

        answer_whether_exporting()
        # A tensor that is spread over ranks takes no size that is a symbol: a graph for each batch size then.
        dynamic = False if settings.dynamic is None and stays_spread(model) else settings.dynamic
        self.frames = Frames(
            function, fxamp, model, traces_by, asks=asks, dynamic=dynamic, fullgraph=settings.fullgraph
        )
        self.call = self.frames.call
        self._backend = fxamp
        weakref.finalize(self, _let_go, self.codes, fxamp, self._calls)

    def refresh(self, model: nn.Module) -> None:
        """Forget what holds no longer; somebody may also have replaced the method of the model's class."""
        author = _code_of(model, self.method)
        if author is not self._author or (self.stale is not None and self.stale()):
            self._author = author
            self.clear()

    def clear(self) -> None:
        """Forget what was compiled, and that Dynamo gave the code up; the plan stays readable."""
        for code in self.codes:
            forget_compiled(code, self._backend)
        self.frames.forget()
        self.stale, self.called = None, False

    def _compiled(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Convert a graph that Dynamo captures, keep it, and return what runs it."""
        broke = break_of(gm)
        if not any(n.op.startswith("call") and n.target not in _SWITCHES for n in gm.graph.nodes):
            return _idle(gm.forward, broke)
        refuse_lost_derivatives(gm)
        graphs, call = self.graphs, current()
        self.codes.add(code := code_being_captured())
        whole = code is self._code and not broke
        model = self._model if call is None else call.model
        for node in gm.graph.nodes:
            if trace := node.meta.get("stack_trace"):
                node.meta["stack_trace"] = _OURS.sub("", trace)
        if in_region := call is not None and not graphs.in_region():
            _enter_region(gm, graphs.device)
        plan = graphs.replayed
        replaying = None if plan is None else Replaying(plan, graphs, model, self.method, whole=not broke)
        self._note_lowered(model)
        graph = rewrite(
            gm, inputs, graphs.policy, method=self.method, runs_on=graphs.device, in_region=in_region,
            eager=self.settings.backend == "eager", costs=graphs.costs, replayed=replaying,
            alone=self.frames.alone if whole else None, lowered=graphs.lowered,
        )  # fmt: skip
        if graphs.ensure is not None:
            graphs.ensure(graph, whole)
        if replaying is not None:
            graphs.note(*replaying.notes(graph.plan))
        if self.frames.unknown and graphs.restores and holds_low(model):
            graphs.note(_STAYS.format(self.frames.unknown))
        if hooks := _global_hooks():
            self.stale = lambda: _global_hooks() != hooks
        gm, examples, more = self._lifted(gm, inputs, model, whole)
        graph = replace(graph, written=() if whole else _parameters_written(graph))
        started = time.perf_counter()
        by, run, again = self._inner(gm, examples)
        graph = replace(graph, seconds=time.perf_counter() - started, kept=None if by == "eager" else Kept(by))
        known = None
        if model is not self._model:
            graph = graph.of(self._model)
            known = next((each for each in graphs if each.computes(graph)), None)  # of code that was captured once more
        graph = graphs.add(graph) if known is None else replace(graph, number=known.number)
        made = GraphCall(
            graph, gm, run, again, inputs, graphs.device, graphs=graphs, model=self._model, whole=whole, more=more
        )
        self._calls.append(made)
        let_go_of_inputs(n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder"))
        return made

    def _lifted(self, gm: GraphModule, inputs: list[Any], model: nn.Module, whole: bool) -> tuple[Any, list[Any], Any]:
        """Return a graph with casts of weights as inputs, what it is compiled for, and what gives these in a call."""
        uncompiled = self.settings.backend == "eager"  # else kernels cast
        several = uncompiled and not whole and self.graphs.policy.level.rounds  # one cast serves all graphs of a call
        if not (self.opened is not None or several) or any(map(is_gathered, model.modules())):
            return gm, inputs, None
        gm, examples, lifted = lift(gm, inputs, sums_inside=not uncompiled)
        opened = self.opened or (lambda: None)
        return gm, examples, partial(lifted_inputs, lifted, opened, whole=whole) if lifted else None

    def _note_lowered(self, model: nn.Module) -> None:
        """Note, before a graph is captured, what forward has made low by then; FSDP gathers low copies of its own."""
        low = {name for name, _ in low_parameters(model.named_parameters())} - self.graphs.lowered
        by_forward = sorted(low - self._low_before)
        if by_forward and not any(map(is_gathered, model.modules())):
            self.graphs.lowered.update(by_forward)
            text = lowered_by_forward(model, by_forward)
            self.graphs.say(text, logging.WARNING, text)
            self.graphs.note(text)

    def _inner(self, gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, Callable[..., Any], Any]:
        """Return what compiles an emitted graph, and what it makes of it; what it refuses runs node by node."""
        settings = self.settings
        inner = inner_of(gm.graph, settings.backend)
        try:
            return inner, *compile_by(inner, settings.mode, dict(settings.options), gm, inputs)
        except Exception as e:  # whatever a compiler raises
            if inner == "eager":
                raise
            name = inner if isinstance(inner, str) else getattr(inner, "__name__", type(inner).__name__)
            self.graphs.say(
                f"compiler: {type(e).__name__}", logging.WARNING, f"{name} does not compile a graph of "
                f"{type(self._model).__name__}, which runs by its plan, node by node: {in_short(e)}. It may compile "
                "it with dynamic=False.",
            )  # fmt: skip
            return "eager", *compile_by("eager", None, {}, gm, inputs)


def _parameters_written(graph: Graph) -> tuple[int, ...]:
    aliases, inputs = Aliases(graph.emitted.graph), graph.emitted.graph.find_nodes(op="placeholder")
    return tuple(at for at in graph.places if aliases.is_mutated(inputs[at]))


def _let_go(codes: Iterable[types.CodeType], backend: Callable[..., Any], calls: Iterable[GraphCall]) -> None:
    forget_later(codes, backend)  # by `forget_the_gone`
    for call in calls:
        call.release()


def _tracing_settings(model: nn.Module, settings: Settings) -> dict[str, Any]:
    change: dict[str, Any] = {"error_on_recompile": True} if settings.on_change == "error" else {}
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        change["allow_rnn"] = True  # or Dynamo leaves what calls a recurrent layer to Python
        leave_padding_to_python()
    if not settings.fullgraph and _reads_numpy(model):
        change["use_numpy_random_stream"] = True  # or Dynamo draws NumPy's random numbers from torch
    return change


def _reads_numpy(model: nn.Module) -> bool:
    """Say whether a file that a module of the model, or its `forward`, is written in has imported NumPy."""
    numpy, kinds = sys.modules.get("numpy"), {type(module) for module in model.modules()}
    files = {name for kind in kinds for name in (kind.__module__, getattr(forward_of(kind), "__module__", None))}
    known = (vars(sys.modules[name]) for name in files if name in sys.modules and not name.startswith("torch."))
    return numpy is not None and any(value is numpy for names in known for value in list(names.values()))


def _idle(run: Callable[..., Any], broke: str) -> Callable[..., Any]:
    """Return a graph without ops that says to the call under way that it ran."""

    def call(*args: Any) -> Any:
        if (under_way := current()) is not None:
            under_way.unlock()
            under_way.idle.append(broke)
        return run(*args)

    return call


def _enter_region(gm: GraphModule, device: str) -> None:
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    state = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), None
    with gm.graph.inserting_before(first):
        enter = gm.graph.call_function(enter_autocast, state)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(exit_autocast, (enter,))


def _code_of(model: nn.Module, method: str) -> object:
    return getattr(getattr(type(model), method or "forward", None), "__code__", None)


def function_of(
    model: nn.Module, graphs: Graphs, method: str, leave: Callable[[Any], Any] = leaving,
    reads: Callable[[Any], Any] | None = None, **region: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Return the function to compile, with code of its own: `forward(model, *args, **kwargs)`.

    `leave` marks its outputs while it is traced, of which `reads` returns what the code around it reads; None for all.
    With a `region`, further arguments of one, the model is called in an autocast region inside the trace.
    """
    device, low = graphs.device, graphs.low
    author: Any = getattr(type(model), method) if method else None
    # On the meta device a trace has FP32 where autocast makes low values; O2 casts what half complex numbers are of.
    dtypes = (low, torch.float32, torch.complex64, torch.complex32)
    mark = torch.compiler.allow_in_graph(leave) if graphs.restores else None
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

    forward: Any = rounded if region and graphs.policy.level.rounds else plain
    code = forward.__code__.replace(co_name=f"{method or 'forward'}_of_{type(model).__name__}")
    return types.FunctionType(code, _globals_for(model), closure=forward.__closure__)


def _globals_for(model: nn.Module) -> dict[str, Any]:
    """Return the globals for the function to compile: of a module of the model that Python cannot import, else ours."""
    # Dynamo imports the module of a function that it inlines, unless it has the globals of the outermost function.
    for forward in dict.fromkeys(forward_of(type(module)) for module in model.modules()):
        found: dict[str, Any] = getattr(forward, "__globals__", globals())
        name = found.get("__name__")
        if name in sys.modules and vars(sys.modules[name]) is not found:
            return found  # another module has this name
        if name is not None and name not in sys.modules:
            try:
                known = importlib.util.find_spec(name) is not None
            except (ImportError, ValueError):
                known = False
            if not known:
                return found
    return globals()


def _global_hooks() -> list[int]:
    return list(map(id, global_module_hooks()))
