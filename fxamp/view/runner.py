"""What a call of a view runs: the compiled function for this call, and whether its graphs ran.

A call runs the plan wherever it is made, or says that it did not, with the cause:

    dispatch modes                      off while Dynamo looks for the graph, and on again while it runs
    ambient autocast                    is the view's while its model is called, and off while a graph runs
    another torch.compile               breaks its graph here
    transforms of torch.func            Dynamo cannot trace them: autocast's values, and a warning
    export, symbolic tracing            CaptureError
    code that Dynamo leaves to Python   is known from Dynamo's own answer, and named
    whatever else keeps Dynamo away     a graph that runs leaves its number; a call without one warns
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from passes._torch import in_transform, pytree
from passes.contract.errors import CaptureError, FxampError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Override, Policy, nearest
from passes.contract.reasons import Code

from .._torch import (
    dispatch_modes,
    dynamo_errors,
    forget_the_gone,
    ignores_compilers,
    is_spread,
    is_traced_by_fx,
    is_traced_by_jit,
    mark_batch,
    own_parameters,
    unmark_batch,
    without_modes,
    without_module_trackers,
)
from ..capture.call import Call, begin, current
from ..capture.graphs import Graphs, runner_of
from ..capture.in_place import why_no_graph
from ..capture.modes import Modes
from ..capture.outputs import is_whole, own_values, restored
from ..capture.state import state_of
from ..observe.tensors import held
from ..observe.watch import watching
from .copies import Opened
from .function import Function
from .hooks import HookWatch
from .settings import Settings
from .twin import MODEL_OF_COPY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What somebody has written to `forward` of a view, and the call of a module, which runs it between the hooks."""

    forward: Callable[..., Any]
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and the hooks."""
        return self.call(*args, **kwargs)


class Runner:
    """The calls of one view; it holds the model, and the view's class holds it.

    Attributes:
        model: the model.
        settings: what the view was asked for.
        graphs: what was captured, under which policy.
        opened: the copies of parameters that are open.
        override: what somebody wrote to `forward` of the view.
        calls: how often the plan was called.
        called: a call of the view has come to its end.
        reached: the numbers of the graphs that the last call has run that only captured.
    """

    def __init__(self, model: nn.Module, settings: Settings, graphs: Graphs) -> None:
        settings.refuse_unfit(model)
        self.model, self.settings, self.graphs = model, settings, graphs
        self.opened = Opened()
        self.override: Callable[..., Any] | None = None
        self.calls, self.called = 0, False
        self.reached: list[int] = []
        self._kinds: tuple[type, type, int] | None = None
        self._functions: dict[tuple[Any, ...], Function] = {}
        self._causes: Counter[str] = Counter()
        self._capturing = threading.RLock()
        self._marks = settings.dynamic is None
        self._hooks = HookWatch(model)
        self._first: tuple[nn.Module, str] = model, ""

    def compile(self, **change: Any) -> None:
        """Have other settings from now on; graphs are captured again, and the plan stays readable."""
        self.settings = replace(self.settings, **change)
        self._functions.clear()

    def switch(self, asked: Policy, policy: Policy, replayed: Plan | None = None) -> None:
        """Follow another policy, or plan, from now on; graphs are captured again."""
        self.graphs.switch(asked, policy, replayed)
        self._functions.clear()

    def settle(self, inputs: Any) -> None:
        """Settle device and dtype at the first call, and again where the model has moved to another kind of device."""
        module, name = self._first  # a search takes microseconds, and this is at each call
        first, device = own_parameters(module).get(name), self.graphs.device
        if first is not None and first.device.type == device:
            return
        if first is None:
            named = ((m, n) for m in self.model.modules() for n, p in own_parameters(m).items() if p is not None)
            self._first = module, name = next(named, self._first)
            first = own_parameters(module).get(name)
        if device and (first is None or first.device.type in (device, "meta")):
            return
        if self.graphs.settle(self.model, inputs):
            self._functions.clear()

    @torch.compiler.disable(reason="a view of fxamp runs its own plan")  # type: ignore[untyped-decorator]
    def __call__(self, args: Any, kwargs: Any, method: str = "", model: nn.Module | None = None, does: str = "") -> Any:
        """Run a call of the view, or of one of its methods that are captured, on a twin if `model` is one, or its view.

        What the call does is as `Call` has it; "" as the call around it.

        Raises:
            CaptureError: the call is inside an export or a symbolic trace, or a guard failed and that is an error.
        """
        _refuse_tracing()
        forget_the_gone()
        self.calls += 1
        if args and kwargs:
            self._refuse_twice(len(args), kwargs, method)
        outer = current()
        self.settle((args, kwargs))
        does = does or (outer.does if outer is not None else "run")
        if runner_of(model) is self:
            if self._kinds is not None and (type(model) is not self._kinds[0] or self._kinds[2]):
                self._follow(type(model))
            model = vars(model).get(MODEL_OF_COPY)
        on_twin = model is not None and model is not self.model
        call = Call(model or self.model, args, kwargs, RUN, does, outer, on_twin, nests=True)
        if does == "capture":
            self.reached = call.ran
        modes = Modes((self.graphs.device,))
        try:
            begin(call)
            # Autocast's cache is kept until the call ends, and cleared here, where Dynamo does not look at Python's
            # frames. Where a graph breaks inside an autocast region, leaving the region would clear it: torch holds a
            # lock meanwhile, and Dynamo would wait for the thread that captures to compile a callback of a tensor that
            # is freed.
            torch.autocast_increment_nesting()
            outputs = self._run(call, method)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            begin(outer)
            if outer is not None:  # code behind a break of the model around this one reads what this graph has made
                outer.made += (weakref.ref(t) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor))
        except BaseException:
            try:
                begin(outer)
                modes.restore()
            finally:  # a signal may have ended the first
                begin(outer)
                modes.restore()
            raise
        return outputs

    def follows(self, kind: type) -> None:
        """Note the class of the view."""
        self._kinds = kind, type(self.model), 0

    def _follow(self, kind: type) -> None:
        """Have the model follow the class that a parametrization has derived from the view's, with its properties."""
        assert self._kinds is not None
        view, author, members = self._kinds
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        if kind is view:
            self.model.__class__, self._kinds = author, (view, author, 0)
        elif kind.__bases__ == (view,) and len(own) != members:  # FSDP2 adds a base
            self.model.__class__, self._kinds = type(kind.__name__, (author,), own), (view, author, len(own))

    def forward(self, args: Any, kwargs: Any, view: Any) -> Any:
        """Run a call of the view's `forward`: where another has been written, hooks of the model run around that."""
        bare = isinstance(self.override, Written) and self._hooks.around_model()
        return self(args, kwargs, "forward" if bare else "", view)

    def call_override(self, override: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what was written to the view's `forward`, and say so where that does not call the plan."""
        before = self.calls
        self.settle((args, kwargs))
        with self.graphs.region():
            outputs = override(*args, **kwargs)
        if self.calls != before:
            return outputs
        self.graphs.say(
            "forward", logging.WARNING, f"what was written to forward of a view of {type(self.model).__name__} runs "
            "under autocast, without its plan, which what was there would run",
        )  # fmt: skip
        if not self.graphs.restores:
            return outputs
        return restored(outputs, own_values(self.model, (args, kwargs), self.graphs.low, {}))

    def _refuse_twice(self, places: int, kwargs: Mapping[str, Any], method: str) -> None:
        """Raise TypeError for an argument given by place and by name: Dynamo takes the name for one of `**kwargs`."""
        author = getattr(type(self.model), method or "forward")
        if (code := getattr(author, "__code__", None)) is None:
            return
        names = code.co_varnames[max(code.co_posonlyargcount, 1) : min(places + 1, code.co_argcount)]
        if twice := next(filter(kwargs.__contains__, names), None):
            raise TypeError(f"{author.__qualname__}() got multiple values for argument '{twice}'")

    def _run(self, call: Call, method: str) -> Any:
        if self._hooks.moved():
            for function in self._functions.values():
                function.clear()
        function, graphs = self._function(self.opened.serves(call.model), method, call.model), self.graphs
        before = len(graphs)
        versions = () if before else _versions(call)
        started = time.perf_counter()
        if in_transform() or (graphs.as_written and state_of(call.model, method) in graphs.as_written):
            outputs = self._under_autocast(call, method)
        else:
            around = self._around(function, call)
            with contextlib.ExitStack() if around else _NO_CONTEXT as stack:  # a stack takes microseconds
                for context in around:
                    stack.enter_context(context)
                outputs = self._traced(function, call)
            function.called = True
        if len(graphs) > before:
            self._hooks.look()
            self._announce(before, time.perf_counter() - started)
        for reason in dict.fromkeys(map(_shortened, call.again if call.does == "run" else ())):
            self._say_again(reason)
        self.called = self.called or call.does == "run"
        if call.does != "compare":  # a capture ends so where there is no graph with ops
            self._look(function, call, versions)
        return self._outside_of_graphs(outputs, call)

    def _function(self, reads_copies: bool, method: str, model: nn.Module) -> Function:
        """Return the compiled function for a call; where a change is an error, each state has one of its own."""
        state = state_of(model) if self.settings.on_change == "error" else None
        key = (reads_copies, method, state)
        function = self._functions.get(key)
        if function is None:
            with self._capturing:
                # Sharded tensors do not take a size that is a symbol.
                sharded = any(map(is_spread, self.model.parameters()))
                self._marks = self._marks and not sharded
                opened = self.opened if reads_copies else None
                made = Function(self.model, self.settings, self.graphs, method, opened)
                function = self._functions.setdefault(key, made)
        function.refresh(model)
        return function

    def _around(self, function: Function, call: Call) -> list[Any]:
        """Return the contexts of a call, which take off what would keep Dynamo away, or make it capture again."""
        around: list[Any] = []
        if not function.called:
            around.append(self._alone(call))
        if self.graphs.policy.device != self.graphs.device:
            around.append(self._planned_autocast())
        modes = dispatch_modes()
        if modes and (watch := watching()) is not None:
            around.append(watch.of_view(self))
        if modes:
            call.modes = [mode for mode in modes if not ignores_compilers(mode)]
        if call.modes:
            around += [without_modes(), without_module_trackers(), *filter(ignores_compilers, modes)]
        return around

    @contextlib.contextmanager
    def _alone(self, call: Call) -> Iterator[None]:
        """Make a first call alone until a graph runs: other threads would capture the same again."""
        self._capturing.acquire()
        call.lock = self._capturing
        try:
            yield
        finally:
            call.unlock()

    @contextlib.contextmanager
    def _planned_autocast(self) -> Iterator[None]:
        """Have the state of autocast of the device that the plan is for be as there, for code that asks for it."""
        device = self.graphs.policy.device or "cpu"
        before = self._set_autocast(device)
        try:
            yield
        finally:
            _restore_autocast(device, *before)

    def _set_autocast(self, device: str) -> tuple[bool, torch.dtype]:
        """Set the view's autocast of a kind of device; return what was there. A context takes microseconds more."""
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        rounds = self.graphs.policy.level.rounds
        torch.set_autocast_enabled(device, rounds)
        if rounds:
            torch.set_autocast_dtype(device, self.graphs.low)
        return before

    def _traced(self, function: Function, call: Call) -> Any:
        """Call a compiled function under the view's autocast."""
        device, cached = self.graphs.device, torch.is_autocast_cache_enabled()
        if self._marks and not function.frames.fixes_sizes:
            call.marked = _mark_batch(call)
        before = self._set_autocast(device)
        torch.set_autocast_cache_enabled(True)  # Dynamo guards it
        try:
            return function.call(call.model, *call.args, **call.kwargs)
        except dynamo_errors().TorchDynamoException as e:
            raise self._error_of(e) from getattr(e, "__cause__", None)
        except FxampError:
            raise
        except Exception:
            function.frames.forget(call.refused)  # Dynamo leaves code to Python in whose trace an author's line raises
            raise
        finally:
            _restore_autocast(device, *before)
            torch.set_autocast_cache_enabled(cached)
            for tensor in call.marked:
                unmark_batch(tensor)

    def _error_of(self, raised: Exception) -> Exception:
        """Return what a call raises where Dynamo has raised an error."""
        name, errors, error = type(self.model).__name__, dynamo_errors(), cast("Any", raised)
        if isinstance(error, errors.BackendCompilerFailed) and isinstance(error.inner_exception, FxampError):
            inner: Exception = error.inner_exception
            return inner
        if isinstance(error, errors.RecompileError):
            return CaptureError(f"{name} has changed, and on_change='error': {_shortened(str(error))}")
        if isinstance(error, errors.TorchRuntimeError):
            if (way_out := self.of_autocast(str(error))) and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"fxamp: {way_out}")
            return raised
        if isinstance(
            error, (errors.InternalTorchDynamoError, errors.Unsupported, errors.UncapturedHigherOrderOpError)
        ):
            text = str(error).strip()
            way_out = self.of_autocast(text)
            return CaptureError(f"Dynamo cannot trace {name}: {f'{way_out} ' * bool(way_out)}{text}")
        return raised

    def of_autocast(self, error: str) -> str:
        """Return what to do about an error of an op that may come of autocast's dtypes; "" for another error."""
        if not (self.graphs.policy.level.rounds and _OF_DTYPES.search(error)):
            return ""
        return (
            "under torch.autocast the op has other dtypes. If the model runs without it alone, put the op in a region "
            f"torch.autocast('{self.graphs.device}', enabled=False)."
        )

    def _under_autocast(self, call: Call, method: str) -> Any:
        """Run the model itself under autocast, where Dynamo cannot trace."""
        with self.graphs.region():
            run = getattr(type(call.model), method) if method else type(call.model).__call__
            return run(call.model, *call.args, **call.kwargs)

    def _outside_of_graphs(self, outputs: Any, call: Call) -> Any:
        """Give outputs their original dtypes where no graph does: in fields of a dataclass, and outside of graphs."""
        if (
            (type(outputs) is Tensor and outputs.dtype is torch.float32)
            or call.does not in ("run", "capture")
            or not self.graphs.restores
        ):
            return outputs
        leaves = () if isinstance(outputs, (Tensor, dict)) else pytree.tree_leaves(outputs, is_leaf=is_whole)
        if call.whole and not any(map(is_dataclass, leaves)):
            return outputs
        own, made = own_values(call.model, (call.args, call.kwargs), self.graphs.low, call.own), dict[int, Any]()
        outputs = restored(outputs, own, made, call.read)
        if not made.keys().isdisjoint(call.read):
            self.graphs.note(_READ)
        return outputs

    @property
    def refused(self) -> tuple[str, ...]:
        """What of the model's code is left to Python, and why."""
        frames = [function.frames for function in self._functions.values()]
        texts = (text for each in frames for text in (*each.refused.values(), *each.outside.values()))
        return tuple(dict.fromkeys(filter(None, texts)))

    def forgive(self) -> None:
        """Forget the code that one call alone has left to Python, as one that makes what later ones read."""
        for function in self._functions.values():
            function.frames.forgive()

    def run_as_written(self, why: str) -> None:
        """Run the model as its author wrote it in its present state, under autocast, which somebody has said."""
        self.graphs.as_written[state_of(self.model)] = why
        self.graphs.said.add(why)

    def _look(self, function: Function, call: Call, versions: Sequence[int]) -> None:
        """Say that a call did not run the plan, or not all of it: no graph ran, or a frame was left to Python.

        Where there is no graph yet, what was written in place in the call is known by what `versions` were before it.

        Raises:
            CaptureError: that is an error, by `on_change`.
            PolicyError: nothing was captured ahead of a first call, so overrides of the policy cannot act.
        """
        mine = any(graph.state.method == function.method for graph in self.graphs)
        frames = function.frames
        idle = mine or not self._computes or not (len(self.graphs) or frames.opaque or versions != _versions(call))
        planned = bool(call.ran or (call.idle and idle))  # an early exit may have no op
        outside, frames.news = frames.outside.values() if self.settings.on_change == "error" else frames.news, []
        if planned and not call.refused:
            frames.forgive()
            if not outside:
                return
        left = (*call.refused, *outside, *(f"graph break at {broke}" for broke in call.idle if broke and not planned))
        why = "" if planned else self.graphs.as_written.get(state_of(call.model, function.method)) or self._cause(mine)
        cause = ": ".join(filter(None, (why, "; ".join(dict.fromkeys(left)))))
        if cause == _NOTHING and not self._computes:
            return
        name, policy = type(self.model).__name__, self.graphs.policy
        instead = "under autocast" if policy.level.rounds else "as written"
        if call.does in ("capture", "first graph") and not planned and (policy.ops or policy.modules):
            raise PolicyError(f"the overrides of {policy} cannot act, for {name} runs {instead}: {cause}")
        text = f"{name}: a call did not run {'all of ' * planned}its plan, but {instead}: {cause}"
        if (watch := watching()) is not None:
            watch.missed.append((self.model, cause, planned))
        if self.settings.on_change == "error":
            raise CaptureError(text)
        self.graphs.say(cause, logging.WARNING, text)

    @functools.cached_property
    def _computes(self) -> bool:
        """Say whether code outside of views inside the model has parameters to compute with."""
        others = any(runner_of(module) is not None for module in self.model.modules() if module is not self.model)
        return not others and next(self.model.parameters(), None) is not None

    def _cause(self, mine: bool) -> str:
        return why_no_graph() or (_UNKNOWN if mine else _NOTHING)

    def say_uncaptured(self, method: str) -> None:
        """Log once that a method runs under autocast and not by the plan: a warning where the plan says more."""
        policy = self.graphs.policy
        plain = policy.level.is_autocasts and not policy.modules and not policy.ops
        level = logging.INFO if plain or not policy.level.rounds else logging.WARNING
        name = f"{type(self.model).__name__}.{method}"
        self.graphs.say(method, level, f"{name} runs under autocast, not captured; methods=({method!r},) captures it")

    def say_idle_overrides(self) -> None:
        """Warn once of each override that has decided on no node of what was captured so far.

        Those of single nodes are left out: calibrations name all that is large, whatever decides there.
        """
        policy = self.graphs.policy
        given = [Override("op", *item) for item in policy.ops if "#" not in item[0]]
        given += [Override("path", *item) for item in policy.modules]
        if not given or self.graphs.replayed is not None:
            return
        every = (d for graph in self.graphs for d in graph.plan.decisions if d.code == Code.OVERRIDE.value)
        decided = {d.reason for d in every if d.colour != "float32" or not d.reason.endswith("=low")}
        first = {id(module): path for path, module in self.model.named_modules()}
        ops = {d.op for graph in self.graphs for d in graph.plan.decisions}
        names = {path: first[id(module)] for path, module in self.model.named_modules(remove_duplicate=False)}
        for override in (one for one in given if f"{Code.OVERRIDE.value}: {one}" not in decided):
            name = names.get(override.key, override.key) if override.kind == "path" else override.key
            why = (
                f"its nodes go by the first name of that module, '{name}'" if name != override.key
                else f"no op of that name was captured{nearest(override.key, ops)}"
                if override.kind == "op" and override.key not in ops
                else "nothing that it names was captured, or something else decides there, such as the dtype of a "
                "value that is written in place, or of a table that rows are read from"
            )  # fmt: skip
            self.graphs.say(
                str(override), logging.WARNING,
                f"{override} has decided nothing in what was captured of {type(self.model).__name__} so far: {why}.",
            )  # fmt: skip

    def _announce(self, first: int, seconds: float) -> None:
        """Log a line for each graph that a call captured, and why Dynamo captured again."""
        name = type(self.model).__name__
        if (call := current()) is not None and call.does == "run":
            self.say_idle_overrides()
        dtype, backend = self.graphs.low, self.settings.backend
        for graph in self.graphs[first:]:
            plan = graph.plan
            low = sum(d.colour == str(dtype).removeprefix("torch.") for d in plan.decisions)
            short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
            logger.info(
                "fxamp: %s graph %d (%s): %d ops, %d %s, %d casts, %.1f s; inner %s %.1f s",
                name, graph.number, graph.state, len(plan.decisions), low, short, plan.casts, seconds - graph.seconds,
                backend if isinstance(backend, str) else "backend", graph.seconds,
            )  # fmt: skip

    def _say_again(self, reason: str) -> None:
        """Log why Dynamo captured again: a warning at the second time of a cause, and at the eighth graph of a number.

        Numbers vary at each step, as what is annealed; of some, as the `p` of a dropout, torch makes a constant.
        """
        if _GRAD_MODE in reason:  # training and evaluation have a graph each: that is no cause to change anything
            mode = "with" if torch.is_grad_enabled() else "without"
            logger.info("fxamp: %s has another graph now, for calls %s gradients", type(self.model).__name__, mode)
            return
        number = _NUMBER.match(reason)
        cause = number[1] if number else re.sub(r"\d+", "N", reason)
        self._causes[cause] += 1
        name, level = type(self.model).__name__, logging.INFO
        if _GONE.match(reason):
            reason = (
                "code behind a graph break reads an object that code in front of it makes anew at each call, such as a "
                "bound method; fxamp.report(view) names the break, and without it there is one graph"
            )
        if number and self._causes[cause] == _EIGHTH - 1:
            logger.warning(
                "fxamp: %s is captured at each value of %s, of which torch makes a constant: this is graph %d. Change "
                "it seldom, or compute with a tensor in its place.", name, _MODULE.sub(r".\1", cause), _EIGHTH,
            )  # fmt: skip
        elif not number and self._causes[cause] == 2:
            level = logging.WARNING
        logger.log(level, "fxamp: %s was captured again: %s", name, reason)


