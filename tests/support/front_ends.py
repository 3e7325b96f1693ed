"""One model through every way in, and what a converted model has to equal: itself, torch.autocast, float64.

"view" is `fxamp.convert` of the model, and "graph" that of what `torch.export` makes of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes._torch import pytree
from passes.graph.notes import is_inserted
from tests.support.baseline import UnderAutocast
from tests.support.exported import program_of
from tests.support.helpers import Two, assert_same, example, run

FRONT_ENDS = ("view", "graph")
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
each_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)
each_capture = pytest.mark.parametrize("capture", ["ahead", "first call"])
# Dynamo itself uses what torch deprecates, and reads `.grad` of what a graph made; FP16 is for numerics here.
WARNINGS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale"),
]
FRESH = [*WARNINGS, pytest.mark.usefixtures("fresh")]  # which tests/conftest.py has


def each_low(*front_ends: str) -> pytest.MarkDecorator:
    """Parametrize a test of `front_end`, `name` and `low`: BF16 by each front end, FP16 by the first.

    What a low dtype changes lies behind the front ends, so FP16 by the others is left to the matrix.
    """
    legs = [pytest.param(f, "bf16", BF16, id=f"{f}-bf16") for f in front_ends]
    for f in front_ends:
        marks = () if f == front_ends[0] else (pytest.mark.matrix,)
        legs.append(pytest.param(f, "fp16", FP16, id=f"{f}-fp16", marks=marks))
    return pytest.mark.parametrize(("front_end", "name", "low"), legs)


def one() -> tuple[Tensor]:
    """Return the arguments of a model of one input."""
    return (example(),)


def convert(model: nn.Module, args: Any = None, front_end: str = "view", policy: str = "O1", **options: Any) -> Any:
    """Return a view of a model, captured at once if there are inputs; or the converted graph of its export."""
    if front_end == "graph":
        return fxamp.convert(program_of(model, args), policy=policy)
    return fxamp.convert(model, args, policy=policy, **options)


def decided(module: nn.Module, op: str) -> list[str]:
    """Return the colours of an op, in order."""
    return [d.colour for d in fxamp.plan_of(module).decisions if d.op == op]


def colours(module: nn.Module) -> dict[str, str]:
    """Return the colour of each node by its key."""
    return {d.key: d.colour for d in fxamp.plan_of(module).decisions}


def casts(module: nn.Module) -> list[Any]:
    """Return the casts that fxamp made, in all graphs."""
    return [n for g in fxamp.graphs(module) for n in g.graph.nodes if is_inserted(n)]


def tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def own(args: Any) -> Any:
    """Return a copy of inputs, for a model that may write to them; what is one tensor twice stays one."""
    return copy.deepcopy(args)


def aliases(args: Any, output: Any) -> list[list[int]]:
    """Say which inputs and outputs share memory: for each output, the values before it that it overlaps."""
    values = [*tensors(args), *tensors(output)]
    place = [t.untyped_storage().data_ptr() for t in values]
    return [[j for j in range(i) if place[j] == place[i]] for i in range(len(tensors(args)), len(values))]


def assert_eager(module: nn.Module, model: nn.Module, args: tuple[Any, ...]) -> None:
    """Check a model that nothing was rounded in: outputs, gradients, buffers, random state, inputs, shared memory."""
    mine, theirs = own(args), own(args)
    ours, eager = run(module, model, mine, {}), run(model, model, theirs, {})
    for a, b in zip(ours, eager, strict=True):
        assert_same(a, b)
    assert_same(mine, theirs)
    assert aliases(mine, ours[0]) == aliases(theirs, eager[0])


def under_autocast(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype = BF16) -> Any:
    torch.manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return model(*own(args))


def in_float64(model: nn.Module, args: tuple[Any, ...]) -> Any:
    up: Callable[[Any], Any] = lambda t: t.double() if isinstance(t, Tensor) and t.dtype == F32 else t  # noqa: E731
    torch.manual_seed(0)
    with torch.no_grad():
        return copy.deepcopy(model).double()(*pytree.tree_map(up, own(args)))


def error(got: Any, exact: Any) -> float:
    """Return the relative distance of all floating outputs together; inf for one that is not finite alone."""
    both = zip(tensors(got), tensors(exact), strict=True)
    pairs = [(_wide(a), _wide(b)) for a, b in both if b.is_floating_point() or b.is_complex()]
    difference = sum(torch.where(a == b, 0, a - b).abs().square().sum().item() for a, b in pairs)
    scale = sum(b[b.isfinite()].abs().square().sum().item() for _, b in pairs)
    return float((difference / max(scale, 1e-30)) ** 0.5) if difference == difference else float("inf")


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


@dataclass(frozen=True)
class Case:
    """A model that does one thing, and what comes of it.

    Attributes:
        build: makes the model.
        inputs: makes its inputs.
        legs: the front ends to try; what another test file covers is not tried again.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    legs: tuple[str, ...] = FRONT_ENDS


