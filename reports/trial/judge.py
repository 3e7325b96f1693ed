"""One model by one front end at every level, judged: is it the model, is it autocast, is it close to FP32?

O0 has to be eager PyTorch to the bit. O1 has to have the forward values of `torch.autocast` to the bit, or a deviation
that its plan names at the first node that differs; its gradients, and all of O2 and O3, are as close to FP32 as low
precision allows (`runs.Allowed`), twice as far at O3, or as close to the model on low inputs.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from fxamp.capture.export import without_fused_layers
from fxamp.capture.model.captured import Captures, as_inputs
from fxamp.capture.states import capture, copied
from fxamp.trust.check import check_runs
from torch import nn

import fxamp
from fxamp.convert import autocast_for, checked, emit
from fxamp.dynamo.resolve import resolve
from passes._torch import pytree
from passes.contract.errors import FxampError, RejectedError, VerificationError
from passes.contract.policy import Policy
from passes.contract.reasons import DEVIATIONS

from .alone import torch_alone
from .first import first_difference, first_difference_at_calls
from .own import Called, given_back, names_low, now_fp32, now_low, with_dtypes
from .runs import Allowed, Run, changed, gradients_differ, run, tensors, values_differ

LEVELS = ("O0", "O1", "O2", "O3")
# Without inputs; with them; at the first call; at a call under autocast, by the name of the backend.
FRONT_ENDS = ("fx", "export", "jit", "ambient")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}

OK, DEVIATION, REFUSED, RAISES, TORCH = "ok", "deviation", "refused", "eager raises", "torch.compile alone"
MISMATCH, ERROR, VERIFICATION, DIED = "mismatch", "error", "verification", "died"
FAILURES = (MISMATCH, ERROR, VERIFICATION, DIED)


@dataclass(frozen=True)
class Verdict:
    """What became of a model at one level.

    Attributes:
        kind: one of the words above.
        why: what differs, the code of the deviation, or the error.
    """

    kind: str
    why: str = ""

    @property
    def failed(self) -> bool:
        """Say whether this is what trial is looking for."""
        return self.kind in FAILURES


@dataclass
class Subject:
    """A model and its inputs, and what they give without fxamp: plain, and under autocast."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    low: str = "bf16"
    backward: bool = True
    deterministic: bool = True
    plain: Run = field(init=False)
    autocast: Run | None = field(init=False, default=None)
    allowed: Allowed = field(init=False)

    def __post_init__(self) -> None:
        """Run the model; raises what it raises."""
        self.plain = self.run(self.model)
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            self.autocast = self.run(self.model, self.ambient())
        self.allowed = Allowed(
            lambda noise: self.run(self.model, noise=noise), self._in_low, self.plain, self.autocast, self.dtype
        )

    def _in_low(self) -> Run:
        def low(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
                return value
            return value.detach().to(self.dtype).requires_grad_(value.requires_grad)

        args, kwargs = pytree.tree_map(low, (self.args, self.kwargs))
        return run(self.model, self.model, args, kwargs, backward=self.backward)

    @property
    def dtype(self) -> torch.dtype:
        """The low dtype."""
        return LOW[self.low]

    def ambient(self) -> torch.autocast:
        """Return the autocast that it is compared with."""
        return torch.autocast("cpu", dtype=self.dtype)

    def run(self, module: Callable[..., Any], context: Any = None, noise: Any = None) -> Run:
        """Run a module that has the model's parameters."""
        return run(module, self.model, self.args, self.kwargs, context=context, noise=noise, backward=self.backward)


def judged(found: Subject, front_end: str, levels: tuple[str, ...] = LEVELS) -> dict[str, Verdict]:
    """Convert a subject at every level, and judge each."""
    with quiet(), without_fused_layers():
        if front_end in ("jit", "ambient"):
            return {level: _at_first_call(found, front_end, level) for level in levels}
        try:
            captures = captured(found, front_end)
        except Exception as e:
            return dict.fromkeys(levels, as_verdict(e))
        return {level: _ahead_of_time(found, captures, level) for level in levels}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, and what torch prints of an error of its own, from the terminal."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class Tried(Called, Protocol):
    """A model with its inputs, and what is low for it."""

    @property
    def low(self) -> str: ...  # noqa: D102


def captured(found: Tried, front_end: str, device: str | None = None) -> Captures:
    """Capture once for all levels, as `fxamp.convert` does for one, and check it as that does."""
    inputs = (found.args, found.kwargs) if front_end == "export" else (None, None)
    settled = resolve(_policy(found, "O1", device), found.model, as_inputs(*inputs))
    autocast = autocast_for(settled, found.model, as_inputs(*inputs))
    options: Any = {"dynamic_shapes": None} if front_end == "export" else {}
    captures = capture(found.model, *inputs, front_end=front_end, autocast=autocast, **options)
    if front_end == "export":
        captures = checked(captures, autocast, found.args, found.kwargs)
    return captures


def emitted(found: Tried, captures: Captures, level: str, device: str | None = None) -> Any:
    """Return a subject that was captured converted at one level, and run once as `fxamp.convert` does."""
    inputs = as_inputs(found.args, found.kwargs) if captures.graphs[0].front_end == "export" else None
    settled = resolve(_policy(found, level, device), found.model, inputs)
    captures = copied(captures)
    present = captures.graphs[0]
    converted = emit(captures, settled)
    if inputs is not None:
        check_runs(converted, present, *inputs)
    return converted


def _policy(found: Tried, level: str, device: str | None = None) -> Policy:
    return Policy(level, dtype=LOW[found.low], device=device)


def _ahead_of_time(found: Subject, captures: Captures, level: str) -> Verdict:
    try:
        module = emitted(found, captures, level)
        got = found.run(module)
        # Without inputs nothing says whether 0-dim values promote.
        verdict = _judge(found, got, level, module.plan, wider=module.plan.verified == "symbolic")
    except Exception as e:
        return as_verdict(e)
    if verdict.kind == DEVIATION and level == "O1":
        if any(c.without is not None for c in captures.graphs):
            return verdict  # two programs, which cannot be laid side by side
        code, where = first_difference(found, emitted(found, captures, "O0"), module)
        # Without inputs neither ranks are known, nor that an input is not FP32: O1's promise is not for those.
        others = any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors(found.args))
        symbolic = module.plan.verified == "symbolic" and (code == "unknown_rank" or others)
        if code not in DEVIATIONS and not symbolic:
            return _unnamed(verdict, code, where)
        return Verdict(DEVIATION, f"{code} at {where}")
    return verdict


