"""One model by one front end at every level, judged: is it the model, is it autocast, is it close to FP32?

O0 has to be eager PyTorch to the bit. O1 has to have the forward values of `torch.autocast` to the bit, or a deviation
that its plan names at the first node that differs; its gradients, and all of O2 and O3, are as close to FP32 as low
precision allows (`runs.Allowed`), twice as far at O3, or as close to the model on low inputs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import fxamp
from fxamp.capture.export import without_fused_layers
from fxamp.capture.model.captured import Captures, as_inputs
from fxamp.capture.states import capture, copied
from fxamp.convert import autocast_for, checked, emit, resolve
from fxamp.trust.check import check_runs, preserved
from passes._torch import enter_autocast, pytree
from passes.contract.errors import FxampError, RejectedError, VerificationError
from passes.contract.policy import Policy
from passes.contract.reasons import DEVIATIONS
from passes.graph.values import literal_dtype

from .first import first_difference, first_difference_at_calls
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


class Tried(Protocol):
    """A model with its inputs, and what is low for it."""

    @property
    def model(self) -> nn.Module: ...  # noqa: D102
    @property
    def args(self) -> tuple[Any, ...]: ...  # noqa: D102
    @property
    def kwargs(self) -> dict[str, Any]: ...  # noqa: D102
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


def emitted(found: Tried, captures: Captures, level: str, device: str | None = None) -> fxamp.ConvertedModule:
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
    verdict, got = _compiled(found, front_end, level)
    if verdict.kind == DEVIATION:
        code, where = first_difference_at_calls(found, _policy(found, level))
        named = Verdict(DEVIATION, f"{code} at {where}")
        verdict = named if code in DEVIATIONS else _unnamed(verdict, code, where)
    if verdict.kind not in (MISMATCH, ERROR):
        return verdict
    why = _without_fxamp(found, got, level)
    return Verdict(TORCH, why) if why else verdict


def _without_fxamp(found: Subject, got: Run | None, level: str) -> str:
    """Say what `torch.compile` alone does not keep of eager either, its graphs run as they are; "" if it does better.

    It has to raise where fxamp did (`got` is None), to differ where that differs, and at O0 in the same way. A graph
    with checkpoints in it is run by "aot_eager", as the plan says.
    """
    expected = found.plain if level == "O0" else found.autocast
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        seen: list[str] = []

        def inner(gm: Any, inputs: Any, backend: str = backend, seen: list[str] = seen) -> Any:
            seen += [str(n.target) for part in gm.modules() if hasattr(part, "graph") for n in part.graph.nodes]
            return lookup_backend(backend)(gm, inputs)

        for context in [None] if level == "O0" else [found.ambient(), None]:
            try:
                alone = found.run(torch.compile(found.model, backend=inner), context)
            except Exception as e:
                if got is None:
                    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
                continue
            if expected is None or got is None or (context is None and level != "O0"):
                continue
            why = changed(alone, expected)
            if why and not (level == "O0" and changed(got, alone)):
                return why
        if not any("checkpoint" in name for name in seen):
            return ""
    return ""


def _compiled(found: Subject, front_end: str, level: str) -> tuple[Verdict, Run | None]:
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
        return as_verdict(e), None
    try:
        plan = fxamp.plan_of(module)
    except FxampError:
        plan = None  # no graph: all of it ran as it is
    if front_end == "jit" or level == "O0":
        wider = level != "O0" and bool(_low_now_fp32(got, found.plain)) and _names_low(found)
        return _judge(found, got, level, plan, wider=wider), got
    return _judge_ambient(found, got, level, plan), got


def _judge(found: Subject, got: Run, level: str, plan: fxamp.Plan | None, *, wider: bool = False) -> Verdict:
    """Judge what a level gave; `wider` says that what the model gives low may come out FP32."""
    if level == "O0":
        why = changed(got, found.plain) if found.deterministic else ""
        return Verdict(MISMATCH, why) if why else Verdict(OK)
    given, got = got, _low_made_fp32(got, found.plain) if wider else got
    got = _given_back(got, found)
    if level == "O1" and found.autocast is not None and found.deterministic:
        # Outputs have the model's dtypes: one that is low there, and FP32 under autocast, is autocast's rounded.
        why = values_differ(given, _with_dtypes(found.autocast, given))
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
        return _judge(found, _with_dtypes(got, found.plain), level, plan)
    why = values_differ(got, found.autocast)
    if not why and _other_dtypes(got, found.autocast):
        why = f"dtypes are {_dtypes(got)}, not {_dtypes(found.autocast)}"
    if why and plan is not None and plan.deviations:
        return Verdict(DEVIATION, why)
    return Verdict(MISMATCH, why) if why else Verdict(OK)


def _low_now_fp32(got: Run, plain: Run) -> list[int]:
    """Return which outputs are FP32 that the model gives low."""
    pairs = enumerate(zip(got.outputs, plain.outputs, strict=False))
    both = [(i, a, b) for i, (a, b) in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    return [i for i, a, b in both if a.dtype is torch.float32 and b.dtype in LOW.values()]


def _low_made_fp32(got: Run, plain: Run) -> Run:
    """Pass over which of them these are."""
    outputs = list(got.outputs)
    for i in _low_now_fp32(got, plain):
        outputs[i] = outputs[i].to(plain.outputs[i].dtype)
    return replace(got, outputs=outputs)


def _given_back(got: Run, found: Subject) -> Run:
    """Pass over a 16-bit input that is returned as it is, where the model without autocast casts it up."""
    of_inputs = len(tensors((found.args, found.kwargs)))
    made = iter(got.shared)
    outputs = list(got.outputs)
    for i, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            continue
        shared = next(made)
        if any(at < of_inputs for at in shared) and value.dtype in LOW.values():
            outputs[i] = _as(value, found.plain.outputs[i])
    return replace(got, outputs=outputs)


def _names_low(found: Subject) -> bool:
    """Say whether the model names a low dtype, as in `.to(torch.bfloat16)`, or has regions of autocast.

    What it makes so may come out FP32 of `fxamp.compile`: Dynamo writes a dtype that was read off what autocast made
    low in the same way.
    """
    seen: list[torch.fx.Node] = []

    def inner(gm: Any, inputs: Any) -> Any:
        seen.extend(n for part in gm.modules() if hasattr(part, "graph") for n in part.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    with preserved(found.model), contextlib.suppress(Exception):
        torch.compile(found.model, backend=inner)(*copy.deepcopy(found.args), **copy.deepcopy(found.kwargs))
    named = any(n.op == "call_function" or str(n.target) == "to" for n in seen if literal_dtype(n) in LOW.values())
    return named or any(n.target is enter_autocast for n in seen)


def _with_dtypes(got: Run, of: Run) -> Run:
    """Return a run whose outputs have the dtypes of another's."""
    outputs = [_as(a, b) for a, b in zip(got.outputs, of.outputs, strict=False)]
    return replace(got, outputs=[*outputs, *got.outputs[len(outputs) :]])


def _as(a: Any, b: Any) -> Any:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return a.to(b.dtype) if both and a.is_floating_point() and b.is_floating_point() else a


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
