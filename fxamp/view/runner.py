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
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from passes._torch import in_transform, pytree
from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError, FxampError, PolicyError
from passes.contract.plan import CERTIFICATE, Plan
from passes.contract.policy import Override, Policy, nearest
from passes.contract.reasons import Code

from .._torch import (
    dispatch_modes,
    dynamo_errors,
    dynamo_is_disabled,
    dynamo_stance,
    ignores_compilers,
    is_traced_by_fx,
    is_traced_by_jit,
    leave_padding_to_python,
    mark_batch,
    own_parameters,
    unmark_batch,
    without_modes,
    without_module_trackers,
)
from ..capture.backend import Inner
from ..capture.call import Call, begin, current
from ..capture.compiled import runner_of
from ..capture.frames import forward_of
from ..capture.inputs import device_of, resolve
from ..capture.modes import ModesKeptOnError
from ..capture.outputs import is_whole, low_of_its_own, restored
from ..capture.parameters import is_only_read
from ..errors import in_short
from ..observe.watch import watching
from .copies import Opened
from .function import Entry, Function
from .hooks import HookWatch
from .state import State, state_of

logger = logging.getLogger(__name__)


class Runner:
    """The engine of one view; it holds the model, and the view's class holds it.

    Its arguments are those of `convert`; `replayed` is the plan that is carried out, if there is one.

    Attributes:
        policy: the policy, settled after the first call.
        device: the kind of device that the model runs on.
        low: the low dtype.
        entries: the graphs, in the order of capture.
        opened: the copies of parameters that are open.
        override: what somebody wrote to `forward` of the view.
        calls: how often the plan was called.
        notes: what capture and its check have to say, for the plan.
        complete: all graphs were captured, those after a graph break too.
        called: a call of the view has come to its end.
        as_written: the states in which the model runs as its author wrote it, each with the reason.
        costs: what the cut is told that things cost; None for bytes.
        dynamo_settings: Dynamo's settings while it captures.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, backend: Inner = "eager", *, mode: str | None = None,
        options: Mapping[str, Any] | None = None, fullgraph: bool = False, dynamic: bool | None = None,
        on_change: str = "recompile", methods: Sequence[str] = (), replayed: Plan | None = None,
    ) -> None:  # fmt: skip
        self.model, self.asked, self.policy = model, policy, policy
        self.backend, self.mode, self.options = backend, mode, dict(options or {})
        self.fullgraph, self.dynamic, self.on_change, self.methods = fullgraph, dynamic, on_change, tuple(methods)
        self.device, self.low = "", torch.bfloat16
        self.entries: list[Entry] = []
        self.opened = Opened()
        self.override: Callable[..., Any] | None = None
        self.calls = 0
        kept = () if replayed is None else replayed.notes
        self.notes = tuple(note for note in kept if note.startswith((Code.NOT_WORTH_CASTS.value, CERTIFICATE)))
        self.complete, self.called = True, False
        self.as_written: dict[State, str] = {}
        self.replayed = replayed
        self.costs: CostModel | None = None
        self._functions: dict[tuple[Any, ...], Function] = {}
        self._said: set[str] = set()
        self._causes: Counter[str] = Counter()
        self._capturing = threading.RLock()
        self._marks = dynamic is None
        self._hooks = HookWatch(model)
        self._first: tuple[nn.Module, str] = model, ""
        self.dynamo_settings: dict[str, Any] = {}
        if on_change == "error":
            self.dynamo_settings["error_on_recompile"] = True
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self.dynamo_settings["allow_rnn"] = True  # or Dynamo leaves what calls a recurrent layer to Python
            leave_padding_to_python()
        if not fullgraph and _reads_numpy(model):
            self.dynamo_settings["use_numpy_random_stream"] = True  # or Dynamo draws NumPy's random numbers from torch

    @property
    def settings(self) -> dict[str, Any]:
        """What another view of the same kind is made with."""
        return {
            "backend": self.backend, "mode": self.mode, "options": self.options, "fullgraph": self.fullgraph,
            "dynamic": self.dynamic, "on_change": self.on_change, "methods": self.methods, "replayed": self.replayed,
        }  # fmt: skip

    @property
    def restores(self) -> bool:
        """Whether outputs that are low by autocast alone go back to their original dtype."""
        return self.policy.level.rounds and self.policy.output_dtype == "original"

    def note(self, *notes: str) -> None:
        """Keep what is to be said in the plan."""
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))

    def clear(self) -> None:
        """Forget what was compiled; the plan stays readable."""
        for function in self._functions.values():
            function.clear()

    def switch(self, asked: Policy, policy: Policy, replayed: Plan | None = None) -> None:
        """Follow another policy, or plan, from now on; graphs are captured again."""
        self.asked, self.policy, self.replayed = asked, policy, replayed
        self.entries.clear()
        self.as_written.clear()
        self._functions.clear()

    def region(self, cache: bool = True) -> Any:
        """Return the autocast of this view, as a context."""
        rounds = self.policy.level.rounds
        keeps = cache and torch.is_autocast_cache_enabled()
        return torch.autocast(self.device, dtype=self.low if rounds else None, enabled=rounds, cache_enabled=keeps)

    def in_region(self) -> bool:
        """Say whether the present autocast is that of this view."""
        on = torch.is_autocast_enabled(self.device)
        rounds = self.policy.level.rounds
        return on == rounds and (not on or torch.get_autocast_dtype(self.device) == self.low)

    def settle(self, inputs: Any) -> None:
        """Settle device and dtype at the first call, and again where the model has moved to another kind of device."""
        module, name = self._first  # a search takes microseconds, and this is at each call
        first = own_parameters(module).get(name)
        if first is not None and first.device.type == self.device:
            return
        if first is None:
            named = ((m, n) for m in self.model.modules() for n, p in own_parameters(m).items() if p is not None)
            self._first = module, name = next(named, self._first)
            first = own_parameters(module).get(name)
        if self.device and (first is None or first.device.type in (self.device, "meta")):
            return
        here = device_of(self.model, inputs)
        if here == self.device:
            return
        moved, self.device = self.device, here
        self.policy = resolve(self.asked, self.model, inputs)
        self.low = self.policy.dtype or torch.bfloat16
        self._functions.clear()
        name = type(self.model).__name__
        if moved:
            logger.info("fxamp: %s has moved from '%s' to '%s', and is captured anew", name, moved, here)
        if is_only_read():
            return
        if self.policy.device != here and self.policy.level.rounds:
            logger.warning(
                "fxamp: %s was converted for '%s' and runs on '%s', where torch.autocast casts other ops. For the "
                "values that it gives there, convert again, with device=%s in the policy or the model on that device.",
                name, self.policy.device, here, here,
            )  # fmt: skip
        if here == "cuda" and self.asked.dtype is None and not torch.is_autocast_enabled(here):
            logger.warning("fxamp: %s runs in %s; pass dtype=bf16 for BF16", name, str(self.low).removeprefix("torch."))

    @torch.compiler.disable(reason="a view of fxamp runs its own plan")  # type: ignore[untyped-decorator]
    def __call__(self, args: Any, kwargs: Any, method: str = "", model: nn.Module | None = None, does: str = "") -> Any:
        """Run a call of the view, or of one of its methods that are captured, on a twin if `model` is one.

        What the call does is as `Call` has it; "" as the call around it.

        Raises:
            CaptureError: the call is inside an export or a symbolic trace, or a guard failed and that is an error.
        """
        _refuse_tracing()
        self.calls += 1
        if args and kwargs:
            self._refuse_twice(len(args), kwargs, method)
        outer = current()
        self.settle((args, kwargs))
        call = Call(model or self.model, args, kwargs, RUN, does or (outer.does if outer is not None else "run"))
        begin(call)
        # Autocast's cache is kept until the call ends, and cleared here, where Dynamo does not look at Python's frames.
        # Where a graph breaks inside an autocast region, leaving the region would clear it: torch holds a lock
        # meanwhile, and Dynamo would wait for the thread that captures to compile a callback of a tensor that is freed.
        torch.autocast_increment_nesting()
        try:
            with ModesKeptOnError((self.device,)):
                return self._run(call, method)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            begin(outer)

    def call_override(self, override: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what was written to the view's `forward`, and say so where that does not call the plan."""
        before = self.calls
        self.settle((args, kwargs))
        with self.region():
            outputs = override(*args, **kwargs)
        if self.calls != before:
            return outputs
        self._say(
            "forward", logging.WARNING, f"what was written to forward of a view of {type(self.model).__name__} runs "
            "under autocast, without its plan, which what was there would run",
        )  # fmt: skip
        return restored(outputs, low_of_its_own(self.model, (args, kwargs), self.low)) if self.restores else outputs

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
            self.clear()
        function = self._function("plain" if self.opened() is None else "window", method, call.model)
        before = len(self.entries)
        started = time.perf_counter()
        if in_transform() or (self.as_written and state_of(call.model, method) in self.as_written):
            outputs = self._under_autocast(call, method)
        else:
            around = self._around(function, call)
            with contextlib.ExitStack() if around else _NO_CONTEXT as stack:  # a stack takes microseconds
                for context in around:
                    stack.enter_context(context)
                outputs = self._traced(function, call)
            function.called = True
        if len(self.entries) > before:
            self._announce(before, time.perf_counter() - started)
        for reason in dict.fromkeys(map(_shortened, call.again if call.does == "run" else ())):
            self._say_again(reason)
        self.called = self.called or call.does == "run"
        if call.does != "compare":  # a capture ends so where there is no graph with ops
            self._look(function, call)
        return self._outside_of_graphs(outputs, call)

    def _function(self, kind: str, method: str, model: nn.Module) -> Function:
        """Return the compiled function for a call; where a change is an error, each state has one of its own."""
        state = state_of(model) if self.on_change == "error" else None
        key = (kind, method, state)
        function = self._functions.get(key)
        if function is None:
            with self._capturing:
                # Sharded tensors do not take a size that is a symbol.
                sharded = any(type(p).__name__ == "DTensor" for p in self.model.parameters())
                self._marks = self._marks and self.dynamic is None and not sharded
                function = self._functions.setdefault(key, Function(self, kind, method))
        function.refresh(model)
        return function

    def _around(self, function: Function, call: Call) -> list[Any]:
        """Return the contexts of a call, which take off what would keep Dynamo away, or make it capture again."""
        around: list[Any] = []
        if not function.called:
            around.append(self._capturing)  # one thread makes the first call: others would capture the same again
        modes = dispatch_modes()
        if modes and (watch := watching()) is not None:
            around.append(watch.of_view(self))
        if modes:
            call.modes = [mode for mode in modes if not ignores_compilers(mode)]
        if call.modes:
            around += [without_modes(), without_module_trackers(), *filter(ignores_compilers, modes)]
        return around

    def _traced(self, function: Function, call: Call) -> Any:
        """Call a compiled function under the view's autocast."""
        device, rounds = self.device, self.policy.level.rounds
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
        marked = _mark_batch(call) if self._marks else []
        torch.set_autocast_enabled(device, rounds)
        if rounds:
            torch.set_autocast_dtype(device, self.low)
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
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
            torch.set_autocast_cache_enabled(before[2])
            for tensor in marked:
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
        if not (self.policy.level.rounds and _OF_DTYPES.search(error)):
            return ""
        return (
            "under torch.autocast the op has other dtypes. If the model runs without it alone, put the op in a region "
            f"torch.autocast('{self.device}', enabled=False)."
        )

    def say_refused(self, inner: Inner, error: Exception) -> None:
        """Warn once that a graph runs node by node, as emitted, since its inner compiler has refused it."""
        name = inner if isinstance(inner, str) else getattr(inner, "__name__", type(inner).__name__)
        self._say(
            f"compiler: {type(error).__name__}", logging.WARNING, f"{name} does not compile a graph of "
            f"{type(self.model).__name__}, which runs by its plan, node by node: {in_short(error)}. It may compile it "
            "with dynamic=False.",
        )  # fmt: skip

    def _under_autocast(self, call: Call, method: str) -> Any:
        """Run the model itself under autocast, where Dynamo cannot trace."""
        with self.region():
            run = getattr(type(call.model), method) if method else type(call.model).__call__
            return run(call.model, *call.args, **call.kwargs)

    def _outside_of_graphs(self, outputs: Any, call: Call) -> Any:
        """Give outputs their original dtypes where no graph does: in fields of a dataclass, and outside of graphs."""
        if (type(outputs) is Tensor and outputs.dtype is torch.float32) or call.does != "run" or not self.restores:
            return outputs
        leaves = () if isinstance(outputs, (Tensor, dict)) else pytree.tree_leaves(outputs, is_leaf=is_whole)
        if call.whole and not any(map(is_dataclass, leaves)):
            return outputs
        own, made = low_of_its_own(call.model, (call.args, call.kwargs), self.low), dict[int, Any]()
        outputs = restored(outputs, own, made, call.read)
        if not made.keys().isdisjoint(call.read):
            self.note(_READ)
        return outputs

    @property
    def refused(self) -> tuple[str, ...]:
        """What of the model's code is left to Python, and why."""
        frames = [function.frames for function in self._functions.values()]
        texts = (text for each in frames for text in (*each.refused.values(), *each.outside.values()))
        return tuple(dict.fromkeys(filter(None, texts)))

    def run_as_written(self, why: str) -> None:
        """Run the model as its author wrote it in its present state, under autocast, which somebody has said."""
        self.as_written[state_of(self.model)] = why
        self._said.add(why)

    def _look(self, function: Function, call: Call) -> None:
        """Say that a call did not run the plan, or not all of it: no graph ran, or a frame was left to Python.

        Raises:
            CaptureError: that is an error, by `on_change`.
            PolicyError: nothing was captured ahead of a first call, so overrides of the policy cannot act.
        """
        mine = any(e.state.method == function.method for e in self.entries)
        planned = bool(call.ran or (call.idle and (mine or not self._computes)))  # an early exit may have no op
        frames = function.frames
        outside, frames.news = frames.outside.values() if self.on_change == "error" else frames.news, []
        if planned and not call.refused and not outside:
            return
        left = (*call.refused, *outside, *(f"graph break at {broke}" for broke in call.idle if broke and not planned))
        why = "" if planned else self.as_written.get(state_of(call.model, function.method)) or self._cause(mine)
        cause = ": ".join(filter(None, (why, "; ".join(dict.fromkeys(left)))))
        if cause == _NOTHING and not self._computes:
            return
        name, instead = type(self.model).__name__, "under autocast" if self.policy.level.rounds else "as written"
        if call.does == "capture" and not planned and (self.policy.ops or self.policy.modules):
            raise PolicyError(f"the overrides of {self.policy} cannot act, for {name} runs {instead}: {cause}")
        text = f"{name}: a call did not run {'all of ' * planned}its plan, but {instead}: {cause}"
        if (watch := watching()) is not None:
            watch.missed.append((self.model, cause))
        if self.on_change == "error":
            raise CaptureError(text)
        self._say(cause, logging.WARNING, text)

    @functools.cached_property
    def _computes(self) -> bool:
        """Say whether code outside of views inside the model has parameters to compute with."""
        others = any(runner_of(module) is not None for module in self.model.modules() if module is not self.model)
        return not others and next(self.model.parameters(), None) is not None

    def _cause(self, mine: bool) -> str:
        stance = dynamo_stance()
        if stance != "default":
            return f"torch.compiler.set_stance({stance!r})"
        if dynamo_is_disabled():
            return "torch._dynamo.config.disable"
        if in_transform():
            return "a transform of torch.func, under which Dynamo cannot trace"
        return _UNKNOWN if mine else _NOTHING

    def say_uncaptured(self, method: str) -> None:
        """Log once that a method runs under autocast and not by the plan: a warning where the plan says more."""
        plain = self.policy.level.is_autocasts and not self.policy.modules and not self.policy.ops
        level = logging.INFO if plain or not self.policy.level.rounds else logging.WARNING
        name = f"{type(self.model).__name__}.{method}"
        self._say(method, level, f"{name} runs under autocast, not captured; methods=({method!r},) captures it")

    def _say(self, what: str, level: int, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.log(level, "fxamp: %s", text)

    def say_idle_overrides(self) -> None:
        """Warn once of each override that has decided on no node of what was captured so far.

        Those of single nodes are left out: calibrations name all that is large, whatever decides there.
        """
        given = [Override("op", *item) for item in self.policy.ops if "#" not in item[0]]
        given += [Override("path", *item) for item in self.policy.modules]
        if not given or self.replayed is not None:
            return
        every = (d for entry in self.entries for d in entry.converted.plan.decisions if d.code == Code.OVERRIDE.value)
        decided = {d.reason for d in every if d.colour != "float32" or not d.reason.endswith("=low")}
        first = {id(module): path for path, module in self.model.named_modules()}
        names = {path: first[id(module)] for path, module in self.model.named_modules(remove_duplicate=False)}
        for override in (one for one in given if f"{Code.OVERRIDE.value}: {one}" not in decided):
            name = names.get(override.key, override.key) if override.kind == "path" else override.key
            why = (
                f"its nodes go by the first name of that module, '{name}'" if name != override.key
                else "nothing that it names was captured, or something else decides there, such as the dtype of a "
                "value that is written in place, or of a table that rows are read from"
            )  # fmt: skip
            self._say(
                str(override), logging.WARNING,
                f"{override} has decided nothing in what was captured of {type(self.model).__name__} so far: {why}.",
            )  # fmt: skip

    def _announce(self, first: int, seconds: float) -> None:
        """Log a line for each graph that a call captured, and why Dynamo captured again."""
        name = type(self.model).__name__
        if (call := current()) is not None and call.does == "run":
            self.say_idle_overrides()
        for entry in self.entries[first:]:
            plan = entry.converted.plan
            low = sum(d.colour == str(self.low).removeprefix("torch.") for d in plan.decisions)
            short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.low, str(self.low))
            logger.info(
                "fxamp: %s graph %d (%s): %d ops, %d %s, %d casts, %.1f s; inner %s %.1f s",
                name, entry.number, entry.state, len(plan.decisions), low, short, plan.casts, seconds - entry.seconds,
                self.backend if isinstance(self.backend, str) else "backend", entry.seconds,
            )  # fmt: skip

    def _say_again(self, reason: str) -> None:
        """Log why Dynamo captured again: a warning at the second time of a cause, and at the eighth graph of a number.

        Numbers vary at each step, as what is annealed; of some, as the `p` of a dropout, torch makes a constant.
        """
        number = _NUMBER.match(reason)
        cause = number[1] if number else re.sub(r"\d+", "N", reason)
        self._causes[cause] += 1
        name, level = type(self.model).__name__, logging.INFO
        if number and self._causes[cause] == _EIGHTH - 1:
            logger.warning(
                "fxamp: %s is captured at each value of %s, of which torch makes a constant: this is graph %d. Change "
                "it seldom, or compute with a tensor in its place.", name, _MODULE.sub(r".\1", cause), _EIGHTH,
            )  # fmt: skip
        elif not number and self._causes[cause] == 2:
            level = logging.WARNING
        logger.log(level, "fxamp: %s was captured again: %s", name, reason)