def _unnamed(verdict: Verdict, code: str, where: str) -> Verdict:
    return Verdict(MISMATCH, f"{verdict.why}; first at {where}, of which the plan says {code!r}")


def _at_first_call(found: Subject, front_end: str, level: str) -> Verdict:
    verdict, got, plan = _compiled(found, front_end, level)
    if verdict.kind == DEVIATION:
        code, where = first_difference_at_calls(found, _policy(found, level))
        named = Verdict(DEVIATION, f"{code} at {where}")
        verdict = named if code in DEVIATIONS else _unnamed(verdict, code, where)
    if verdict.kind not in (MISMATCH, ERROR):
        return verdict
    for alone in torch_alone(found, level):
        if got is None and alone.raised:
            return Verdict(TORCH, alone.raised)
        why = alone.differs(found, level) if got is not None else ""
        # It may differ from eager as torch.compile alone does, and in nothing else.
        if got is not None and why and not _called(alone.beside(found), got, front_end, level, plan).failed:
            return Verdict(TORCH, why)
    return verdict


def _compiled(found: Subject, front_end: str, level: str) -> tuple[Verdict, Run | None, fxamp.Plan | None]:
    """Compile a subject and call it: what becomes of it, what it gave, and its plan."""
    policy = f"{level},dtype={found.low}"
    torch._dynamo.reset()
    try:
        if front_end == "jit":
            module = fxamp.compile(found.model, policy=policy, backend="eager")
            got = found.run(module)
        else:
            module = torch.compile(found.model, backend=fxamp.backend(policy, "eager"))
            got = found.run(module, None if level == "O0" else found.ambient())
    except Exception as e:
        return as_verdict(e), None, None
    try:
        plan = fxamp.plan_of(module)
    except FxampError:
        plan = None  # no graph: all of it ran as it is
    return _called(found, got, front_end, level, plan), got, plan


