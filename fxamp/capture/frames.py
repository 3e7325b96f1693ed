"""The frames of one compiled function: what Dynamo makes of each is known from its own answer.

Dynamo calls back for a frame that it has no code for. What it calls is wrapped here:

    settings and limits         hold while a frame is compiled, so a call pays nothing for them
    an answer without code      this frame is left to Python: its place and the cause are kept, and each call that runs
                                it is told
    the code behind a break     begins with what the line of the break has given: a tensor that no graph has made is
                                one that Python has computed there
    a frame in which a call finds no op     is compiled all the same; Dynamo would leave its code to Python for good
    the 256th graph of a code   is the last one: what needs another is left to Python

`torch._dynamo.optimize` and the fields of what Dynamo answers are private names of torch; they are used here alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from passes._torch import pytree
from passes.contract.errors import CaptureError
from passes.graph.values import no_autocast

from .._torch import (
    OWN_CACHE,
    dynamo_errors,
    dynamo_is_disabled,
    dynamo_settings,
    last_record,
    storage_id,
    unmark_batch,
)
from ..errors import in_short
from ..observe.tensors import held
from .call import Call, current
from .graph import break_of
from .lost_backward import LostDerivativeError
from .one_step import fakes_of_one_step

CEILING = 256  # graphs of one code, as torch has it for all uses of a code together
# How often code is tried that Dynamo refuses, in a call each: a first one may make what later ones only read.
_ATTEMPTS = 2
_LIMITS = {
    "recompile_limit": 1 << 30, "accumulated_recompile_limit": 1 << 30, "allow_empty_graphs": True,
}  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), Tensor)  # values at a break of which it is known what was computed
_RESUMED = "torch_dynamo_resume_in_"  # begins the name of the code that Dynamo makes of what follows a break
_PYTHONS, _INSTALLED = (sysconfig.get_path(what) for what in ("stdlib", "purelib"))
# What Dynamo says of frames that compute nothing: code without tensors, and what Python or Dynamo itself has generated.
_IDLE = (
    "no tensor-related",
    "already Dynamo-generated",
    "namedtuple",
    "__setattr__",
    "torch.optim",
    "exec()",
    "genera",
)


def forward_of(kind: type[nn.Module]) -> Any:
    """Return `forward` of a class of modules; None where only an instance has it, as of what torch.jit made."""
    return getattr(kind, "forward", None)


class Frames:
    """A compiled function, `call`, and what became of the frames that its calls reached."""

    def __init__(
        self, function: Callable[..., Any], backend: Callable[..., Any], model: nn.Module,
        settings: Callable[[], dict[str, Any]], *, asks: Callable[[], bool] = lambda: False,
        dynamic: bool | None = None, fullgraph: bool = False,
    ) -> None:  # fmt: skip
        # The dtypes of the outputs in a trace without autocast, by which nothing runs, where that was asked for; None
        # where it fails, or ends at a break, which `unknown` says.
        self.alone: list[torch.dtype | None] | None = None
        self.unknown = ""
        self._asks, self._asking = asks, False
        # What is left to Python, with place and cause; "" if it computes nothing.
        self.refused: dict[CodeType, str] = {}
        self.outside: dict[CodeType, str] = {}  # behind breaks at which Python computes something, with the places
        self.news: list[str] = []  # what of `outside` no call has said yet
        self.opaque = False  # Python has given something at a break that may come of computing
        self._code: Any = getattr(function, "__code__", None)
        self._model, self._settings, self._fullgraph, self._dynamic = model, settings, fullgraph, dynamic
        self.fixes_sizes = False  # some code is traced with fixed sizes alone: no size of inputs is to be a symbol
        self._graphs: Counter[CodeType] = Counter()
        self._failing: set[CodeType] = set()  # refused since an op failed, which other inputs may mend
        self._attempts: Counter[CodeType] = Counter()  # of code that is refused, in how many calls that run
        types: Any = torch._dynamo.types
        asked_about = types.FrameExecStrategy(types.FrameAction.DEFAULT, types.FrameAction.DEFAULT)
        for code in _codes_of(model):  # another compilation may have left it to Python, which C code does unasked then
            torch._C._dynamo.eval_frame.set_code_exec_strategy(code, asked_about)
        context: Any = torch._dynamo.optimize(backend, dynamic=dynamic, nopython=fullgraph, **OWN_CACHE)
        if hasattr(context, "callback"):  # none where torch is told to do without Dynamo
            self._torchdynamo_orig_backend = self._inner = context.callback
            context.callback = self
        self.call: Callable[..., Any] = context(function)

    def forget(self, refused: Collection[str] | None = None) -> None:
        """Forget what became of frames: of those that were refused, by their texts, or of all."""
        if refused is None:
            self._graphs.clear()
            self._attempts.clear()
            self.outside.clear()
            self.opaque = False
        kept = self.refused.items() if refused is not None else ()
        self.refused = {code: text for code, text in kept if text not in (refused or ())}

    def forgive(self) -> None:
        """Behind a call that has left none, forget the code that a single call has left to Python."""
        self.refused = {c: text for c, text in self.refused.items() if not text or self._attempts[c] >= _ATTEMPTS}

    def asked(self, gm: GraphModule) -> bool:
        """Say whether a graph is traced to be asked for the dtypes of its outputs alone, which it is then."""
        if self._asking:
            outputs: Any = gm.graph.output_node().args[0]
            values = [getattr(n, "meta", {}).get("example_value") for n in outputs]
            self.unknown = f"there is a graph break at {broke}" if (broke := break_of(gm)) else ""
            self.alone = None if broke else [getattr(value, "dtype", None) for value in values]
        return self._asking

    def _ask(self, trace: Callable[[], Any]) -> None:
        self.alone, self._asking, self.unknown = None, True, "there is a graph break"
        try:
            with no_autocast():
                trace()
        except Exception as e:  # whatever an op raises for operands of several dtypes
            self.unknown = f"without autocast {in_short(e)}"
        finally:
            self._asking = False

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        """Compile a frame, or leave it to Python."""
        code, call = frame.f_code, current()
        if dynamo_is_disabled():
            return _left_to_python()
        if self._code is not None and code.co_name.startswith(f"{_RESUMED}{self._code.co_name}_at_"):
            return _left_to_python(with_all_inside=True, always=True)  # it returns what the model has returned
        if call is not None and code.co_name.startswith(_RESUMED):
            self._look_at_break(frame, call)
        if call is not None and code not in call.attempted and self._attempts[code] < _ATTEMPTS:
            self.refused.pop(code, None)
        if code not in self.refused:
            if self._graphs[code] < CEILING:
                made = self._compiled(frame, entry, state)
                if code not in self.refused:
                    return made
            else:
                self._refuse(code, f"its recompile limit: {CEILING} graphs of it were captured")
        if call is not None:
            call.unlock()
            call.refused += filter(None, (self.refused[code],))
            self._attempts[code] += call.does == "run" and code not in call.attempted
            call.attempted.add(code)
        if code in self._failing:
            self._failing.discard(code)
            del self.refused[code]
        return _left_to_python(with_all_inside=self._graphs[code] >= CEILING)

    def _look_at_break(self, frame: Any, call: Call) -> None:
        """Note whether Python has computed something at the break before a frame, by what has no frame of its own."""
        code = frame.f_code
        stack = [name for name in code.co_varnames[: code.co_argcount] if name.startswith("___stack")]
        if not stack or call.refused or code in self.outside:
            return
        values = pytree.tree_leaves(frame.f_locals[stack[-1]])
        self.opaque = self.opaque or not all(isinstance(value, _PLAIN) for value in values)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return
        known: list[Any] = [*(made() for made in call.made), *pytree.tree_leaves((call.args, call.kwargs))]
        known += [*call.model.parameters(), *held(call.model).values()]
        storages = {storage_id(t) for t in known if isinstance(t, Tensor)}
        computed = [t for t in tensors if storage_id(t) not in storages]
        self.opaque = self.opaque or bool(computed)
        if not any(map(_is_float, computed)):
            return
        name, _, line = code.co_name.removeprefix(_RESUMED).rpartition("_at_")
        text = f"{name} ({code.co_filename}:{line}): what it calls there computes outside of graphs"
        self.outside[code] = text
        self.news.append(text)

    def _compiled(self, frame: Any, entry: Any, state: Any) -> Any:
        made, code, call = self._answer(frame, entry, state), frame.f_code, current()
        if made.guarded_code is not None:
            self._graphs[code] += 1
            if call is not None and self._graphs[code] > 1 and (reason := _record(code, "recompile_reason")):
                call.again[reason] = None
        elif (
            code not in self.refused
            and code is not self._code
            and self._can_compute(code, getattr(made, "skip_reason", None), frame)
        ):
            why = getattr(made, "skip_reason", None) or "Dynamo has left it to Python"
            self._refuse(code, _record(code, "fail_reason").partition("\n")[0] or str(why))
        return made

    def _answer(self, frame: Any, entry: Any, state: Any) -> Any:
        errors, settings = dynamo_errors(), {**_LIMITS, **self._settings()}
        untraceable = errors.InternalTorchDynamoError, errors.TorchRuntimeError, errors.Unsupported, RecursionError
        failure: Exception
        try:
            return self._traced(frame, entry, state, settings)
        except untraceable as e:
            call, failure = current(), e
        except errors.BackendCompilerFailed as e:
            if not isinstance(e.inner_exception, LostDerivativeError):
                raise
            return self._answer_to(e.inner_exception, frame.f_code, current())
        if self._dynamic is None and call is not None:
            # It may be traced with the sizes of this call, and not with symbols for them.
            for value in call.marked:
                unmark_batch(value)
            fixed = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
            try:
                made = self._traced(frame, entry, state, {**settings, **fixed})
            except untraceable as e:
                failure = e
            else:
                self.fixes_sizes = self.fixes_sizes or made.guarded_code is not None
                return made
        return self._answer_to(failure, frame.f_code, call)

    def _traced(self, frame: Any, entry: Any, state: Any, settings: dict[str, Any]) -> Any:
        try:
            with _tracing(settings):
                if frame.f_code is self._code and self._asks():
                    self._ask(lambda: self._inner(frame, entry, state))
                return self._inner(frame, entry, state)
        except dynamo_errors().RecompileError as e:
            if not _is_of_data(str(e)):
                raise
        with _tracing({**settings, "error_on_recompile": False}):
            return self._inner(frame, entry, state)

    def _answer_to(self, failure: Exception, code: CodeType, call: Call | None) -> Any:
        """Leave a frame to Python that cannot be traced, or raise why not: an op has failed behind a break, for one."""
        errors = dynamo_errors()
        failed = isinstance(failure, errors.TorchRuntimeError)
        if self._fullgraph or call is None or (call.ran and failed):
            raise failure
        if call.ran and isinstance(failure, errors.InternalTorchDynamoError):
            what = f"Dynamo cannot trace {_place(code)}, behind a graph break: {in_short(failure)}"
            raise CaptureError(what) from failure
        if code is self._code:  # which computes nothing; Dynamo asks about the code that it calls
            self.refused[code] = ""
        else:
            self._refuse(code, f"Dynamo cannot trace it: {in_short(failure)}")
        if failed:
            self._failing.add(code)
        return _left_to_python()

    def _refuse(self, code: CodeType, cause: str) -> None:
        author = getattr(forward_of(type(self._model)), "__code__", code) if code is self._code else code
        self.refused[code] = f"{_place(author)}: {cause}"

    def _can_compute(self, code: CodeType, reason: str | None, frame: Any) -> bool:
        """Say whether a frame that is left to Python may compute something."""
        convert: Any = torch._dynamo.convert_frame
        if code.co_filename.startswith(_PYTHONS) and not code.co_filename.startswith(_INSTALLED):
            return False
        if torch._dynamo.trace_rules.check(code):  # torch's own
            return code in self._forwards
        if reason is None:  # torch 2.11 gives none
            return bool(convert.has_tensor_in_frame(frame)) and code not in convert.output_codes
        return not any(text in reason for text in _IDLE)

    @functools.cached_property
    def _forwards(self) -> frozenset[CodeType]:
        """The code of `forward` of the model's layers: of modules that hold parameters, or no other modules."""
        layers = (m for m in self._model.modules() if m._parameters or not m._modules)
        codes = (getattr(forward_of(type(layer)), "__code__", None) for layer in layers)
        return frozenset(code for code in codes if code is not None)