def check(case: Case, front_end: str, dtype: torch.dtype = BF16) -> None:
    """Check that nothing changes at O0, and at O1 nothing but what autocast rounds."""
    torch.manual_seed(0)
    model, args = case.build(), case.inputs()
    exact, rounded = at_levels(model, args, front_end, "O0", f"O1,dtype={'fp16' if dtype == FP16 else 'bf16'}")
    assert_eager(exact(), model, args)
    assert_as_autocast(rounded(), model, args, dtype)


def legs(cases: dict[str, Case]) -> list[Any]:
    """Return the name of each case with each front end, which take turns; what is left out is in the matrix."""
    made = []
    for turn, (name, case) in enumerate(cases.items()):
        for at, front_end in enumerate(case.legs):
            marks = () if at == turn % len(case.legs) else pytest.mark.matrix
            made.append(pytest.param(name, front_end, marks=marks))
    return made


def converted(forward: Callable[..., Any], front_end: str, policy: str = "O1", **layers: nn.Module) -> tuple[Any, Any]:
    """Return a model and its conversion, which has been called once."""
    torch.manual_seed(0)
    model = Two(forward, **layers)
    module = convert(model, one(), front_end, policy)
    with torch.no_grad():
        module(*one())
    return model, module


def compiled(model: nn.Module, policy: Any = "O1", inner: Any = "eager", **options: Any) -> Any:
    """Return what `fxamp.compile` makes; the inner backend runs graphs as they are unless the test is about another."""
    return fxamp.compile(model, policy=policy, backend=inner, **options)


def equal(a: Any, b: Any) -> bool:
    """Say whether two outputs hold the same numbers, in whatever dtypes."""
    return all(torch.equal(x.float(), y.float()) for x, y in zip(tensors(a), tensors(b), strict=True))


def assert_trains_as_autocast(module: nn.Module, model: nn.Module, *args: Any) -> None:
    """Check the outputs and all gradients of one call against torch.autocast, to the bit."""
    ours, autocasts = (run(call, model, args, {})[:2] for call in (module, UnderAutocast(model, BF16)))
    assert equal(ours, autocasts)


def captured(model: nn.Module, args: tuple[Any, ...], capture: str, policy: str = "O1,dtype=bf16") -> Any:
    """Return a view of a model, which is captured ahead of its first call or at it; see `each_capture`."""
    return fxamp.convert(model, args if capture == "ahead" else None, policy=policy)


def o1(model: nn.Module, args: tuple[Any, ...], front_end: str, policy: str = "O1") -> tuple[Any, Any]:
    """Return the converted model and what it gives, from seed 0."""
    module = convert(model, args, front_end, policy)
    return module, plain(module, args)


def plain(model: nn.Module, args: tuple[Any, ...]) -> Any:
    """Return what a model gives without gradients, from seed 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(*args)


def at_levels(model: nn.Module, args: Any, front_end: str, *policies: str) -> list[Callable[[], Any]]:
    """Return for each policy what converts the model, which is exported once."""
    if front_end == "view":
        return [partial(convert, model, args, front_end, policy) for policy in policies]
    program = program_of(model, args)
    return [partial(fxamp.convert, program, policy=policy) for policy in policies]


def assert_at_all_levels(model: nn.Module, args: Any, front_end: str, name: str, low: torch.dtype) -> None:
    """Compare O0 with eager, and every other level with torch.autocast."""
    exact, *rounded = at_levels(
        model, args, front_end, *(f"{level},dtype={name}" for level in ("O0", "O1", "O2", "O3"))
    )
    assert_eager(exact(), model, args)
    for make in rounded:
        assert_as_autocast(make(), model, args, low)


def assert_as_autocast(module: nn.Module, model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype = BF16) -> None:
    """Check O1: what autocast gives, or what is no further from float64; with the dtypes that the model gives."""
    buffers = [(b, b.clone()) for b in model.buffers()]

    def restored(output: Any) -> Any:
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)
        return output

    torch.manual_seed(0)
    with torch.no_grad():
        got = restored(module(*own(args)))
        plain = restored(model(*own(args)))
    assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(plain)]
    try:
        expected = restored(under_autocast(model, args, dtype))
    except RuntimeError:  # what autocast cannot run
        expected = None
    if expected is not None and all(
        torch.equal(_wide(a), _wide(b)) for a, b in zip(tensors(got), tensors(expected), strict=True)
    ):
        return
    exact = restored(in_float64(model, args))
    allowed = error(expected, exact) if expected is not None else torch.finfo(dtype).eps * 4
    assert error(got, exact) <= allowed