def _called(found: Subject, got: Run, front_end: str, level: str, plan: fxamp.Plan | None) -> Verdict:
    """Judge what a compiled model gave."""
    if level == "O0":
        return _judge(found, got, level, plan)
    if front_end == "ambient":
        return _judge_ambient(found, got, level, plan)
    inputs = tensors((found.args, found.kwargs))
    narrower = now_low(got, found.plain, inputs)
    if narrower and not names_low(found, found.ambient()):
        narrower = given_back(narrower, got, inputs)
    fp32 = now_fp32(got, found.plain)
    # The model may branch on a dtype; then the output is another value under autocast.
    branched = found.autocast is not None and not {*fp32} - {*now_fp32(found.autocast, found.plain)}
    wider = bool(fp32) and (branched or names_low(found))
    return _judge(found, with_dtypes(got, found.plain, narrower), level, plan, wider=wider)


def _judge(found: Subject, got: Run, level: str, plan: fxamp.Plan | None, *, wider: bool = False) -> Verdict:
    """Judge what a level gave; `wider` says that what the model gives low may come out FP32."""
    if level == "O0":
        why = changed(got, found.plain) if found.deterministic else ""
        return Verdict(MISMATCH, why) if why else Verdict(OK)
    given, got = got, with_dtypes(got, found.plain, now_fp32(got, found.plain)) if wider else got
    if level == "O1" and found.autocast is not None and found.deterministic:
        # Outputs have the model's dtypes: one that is low there, and FP32 under autocast, is autocast's rounded.
        why = values_differ(given, with_dtypes(found.autocast, given))
        if not why and not torch.equal(got.random, found.autocast.random):
            why = "another random state"
        if why:
            named = plan is not None and bool(plan.deviations or plan.verified == "symbolic")
            far = found.allowed.too_far(got, level)
            return Verdict(DEVIATION, why) if named and not far else Verdict(MISMATCH, far if named else why)
        if not gradients_differ(got, found.autocast) and got.spec == found.plain.spec:
            why = found.allowed.too_far(got, level) if _other_dtypes(got, found.plain) else ""
            return Verdict(MISMATCH, why) if why else Verdict(OK)
    if not found.deterministic:
        return Verdict(OK)
    why = found.allowed.too_far(got, level)
    return Verdict(MISMATCH, why) if why else Verdict(OK)


def _other_dtypes(got: Run, plain: Run) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype != b.dtype
               for a, b in zip(got.outputs, plain.outputs, strict=True))  # fmt: skip


def _judge_ambient(found: Subject, got: Run, level: str, plan: fxamp.Plan | None) -> Verdict:
    """Judge a call under autocast: at O1 dtypes are autocast's too."""
    if level != "O1" or found.autocast is None:
        return _judge(found, with_dtypes(got, found.plain), level, plan)
    why = values_differ(got, found.autocast)
    if not why and _other_dtypes(got, found.autocast):
        why = f"dtypes are {_dtypes(got)}, not {_dtypes(found.autocast)}"
    if why and plan is not None and plan.deviations:
        return Verdict(DEVIATION, why)
    return Verdict(MISMATCH, why) if why else Verdict(OK)


def _dtypes(found: Run) -> list[str]:
    return [str(t.dtype)[6:] for t in found.outputs if isinstance(t, torch.Tensor)]


def as_verdict(error: BaseException) -> Verdict:
    """Judge an error: on purpose, and then which, or not."""
    line = " ".join(str(error).split())[:300]
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, FxampError):
        chain = getattr(chain, "inner_exception", None) or chain.__cause__
    if isinstance(chain, VerificationError):
        return Verdict(VERIFICATION, line)
    if isinstance(error, RejectedError):
        return Verdict(RAISES, line)
    if isinstance(chain, FxampError):
        return Verdict(REFUSED, f"{type(chain).__name__}: {line}")
    return Verdict(ERROR, f"{type(error).__name__}: {line}")