_NUMBER = re.compile(r"(\S+) == -?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?:\s|$)")  # the guard of a float
_MODULE = re.compile(r"\._modules\['(\w+)'\]")
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


def _reads_numpy(model: nn.Module) -> bool:
    """Say whether a file that a module of the model, or its `forward`, is written in has imported NumPy."""
    numpy, kinds = sys.modules.get("numpy"), {type(module) for module in model.modules()}
    files = {name for kind in kinds for name in (kind.__module__, getattr(forward_of(kind), "__module__", None))}
    known = (vars(sys.modules[name]) for name in files if name in sys.modules and not name.startswith("torch."))
    return numpy is not None and any(value is numpy for names in known for value in list(names.values()))


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


def check_settings(
    model: nn.Module, on_change: str = "recompile", methods: Any = (), dynamic: Any = None, **_: Any
) -> None:
    """Raise PolicyError for a setting that there is not, or a method that the model's class does not define."""
    if dynamic not in (True, False, None):
        raise PolicyError(f"dynamic is True, False or None, not {dynamic!r}.")
    if on_change not in ("recompile", "error"):
        raise PolicyError(f"on_change is 'recompile' or 'error', not {on_change!r}.")
    if isinstance(methods, str):
        raise PolicyError(f"methods is a tuple of names: write methods=({methods!r},).")
    for name in methods:
        if not callable(getattr(type(model), name, None)):
            known = [n for n in dir(type(model)) if callable(getattr(type(model), n, None))]
            raise PolicyError(f"{type(model).__name__} has no method {name!r}{nearest(name, known)}.")
