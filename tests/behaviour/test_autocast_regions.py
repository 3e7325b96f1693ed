"""Autocast regions inside a model say what runs in which dtype, and stay."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.support.front_ends import (
    BF16,
    F32,
    FP16,
    FRESH,
    Case,
    assert_eager,
    at_levels,
    check,
    convert,
    decided,
    each_low,
    legs,
    one,
)
from tests.support.helpers import Two, in_turns

pytestmark = FRESH


def regions(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = self.l(x)
    with torch.autocast("cpu", enabled=False):
        exact = self.l(x)
    with torch.autocast("cpu", dtype=FP16):
        half = self.m(x)
    return self.m(target) + exact, half.float()


def of_an_upcast_value(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    with torch.autocast("cpu", enabled=False):
        return self.m(y.float())


def helper(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return layer(x)


def in_a_function(self: Any, x: Tensor) -> Any:
    return self.m(helper(self.l, x).float())


CASES = {
    "autocast and no_grad": Case(partial(Two, regions), one),
    "of an upcast value": Case(partial(Two, of_an_upcast_value), one),
    "in a function that the model calls": Case(partial(Two, in_a_function), one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_regions_say_what_runs_in_which_dtype(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="view", name="bf16", low=torch.bfloat16)
@each_low("view", "graph")
def test_a_region_of_the_other_low_dtype_reads_what_is_low(front_end: str, name: str, low: torch.dtype) -> None:
    other = BF16 if low == FP16 else FP16

    def forward(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        with torch.autocast("cpu", dtype=other):
            inside = self.m(y)
            both = self.m(inside + y)
        if front_end == "view":  # autocast joins FP16 and BF16 no more than it is asked to
            return inside, both, torch.cat([inside.float(), y.float()])
        return inside, both, torch.cat([inside, y])

    torch.manual_seed(0)
    model, args = Two(forward), one()
    levels = ("O0", *(f"{level},dtype={name}" for level in ("O1", "O2", "O3", "O1,modules.m=fp32")))
    exact, *rounded = at_levels(model, args, front_end, *levels)
    assert_eager(exact(), model, args)
    for make in rounded:
        module = make()
        with torch.no_grad():
            got, wanted = module(*args), model(*args)
        assert [t.dtype for t in got] == [other, other, F32]
        torch.testing.assert_close([t.float() for t in got], [t.float() for t in wanted], atol=0.05, rtol=0.05)
        if ".m=" not in str(fxamp.plan_of(module).policy):
            assert decided(module, "linear") == [str(d).removeprefix("torch.") for d in (low, other, other)]


def recomputed(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", **self.region):
        inside = checkpoint(lambda a: self.l(a), x, use_reentrant=False)
    return inside, self.m(x)


@pytest.mark.parametrize("region", [{"enabled": False}, {"dtype": FP16}])
def test_a_checkpoint_in_a_region_runs_as_the_region_says(region: dict[str, Any]) -> None:
    model, x = Two(recomputed, region=region), one()[0]
    got = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")(x)
    with torch.autocast("cpu", BF16):
        assert all(torch.equal(a, b.float()) for a, b in zip(got, model(x), strict=True))


@pytest.mark.parametrize(  # an export writes the dtype that a region without one has outside of all others
    ("front_end", "dtype", "region"),
    [("view", "bf16", {"dtype": FP16}), ("view", "fp16", {}), ("graph", "bf16", {"dtype": FP16})],
)
def test_a_region_round_all_of_a_model_is_the_models_own(front_end: str, dtype: str, region: dict[str, Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", **region):
            return self.l(x)

    torch.manual_seed(0)
    model, args = Two(forward), one()
    got = convert(model, args, front_end, f"O1,dtype={dtype}")(*args)
    with torch.autocast("cpu", FP16 if dtype == "fp16" else BF16):
        assert torch.equal(got.float(), model(*args).to(got.dtype).float())


def returns_of_a_region(self: Any, x: Tensor) -> Any:
    outside = self.l(x)
    with torch.autocast("cpu", BF16):
        inside, untouched = self.m(outside), outside.relu()
        with torch.autocast("cpu", enabled=False):
            exact, low = self.m(outside.float()), inside * 2
    return outside, inside, untouched, inside + outside, exact, low, inside * 2, inside.float()


@pytest.mark.default_case(front_end="graph", name="bf16", low=torch.bfloat16)
@each_low("view", "graph")
def test_what_a_region_of_the_models_own_returns_keeps_its_dtype(front_end: str, name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args = Two(returns_of_a_region), one()
    wanted = [t.dtype for t in model(*args)]
    assert wanted == [F32, BF16, F32, F32, F32, BF16, BF16, F32]
    for make in at_levels(model, args, front_end, *(f"{level},dtype={name}" for level in ("O0", "O1", "O2"))):
        assert [t.dtype for t in make()(*args)] == wanted


def computed(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x).relu())


def of_a_checkpoint(self: Any, x: Tensor) -> Any:
    h = checkpoint(lambda a: self.l(a).relu(), x, use_reentrant=False)
    return h, h.sin(), self.m(h), h.float()


def of_what_is_read(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    sure = h.softmax(-1).to(h.dtype), torch.ones(6, dtype=h.dtype) * 1.1, h.softmax(-1, dtype=torch.float32).type_as(h)
    return h.to(x.dtype), self.m(h).float().to(h.dtype), *sure


def of_what_is_read_in_a_checkpoint(self: Any, x: Tensor) -> Any:
    def recomputed(a: Tensor) -> Any:
        h = self.l(a)
        return self.m(h.softmax(-1).to(h.dtype)), h.exp(), h.exp().to(h.dtype)

    return checkpoint(recomputed, x, use_reentrant=False)


def of_a_broken_graph(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    torch._dynamo.graph_break()
    return h, h.sin(), checkpoint(self.m, h, use_reentrant=False), h.exp(), h.exp().to(h.dtype)


def broken(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    torch._dynamo.graph_break()
    return h, self.m(h).exp(), self.m(h)


AUTHORS = (computed, of_a_checkpoint, of_what_is_read, of_what_is_read_in_a_checkpoint, of_a_broken_graph, broken)


@pytest.mark.default_case(low=BF16)
@pytest.mark.parametrize(
    ("forward", "train", "low", "policy"),
    in_turns(AUTHORS, [True, False], [BF16, FP16], ["O1,dtype=bf16", "O2,dtype=bf16", "O1,dtype=fp16"]),
)
def test_what_leaves_a_region_round_all_of_a_model_has_the_dtype_that_the_model_gives(
    forward: Any, train: bool, low: torch.dtype, policy: str
) -> None:
    def inside(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", low):
            return forward(self, x)

    torch.manual_seed(0)
    model, (x,) = Two(inside).train(train), one()
    got, plain = fxamp.convert(model, policy=policy)(x), model(x)
    alike = forward in (broken, of_a_broken_graph) and policy.endswith("fp16" if low == FP16 else "bf16")
    for a, b in zip(*([t] if isinstance(t, Tensor) else t for t in (got, plain)), strict=True):
        assert a.dtype == b.dtype or (alike and a.dtype == F32)  # where it breaks, the region is told by its state
        assert policy.startswith("O2") or torch.equal(a, b.to(a.dtype))


def behind_a_region(self: Any, x: Tensor) -> Any:
    def recomputed(a: Tensor) -> Any:
        h = self.m(a)
        with torch.autocast("cpu", BF16):
            return self.l(a), h.sin(), h + self.l(h)

    with torch.autocast("cpu", BF16):
        inside = checkpoint(self.l, x, use_reentrant=False)
    return inside, inside * 2, self.m(inside.float()), *checkpoint(recomputed, x, use_reentrant=False)


@pytest.mark.default_case(name="fp16", low=torch.float16)
@each_low("view")
def test_what_leaves_a_checkpoint_has_the_dtype_of_each_region_in_it(
    front_end: str, name: str, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, args = Two(behind_a_region), one()
    wanted = [t.dtype for t in model(*args)]
    assert wanted == [BF16, BF16, F32, BF16, F32, F32]
    assert [t.dtype for t in convert(model, args, front_end, f"O1,dtype={name}")(*args)] == wanted


OTHERS = (("cpu", {"enabled": False}), ("cpu", {"dtype": FP16}), ("cpu", {"dtype": BF16}), ("cuda", {"enabled": False}))


@pytest.mark.parametrize(("region", "policy"), [*((region, "O1") for region in OTHERS), (OTHERS[2], "O0")])
def test_a_region_round_a_function_whose_graph_breaks_is_the_models_own(region: Any, policy: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        before = self.m(x)
        with torch.autocast(region[0], **region[1]):
            return before, *broken(self, x)

    torch.manual_seed(0)
    model, args = Two(forward), one()
    view = fxamp.convert(model, args, policy=f"{policy},dtype=bf16")  # compared with the model, or it raises
    got, plain = view(*args), model(*args)
    with torch.autocast("cpu", BF16, enabled=policy == "O1", cache_enabled=False):  # it has casts to any dtype
        expected = model(*args)
    with torch.no_grad():  # with gradients, what crosses a break and is read behind it is handed out as it was read
        alike = policy == "O1" and region[1] == {"dtype": BF16}  # the state of the view, from which it is not told
        assert [t.dtype for t in view(*args)] == ([F32] * len(plain) if alike else [t.dtype for t in plain])
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("way", ["view", "in place"])
def test_a_region_that_names_no_dtype_has_torchs(way: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu"):
            y = self.l(x)
            return y, self.m(x.to(y.dtype).float())

    torch.manual_seed(0)
    model, x = Two(forward), one()[0]
    module: Any = fxamp.convert(model) if way == "view" else torch.compile(model, backend=fxamp.backend("O1", "eager"))
    got, wanted = module(x), model(x)
    assert [t.dtype for t in got] == [t.dtype for t in wanted] == [BF16, BF16]
    assert all(map(torch.equal, got, wanted))
    assert not any("captured without autocast" in note for note in fxamp.plan_of(module).notes)


def without_cache(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return self.l(self.l(self.l(x)))


@pytest.mark.default_case(policy="O1")
@pytest.mark.parametrize("policy", ["O1", "O1,share_casts=always", "O2"])
def test_where_the_author_turns_the_cache_off_gradients_are_summed_in_fp32(policy: str) -> None:
    model, x = Two(without_cache), torch.randn(4, 6)
    with torch.autocast("cpu"):
        (theirs,) = torch.autograd.grad(model(x).float().square().sum(), [model.l.weight])
    view = fxamp.convert(model, (x,), policy=policy)
    (ours,) = torch.autograd.grad(view(x).float().square().sum(), [model.l.weight])
    assert torch.equal(ours, theirs) == (policy == "O1")


def squared_difference(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def test_such_a_region_in_a_compiled_step_is_the_authors() -> None:
    x, y = torch.randn(4, 6), torch.zeros(4, 6)
    weights = []
    for compiled in (False, "eager"):
        torch.manual_seed(0)
        model = Two(without_cache)
        optimizer = torch.optim.SGD(model.l.parameters(), 0.1)
        step = fxamp.TrainStep(fxamp.convert(model), squared_difference, optimizer, compile=compiled)
        step(x, y)
        weights.append(model.l.weight.detach().clone())
    assert torch.equal(*weights)


def contracted(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16):
        return torch.tensordot(x, self.l.weight, 1)


@pytest.mark.default_case(policy="O2")
@pytest.mark.parametrize("policy", ["O0", "O1", "O2"])
def test_an_op_that_is_decomposed_in_such_a_region_leaves_in_its_dtype(policy: str) -> None:
    model, x = Two(contracted), torch.randn(4, 6)
    graph = fxamp.convert(torch.export.export(model, (x,)), policy=policy)
    assert model(x).dtype == BF16
    assert torch.equal(graph(x), model(x))
    assert graph(x).dtype == BF16


class ThreeRegions(nn.Module):
    """A layer that is read in several regions of the author's, each of which has a cache of its own."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.l, self.m, self.broken = nn.Linear(16, 16), nn.Linear(16, 16), broken

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            h = self.l(x)
        h = h.float().relu()
        if self.broken:
            torch._dynamo.graph_break()
        with torch.autocast("cpu", BF16):
            h = self.l(h) + self.l(2 * h)
        with torch.autocast("cpu", BF16):
            h = self.l(h)
        return self.m(h.float())


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "a break"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a disabled region"])
def test_at_o0_each_region_sums_the_gradients_of_its_own_casts(nested: bool, broken: bool) -> None:
    model, x = ThreeRegions(broken), torch.randn(8, 16)
    view = fxamp.convert(copy.deepcopy(model), (x,), policy="O0")
    for module in (model, view):
        for _ in range(2):
            with torch.autocast("cpu", enabled=False) if nested else contextlib.nullcontext():
                loss = module(x).square().sum()
            loss.backward()
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
    for ours, theirs in zip(view.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
