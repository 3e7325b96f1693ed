"""One model by one front end at every level, judged: is it the model, is it autocast, is it close to FP32?

O0 has to be eager PyTorch to the bit. O1 has to have the forward values of `torch.autocast` to the bit, or a deviation
that its plan names at the first node that differs; its gradients, and all of O2 and O3, are as close to FP32 as low
precision allows (`runs.Allowed`), twice as far at O3, or as close to the model on low inputs; what is infinite in FP32
may be the largest low number there. If an output has another dtype than the model's, that is a guess and no mismatch
where the model holds 16-bit tensors or is given any.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

import fxamp
from fxamp.capture.outputs import meets_low
from fxamp.errors import NotFaithfulError
from fxamp.observe.snapshot import fresh, preserved, same_attributes
from passes._torch import pytree
from passes.contract.errors import FxampError, VerificationError
from passes.contract.policy import Policy
from passes.contract.reasons import DEVIATIONS
from passes.ops import ops

from .alone import torch_alone
from .first import Calls, Pair, Stopped, beside, first_difference
from .own import Called, given_back, names_low, now_fp32, now_low, of_other_branches, unsaturated, with_dtypes
from .runs import Allowed, Run, changed, gradients_differ, run, tensors, values_differ, without_fused_layers

LEVELS = ("O0", "O1", "O2", "O3")
# A view of the model; the compiler alone, on what torch exports; in place by torch.compile, and called under autocast.
FRONT_ENDS = ("view", "graph", "ambient")
# A view of a model whose numbers are attributes, after one with other numbers: to Dynamo they are inputs of the graph.
NUMBERS = "numbers"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}

OK, DEVIATION, GUESS, REFUSED, RAISES, TORCH = "ok", "deviation", "guess", "refused", "eager raises", "torch alone"
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
    """A model and its inputs, and what they give without fxamp: plain, and under autocast.

    Attributes:
        numbers: the attributes of the model that are numbers, for the front end `NUMBERS`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    low: str = "bf16"
    backward: bool = True
    deterministic: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)
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
        if front_end != "graph":
            return {level: _judged_at_call(found, front_end, level) for level in levels}
        try:
            program = exported(found)
            given = replace(found, model=as_graph(program))
            if given.autocast is None:
                # With FP32's literals and dtypes in it the graph may raise where the model does not.
                given.allowed.as_under(found.autocast)
        except Exception as e:
            return dict.fromkeys(levels, Verdict(TORCH, f"torch.export: {as_verdict(e).why}"))
        return {level: _graph(given, program, level) for level in levels}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, and what torch prints of an error of its own, from the terminal."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def exported(found: Called) -> ExportedProgram:
    """Export a model in its present mode, for the sizes of its inputs."""
    with same_attributes(found.model), preserved(found.model), quiet():  # a buffer that forward makes is a fake one
        return torch.export.export(found.model, found.args, found.kwargs, strict=False)


def as_graph(program: ExportedProgram) -> nn.Module:
    """Return the graph of a program as a model, without the assertions on dtypes, which autocast breaks."""
    made: Any = program.module(check_guards=False)
    for node in list(made.graph.nodes):
        if ops.name(node) == "_assert_tensor_metadata":
            made.graph.erase_node(node)
    made.recompile()
    return made


def _policy(found: Subject, level: str) -> Policy:
    return Policy(level, dtype=LOW[found.low])


def _graph(found: Subject, program: ExportedProgram, level: str) -> Verdict:
    """Convert an exported program, and judge it beside its own graph, which is the truth."""
    try:
        module = fxamp.convert(program, policy=_policy(found, level))
        verdict = _judge(found, found.run(module), level, fxamp.plan_of(module))
    except Exception as e:
        verdict = as_verdict(e)
        return Verdict(TORCH, verdict.why) if level != "O0" and _raises_under_autocast(found, e) else verdict
    if verdict.kind != DEVIATION:
        return verdict
    return _named(level, verdict, lambda: [pair_of(found.model, module, found.args, found.kwargs, found.ambient())])


def _raises_under_autocast(found: Subject, error: Exception) -> bool:
    """Say whether a model raises the same under autocast, as with a kernel that takes no 16 bits."""
    try:
        found.run(found.model, found.ambient())
    except Exception as e:
        return (type(e), str(e).partition("\n")[0]) == (type(error), str(error).partition("\n")[0])
    return False


def pair_of(graph: nn.Module, module: GraphModule, args: Any, kwargs: Any, context: Any) -> Pair:
    """Run a graph in a context, such as autocast, and beside it what it was converted to."""
    flat = pytree.tree_leaves((args, kwargs))
    with preserved(graph):
        pair = beside(graph, module, fxamp.plan_of(module), flat, context)
    with preserved(graph), contextlib.suppress(Stopped):
        pair.got.run(*map(fresh, flat), enable_io_processing=False)
    return pair