_NUMBER = re.compile(r"(\S+) == -?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?:\s|$)")  # the guard of a float
_GONE = re.compile(r"Cache line invalidated because L\['___stack\d+'\] got deallocated")
_MODULE = re.compile(r"\._modules\['(\w+)'\]")
_GRAD_MODE = "GLOBAL_STATE changed: grad_mode"  # the whole of Dynamo's words, but for its prefix
_EIGHTH = 8  # the graph of one number at which a warning names it
_OF_DTYPES = re.compile(r"dtype|BFloat16|Half\b|scalar type", re.IGNORECASE)  # in the text of an error
RUN = Runner._traced.__code__  # the frame in which the model is called
_READ = (
    f"{Code.OUTPUT.value}: an output that another one is computed from, with a graph break between the two, is handed "
    "out in 16 bits, as it was read, where it has a gradient"
)
_NO_CONTEXT: Any = contextlib.nullcontext()
_UNKNOWN = "Dynamo left it to Python"
_NOTHING = "no op was captured"


def _versions(call: Call) -> list[int]:
    """Return how often each tensor of a call was written: of its arguments, and those that its model holds."""
    values = (*pytree.tree_leaves((call.args, call.kwargs)), *call.model.parameters(), *held(call.model).values())
    tensors = (value for value in values if isinstance(value, Tensor) and not is_lazy(value))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _restore_autocast(device: str, on: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, on)
    torch.set_autocast_dtype(device, dtype)


