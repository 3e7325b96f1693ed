"""One function that Dynamo compiles for a view: fresh code with a cache of its own, and the backend that converts.

def forward(model, *args, **kwargs):            # fresh code: the cache and the recompile limit are the view's own
with torch.autocast(device, dtype=low):     # inside the trace, so that it costs nothing at run time
outputs = model(*args, **kwargs)        # the model is an argument, so that a twin runs by the same graphs
return the outputs, marked as leaving the model
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from passes._torch import (
    LIMIT_IS_ARGUMENT,
    OWN_CACHE,
    compile_under_transform,
    enter_autocast,
    exit_autocast,
    forget_compiled,
    global_module_hooks,
    inner_backend,
    pop_mode,
    push_mode,
    pytree,
    source_name,
)
from passes.graph.values import no_autocast

from ..capture.backend import at_call, compiling, inner_of, leave_sharing_to_the_compiler, noted, rewrite
from ..capture.call import current
from ..capture.compiled import Converted, break_of, copied, elsewhere
from ..capture.kept import Kept
from ..capture.outputs import leaving
from ..trust.watch import node_by_node
from .copies import Lifted, lift, with_copies
from .replay import Replaying
from .state import State, state_of

if TYPE_CHECKING:
    from .runner import Runner

LIMIT = 32  # an ordinary life has 6 to 8 graphs: train and eval, no_grad and inference, a last batch, a frozen layer
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
    """One compiled function of a view: its cache, its limit, and which graphs its calls ran.

    Args:
        runner: the view's.
        kind: "plain"; "window", where casts of parameters are inputs; or "transform", under `torch.vmap`.
        method: the name of the method that is captured, "" for a call.

    Attributes:
        expected: how many graphs a call ran, by the first one that it ran.
        stale: says, if not None, that what was captured holds no longer.
        called: a call has ended since the function was made, or cleared.
    """

    def __init__(self, runner: Runner, kind: str, method: str) -> None:
        self.runner, self.kind, self.method = weakref.ref(runner), kind, method
        self.expected: dict[int, int] = {}
        self.stale: Callable[[], bool] | None = None
        self.called = False
        function = function_of(runner, method)
        self.code = function.__code__
        backend = _Backend(self)
        self.call: Callable[..., Any]
        if kind == "transform":
            self.call = compile_under_transform(function, backend, runner.dynamic)
        else:
            limit: Any = {"recompile_limit": LIMIT} if LIMIT_IS_ARGUMENT else {}
            self.call = torch.compile(
                function, backend=backend, dynamic=runner.dynamic, fullgraph=runner.fullgraph, **OWN_CACHE, **limit
            )
        weakref.finalize(self, forget_compiled, self.code)  # torch would keep the graphs of code that is gone

    def clear(self) -> None:
        """Forget what was compiled, and that Dynamo gave the code up; the plan stays readable."""
        forget_compiled(self.code)
        self.expected.clear()
        self.stale, self.called = None, False


def function_of(
    runner: Runner, method: str, leave: Callable[[Any], Any] = leaving, **region: Any
) -> Callable[..., Any]:
    """Return the function to compile, with code of its own: `forward(model, *args, **kwargs)`.

    `leave` marks its outputs, and `region` holds further arguments of its autocast region.
    """
    device, low = runner.device, runner.low
    rounds = runner.policy.level.rounds and runner.traces_autocast
    author: Any = getattr(type(runner.model), method) if method else None
    # Under torch.vmap a trace has FP32 where autocast makes low values; and autocast makes no half complex numbers.
    dtypes = (low, torch.float32, torch.complex64)
    restores = runner.policy.level.rounds and runner.policy.output_dtype == "original"
    mark = torch.compiler.allow_in_graph(leave) if restores else None
    autocast, tree_map, whole = torch.autocast, pytree.tree_map, is_whole

    def marked(value: Any) -> Any:
        return mark(value) if mark is not None and isinstance(value, Tensor) and value.dtype in dtypes else value

    def rounded(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        with autocast(device, dtype=low, **region):
            outputs = model(*args, **kwargs) if author is None else author(model, *args, **kwargs)
        return outputs if mark is None else tree_map(marked, outputs, is_leaf=whole)

    def plain(model: Any, /, *args: Any, **kwargs: Any) -> Any:  # under no autocast: a region would be a pin
        outputs = model(*args, **kwargs) if author is None else author(model, *args, **kwargs)
        return outputs if mark is None else tree_map(marked, outputs, is_leaf=whole)

    forward: Any = rounded if rounds else plain
    code = forward.__code__.replace(co_name=f"{method or 'forward'}_of_{type(runner.model).__name__}")
    return types.FunctionType(code, _globals_for(runner.model), closure=forward.__closure__)


def _globals_for(model: nn.Module) -> dict[str, Any]:
    """Return the globals for the function to compile: of a module of the model that Python cannot import, else ours.

    Dynamo imports the module of a function that it inlines, unless it has the globals of the outermost function.
    """
    for forward in dict.fromkeys(type(module).forward for module in model.modules()):
        found: dict[str, Any] = getattr(forward, "__globals__", globals())
        name = found.get("__name__")
        if name is not None and vars(sys.modules.get(name, _NO_MODULE)) is not found and not _is_found(name):
            return found
    return globals()


def _is_found(name: str) -> bool:
    if name in sys.modules:
        return False  # another module has this name
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


_NO_MODULE = types.ModuleType("none")


def is_whole(value: Any) -> bool:
    """Say whether a container is left as it is, with the low values in it: a cache is, as under autocast."""
    return not isinstance(value, (tuple, list, dict))


class _Backend:
    """fxamp in front of the inner compiler, for one compiled function."""

    __name__ = "fxamp"

    def __init__(self, function: Function) -> None:
        self._function = weakref.ref(function)

    def __call__(self, gm: GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        function: Any = self._function()
        runner: Runner = function.runner()
        call = current()
        model = runner.model if call is None else call.model
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        named = {i: names[id(v)] for i, v in enumerate(example_inputs) if id(v) in names}
        sources = [source_name(n) for n in gm.graph.nodes if n.op == "placeholder"]
        constants = {
            i: v.detach().clone() for i, v in enumerate(example_inputs)
            if isinstance(v, Tensor) and not v.dim() and i not in named and sources[i].startswith("L['model']")
        }  # fmt: skip
        real = any(map(_is_op, gm.graph.nodes))
        for node in gm.graph.nodes:
            if trace := node.meta.get("stack_trace"):
                node.meta["stack_trace"] = _OURS.sub("", trace)
        captured = copied(gm)
        inner, notes = inner_of("eager" if function.kind == "transform" else runner.backend, gm)
        replaying = Replaying(runner.replayed, runner.entries, state_of(model, function.method), break_of(gm))
        converted, outputs = rewrite(
            gm, example_inputs, runner.policy, notes, runs_on=runner.device, timer=runner.timer,
            penalties=runner.penalties,
            replayed=None if runner.replayed is None else replaying,
        )  # fmt: skip
        runner.note(*replaying.notes(converted.plan))
        if inner != "eager":
            leave_sharing_to_the_compiler(gm)
        whole, lifted = gm, list[Lifted]()
        inputs = list(example_inputs)
        if function.kind == "window":
            whole, inputs, lifted = lift(gm, inputs, sums_inside=inner != "eager")
        started = time.perf_counter()
        with no_autocast():
            run = inner_backend(inner, runner.mode, dict(runner.options))(whole, inputs)
        seconds = time.perf_counter() - started
        run = node_by_node(run, whole, converted, inner, compiling(inner, runner.mode, dict(runner.options), whole))
        if lifted:
            run = with_copies(run, lifted, runner.opened)
        kept = None if inner == "eager" else Kept(inner)
        run = at_call(run, converted, example_inputs, outputs, kept=kept)
        number = -1
        if real:
            state = state_of(model, function.method)
            number = len(runner.entries) if model is runner.model else known_as(runner.entries, converted, state)
        if number == len(runner.entries):
            runner.entries.append(Entry(number, converted, captured, named, constants, state, seconds, kept))
        if global_module_hooks():
            function.stale = _other_global_hooks()
        unconverted = partial(_unconverted, captured, outputs)
        return _tokened(run, unconverted, number, _Reader(runner, number, converted, example_inputs))


def known_as(entries: Sequence[Entry], converted: Converted, state: State) -> int:
    """Return the number of a graph of a twin: that of the model's own, if Dynamo captured the same code once more."""
    same = (e.number for e in entries if e.state == state and e.converted.computed == converted.computed)
    return next(same, len(entries))