def _named(level: str, verdict: Verdict, pairs: Callable[[], list[Pair]]) -> Verdict:
    """Name the first node that differs at O1; a difference of which the plan says nothing is a mismatch."""
    if level != "O1":
        return verdict
    code, where = first_difference(pairs())
    if code not in DEVIATIONS:
        return Verdict(MISMATCH, f"{verdict.why}; first at {where}, of which the plan says {code!r}")
    return Verdict(DEVIATION, f"{code} at {where}")


def _judged_at_call(found: Subject, front_end: str, level: str) -> Verdict:
    verdict, got, plan = _compiled(found, front_end, level)
    if got is not None and verdict.kind == MISMATCH and _may_guess(found, plan) and _other_dtypes(got, found.plain):
        restored = with_dtypes(got, found.plain)
        if not _judge(found, restored, level, plan).failed:
            return Verdict(GUESS, verdict.why)
    if verdict.kind == DEVIATION:
        verdict = _named(level, verdict, lambda: recorded(found, front_end, level))
    if verdict.kind not in (MISMATCH, ERROR, REFUSED):
        return verdict
    for alone in torch_alone(found, level):
        if got is None and alone.raised:
            return Verdict(TORCH, alone.raised)
        why = alone.differs(found, level) if got is not None else ""
        # It may differ from eager as torch.compile alone does, and in nothing else.
        if got is not None and why and not _called(alone.beside(found), got, front_end, level, plan).failed:
            return Verdict(TORCH, why)
    return verdict


def recorded(found: Subject, front_end: str, level: str) -> list[Pair]:
    """Run the captured graphs of a subject under autocast beside the emitted ones, one pair for each call of one."""
    torch._dynamo.reset()
    calls = Calls(found.ambient)
    of = calls.of_view if front_end == "view" else calls.of_compiled
    return of(found.model, found.args, found.kwargs, _policy(found, level))


def _compiled(found: Subject, front_end: str, level: str) -> tuple[Verdict, Run | None, fxamp.Plan | None]:
    """Compile a subject and call it: what becomes of it, what it gave, and its plan."""
    policy = _policy(found, level)
    torch._dynamo.reset()
    try:
        if front_end == NUMBERS:
            return _with_numbers(found, policy)
        if front_end == "view":
            module = fxamp.convert(found.model, found.args, found.kwargs, policy=policy)
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


def _with_numbers(found: Subject, policy: Policy) -> tuple[Verdict, Run | None, fxamp.Plan | None]:
    """Convert a subject of which Dynamo has seen other numbers; its plan must be that of a process that has not."""
    fresh = fxamp.plan_of(fxamp.convert(found.model, found.args, found.kwargs, policy=policy, check=False))
    torch._dynamo.reset()
    with same_attributes(found.model), contextlib.suppress(Exception):  # other numbers may be wrong ones
        vars(found.model).update({name: number * 1.25 for name, number in found.numbers.items()})
        fxamp.convert(found.model, found.args, found.kwargs, policy=policy, check=False)
    module = fxamp.convert(found.model, found.args, found.kwargs, policy=policy, check=False)
    got, plan = found.run(module), fxamp.plan_of(module)
    if plan != fresh:
        return Verdict(MISMATCH, f"another plan: {str(fxamp.diff(fresh, plan))[-200:]}"), got, plan
    return _called(found, got, "view", policy.level.name, plan), got, plan


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
    named = not meets_low(found.model, (found.args, found.kwargs))  # else nothing would be low without autocast
    wider = bool(fp32) and (branched or named or names_low(found))
    narrower += of_other_branches(found.autocast, found.plain)
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
            named = plan is not None and bool(plan.deviations)
            far = found.allowed.too_far(got, level)
            return Verdict(DEVIATION, why) if named and not far else Verdict(MISMATCH, far if named else why)
        if not gradients_differ(got, found.autocast) and got.spec == found.plain.spec:
            why = found.allowed.too_far(got, level) if _other_dtypes(got, found.plain) else ""
            return Verdict(MISMATCH, why) if why else Verdict(OK)
    if not found.deterministic:
        return Verdict(OK)
    why = found.allowed.too_far(got if level == "O1" else unsaturated(got, found.plain, found.dtype), level)
    return Verdict(MISMATCH, why) if why else Verdict(OK)


def _may_guess(found: Subject, plan: fxamp.Plan | None) -> bool:
    """Say whether the dtype of an output may be a guess: of a model that meets low tensors, in several graphs."""
    several = plan is None or not plan.complete or any(note.startswith("graph break") for note in plan.notes)
    return several and meets_low(found.model, (found.args, found.kwargs))


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
    if isinstance(chain, NotFaithfulError):
        return Verdict(MISMATCH, line)
    if isinstance(chain, FxampError):
        return Verdict(REFUSED, f"{type(chain).__name__}: {line}")
    return Verdict(ERROR, f"{type(error).__name__}: {line}")