def _refuse_tracing() -> None:
    if is_traced_by_jit():
        how = "torch.jit.trace"
    elif torch.compiler.is_exporting():
        how = "torch.export"
    elif is_traced_by_fx():
        how = "symbolic tracing"
    else:
        return
    raise CaptureError(
        f"{how} of a view would lose its plan: export the model itself, then pass the result to fxamp.convert."
    )


def _mark_batch(call: Call) -> list[Tensor]:
    """Let dimension 0 of every tensor among the arguments be dynamic that shares its size with the first one.

    The tensors that were marked are returned; after the call they are as before.
    """
    size = -1
    marked: list[Tensor] = []
    for value in _tensors((*call.args, *call.kwargs.values())):
        if value.dim():
            size = value.shape[0] if size < 0 else size
            if value.shape[0] == size > 1 and mark_batch(value):
                marked.append(value)
    return marked


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the plain tensors among some values, and in the containers among them."""
    for value in values:
        if type(value) is Tensor:
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _shortened(text: str) -> str:
    """Return the guard that failed, and the user's line, of Dynamo's text."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if re.match(r"\d+/\d+:", line)), lines[0] if lines else "")
    guard, _, line = re.sub(r"^\d+/\d+: ", "", found).partition("  #")
    return f"{guard.strip()}  # {line.strip()}" if line and "_of_" not in line else guard.strip()