def _codes_of(model: nn.Module) -> set[CodeType]:
    """Return the code of the methods of a model's classes that the author has not kept from Dynamo; torch's aside."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    authors = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    methods = (method for kind in authors for method in vars(kind).values() if isinstance(method, FunctionType))
    found = {method.__code__ for method in methods if not hasattr(method, "_torchdynamo_disable")}
    return {code for code in found if not torch._dynamo.trace_rules.check(code)}


@contextlib.contextmanager
def _tracing(settings: dict[str, Any]) -> Iterator[None]:
    """Trace by these settings of Dynamo; where it traces recurrent layers, one time step of each stands for all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    one_step = fakes_of_one_step() if settings.get("allow_rnn") else contextlib.nullcontext()
    log.setLevel(logging.CRITICAL)  # torch logs the traceback of an op's error in each trace anew, before it is raised
    # For a break at `.item()` it logs fifteen lines on a setting; a line of ours names the break.
    of_items = logging.getLogger("torch._dynamo.variables.tensor")
    before, of_items.disabled = of_items.disabled, True
    try:
        with dynamo_settings(settings), one_step:
            yield
    finally:
        log.setLevel(level)
        of_items.disabled = before


def _left_to_python(*, with_all_inside: bool = False, always: bool = False) -> Any:
    """Return Dynamo's answer for a frame that Python runs: `always`, or until the next one, and `with_all_inside`."""
    types: Any = torch._dynamo.types
    inside = types.FrameAction.SKIP if with_all_inside else types.FrameAction.DEFAULT
    strategy = types.FrameExecStrategy(types.FrameAction.SKIP, inside)
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=always)


def _record(code: CodeType, what: str) -> str:
    """Return what Dynamo's record of the last compilation says, "" if it is of other code."""
    last = last_record()
    if last is None or (last.co_name, last.co_firstlineno) != (code.co_name, code.co_firstlineno):
        return ""
    return str(getattr(last, what, None) or "").strip()


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _is_of_data(reasons: str) -> bool:
    """Say whether the guards that failed are all on what crossed a graph break, and so on data, not on the model."""
    guards = re.findall(r"\d+/\d+: (.*)", reasons)
    return bool(guards) and all("___stack" in guard for guard in guards)


def _place(code: CodeType) -> str:
    return f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}:{code.co_firstlineno})"