def _is_op(node: Node) -> bool:
    """Say whether a node shows that the plan runs: the marks of regions and of outputs alone do not."""
    return node.op.startswith("call") and node.target not in (enter_autocast, exit_autocast, leaving)


def _other_global_hooks() -> Callable[[], bool]:
    before = [id(hook) for hook in global_module_hooks()]
    return lambda: [id(hook) for hook in global_module_hooks()] != before


class _Reader:
    """Notices that a graph runs for other parameters of its model: Dynamo captures code once that two modules share."""

    def __init__(self, runner: Runner, number: int, converted: Converted, example_inputs: list[Any]) -> None:
        self.runner = weakref.ref(runner)
        self._number, self._converted = number, converted
        self._first = converted.places[0] if converted.places else -1
        self._known = {id(example_inputs[self._first])} if converted.parameters else set[int]()

    def __call__(self, args: tuple[Any, ...]) -> None:
        """Look at the inputs of a call."""
        if self._first < 0 or id(args[self._first]) in self._known:
            return
        self._known.add(id(args[self._first]))
        runner: Any = self.runner()
        names = {id(t): name for name, t in (*runner.model.named_parameters(), *runner.model.named_buffers())}
        if self._number < 0 or id(args[self._first]) not in names:  # as `functional_call` swaps them
            return
        entry = runner.entries[self._number]
        moved = elsewhere(self._converted, args, names)
        named = {i: names[id(v)] for i, v in enumerate(args) if id(v) in names}
        if self._converted.parameters:
            runner.entries.append(replace(entry, number=len(runner.entries), converted=moved, names=named))
        else:  # a part that torch makes of a graph for DistributedDataParallel, whose parameters were not there
            runner.entries[self._number] = replace(entry, converted=moved, names=named)


def _unconverted(captured: GraphModule, own: Mapping[int, torch.dtype], *args: Any) -> Any:
    """Run a graph as captured; its outputs get the notes by which a later one tells what the model itself makes low."""
    return noted(captured(*args), own)


def _tokened(
    run: Callable[..., Any], unconverted: Callable[..., Any], number: int, reader: _Reader
) -> Callable[..., Any]:
    """Return a compiled graph that says that it ran, and runs with the dispatch modes of the call on."""

    def call(*args: Any) -> Any:
        under_way = current()
        if under_way is not None and under_way.does == "capture" and number >= 0:
            raise Captured
        reader(args)
        if under_way is None:
            return run(*args)
        if under_way.does == "compare":
            found: Any = reader.runner()
            with found.region(cache=False):
                return unconverted(*args)
        under_way.ran.append(number)
        if not under_way.modes:
            return run(*args)
        modes, under_way.modes = under_way.modes, []
        for mode in modes:
            push_mode(mode)
        try:
            return run(*args)
        finally:
            for _ in modes:
                pop_mode()
            under_way.modes = modes

    return call


__all__ = ["LIMIT", "Captured", "Entry", "Function", "function_of", "is_whole", "leaving"]
