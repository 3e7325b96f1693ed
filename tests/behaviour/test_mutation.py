"""Writes reach what the model writes to: in place, through views, to inputs, buffers and `out=`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxamp
from tests.support.front_ends import (
    FRESH,
    FRONT_ENDS,
    Case,
    assert_at_all_levels,
    assert_eager,
    at_levels,
    check,
    convert,
    each_front_end,
    each_low,
    legs,
    one,
    under_autocast,
)
from tests.support.helpers import Two, assert_same, example

pytestmark = [*FRESH, pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta")]


def in_place(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    y += self.m(x)
    y = F.relu(y, inplace=True)
    z = y * 1
    z.add_(x).mul_(0.5)
    return self.m(z)


WRITES: tuple[Callable[[Tensor, Tensor, Tensor], Any], ...] = (
    lambda y, x, at: y.__setitem__(x > 0, x[x > 0]),
    lambda y, x, at: y.__setitem__(at, x[:2]),
    lambda y, x, at: y.__setitem__((slice(None), at), x[:, :2]),
    lambda y, x, at: y.index_add_(0, at, x[:2]),
    lambda y, x, at: y.view(-1).index_copy_(0, at, x[0, :2]),
    lambda y, x, at: y.index_put_((at,), x[:2], accumulate=True),
    lambda y, x, at: y.index_reduce_(0, at, x[:2], "amax"),
    lambda y, x, at: y.scatter_(0, at.repeat(2)[:, None].expand(4, 6), x),
    lambda y, x, at: y.scatter_add_(0, at.repeat(2)[:, None].expand(4, 6), x),
    lambda y, x, at: y.scatter_reduce_(0, at.repeat(2)[:, None].expand(4, 6), x, "amin"),
    lambda y, x, at: y.masked_scatter_(x > 0, x),
    lambda y, x, at: y.put_(at, x[0, :2]),
    lambda y, x, at: y.lerp_(x, 0.3),
    lambda y, x, at: y.addmm_(x, x.t() @ x),
    lambda y, x, at: y.addbmm_(x[None], (x.t() @ x)[None]),
)


def sources_of_another_dtype(self: Any, x: Tensor, at: Tensor) -> Any:
    out = []
    for write in WRITES:
        y = self.l(x)
        write(y, x, at)
        out.append(self.m(y))
    return out


def write_through_a_view(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    y[:, :3].mul_(2)
    y.view(-1)[::5] = 1.0
    left = y[:, :3].t()
    left.add_(y[:, 3:].t().detach())
    return y, left


def write_between_two_uses(self: Any, x: Tensor) -> Any:
    y = self.m(x)
    before = y * 3 + self.l(y.detach() * 1)
    y.detach().mul_(2)
    return before, self.l(y)


def write_to_an_input(self: Any, x: Tensor) -> Any:
    x.add_(1)
    return self.l(x), x


def buffers_written(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    self.queue.copy_(y.detach())
    self.count.add_(1)
    return self.m(y) + self.average


def averages() -> Two:
    buffers = {"average": torch.zeros(6), "queue": torch.zeros(4, 6), "count": torch.zeros((), dtype=torch.long)}
    return Two(buffers_written, **buffers)


CASES = {
    "in place": Case(partial(Two, in_place), one),
    # Autocast cannot run it, and just in time, after a graph has run, nothing is tried anew.
    "sources of another dtype": Case(
        partial(Two, sources_of_another_dtype), lambda: (example(), torch.tensor([2, 0])), legs=("view", "graph")
    ),
    "through a view": Case(partial(Two, write_through_a_view), one),
    "between two uses": Case(partial(Two, write_between_two_uses), one),
    "to an input": Case(partial(Two, write_to_an_input), one),
    "to buffers": Case(averages, one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_in_place_writes_are_those_of_the_model(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_buffers_that_forward_writes_keep_their_dtype_and_their_updates(front_end: str) -> None:
    torch.manual_seed(0)
    model, eager = averages(), averages()
    eager.load_state_dict(model.state_dict())
    module = convert(model, one(), front_end)
    for _ in range(3):
        module(*one())
        eager(*one())
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert int(model.get_buffer("count")) == 3


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_an_input_that_forward_writes_to_is_written_to(front_end: str) -> None:
    module = convert(Two(write_to_an_input), one(), front_end)
    x = example()
    module(x)
    assert torch.equal(x, example() + 1)


def storage_set(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach().clone()
    y.set_((x * 2).to(y.dtype))
    return self.m(y)


def storage_resized(self: Any, x: Tensor) -> Any:
    y = torch.empty(0)
    y.resize_(4, 6)
    y.copy_(x)
    return self.m(y)


def leaf_inside(self: Any, x: Tensor) -> Any:
    return self.m((x * 2).requires_grad_())


def data_swapped(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    y.data = x * 2
    return self.m(y)


@pytest.mark.parametrize("forward", [storage_set, storage_resized, leaf_inside, data_swapped])
def test_replaced_storage_gives_right_values(forward: Callable[..., Any]) -> None:
    model = Two(forward)
    got = convert(model, one())(*one())
    torch.testing.assert_close(got, model(*one()), rtol=0.02, atol=0.02)
    assert got.requires_grad


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_an_op_in_place_follows_its_target(front_end: str) -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x) * 1
        view = y[1:]
        y.exp_()
        y.pow_(2)
        y.mul_(self.m(x)).div_(x.abs() + 1)
        return y, view

    torch.manual_seed(0)
    model = Two(write).requires_grad_(False)
    for made in at_levels(model, one(), front_end, "O1", "O2"):
        module = made()
        got, view = module(*one())
        torch.testing.assert_close(got, model(*one())[0], rtol=0.05, atol=0.05)
        assert torch.equal(got[1:], view)
        written = {d.op: d.colour for d in fxamp.plan_of(module).decisions if d.op.endswith("_")}
        assert len(set(written.values())) == 1
        assert set(written) == {"exp_", "pow_", "mul_", "div_"}


def read_low_then_written(self: Any, x: Tensor) -> Any:
    y = torch.mv(self.l.weight, x[0])
    read = y.sigmoid()
    y.sigmoid_()
    return self.m(x * read)


@pytest.mark.default_case(front_end="graph", name="bf16", low=torch.bfloat16)
@each_low("view", "graph")
def test_backward_reads_an_unbounded_value_as_it_was_before_a_write(
    front_end: str, name: str, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Two(read_low_then_written)
    (made,) = at_levels(model, one(), front_end, f"O3,dtype={name}")
    made()(*one()).sum().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(*one()).sum().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


def test_under_cudas_lists_an_op_in_place_keeps_the_dtype_of_its_target() -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        y.exp_()
        return y.log_softmax(-1)

    plan = fxamp.plan(Two(write).requires_grad_(False), one(), policy=fxamp.Policy(device="cuda"))
    assert [(d.op, d.colour) for d in plan.decisions] == [
        ("linear", "float16"),
        ("exp_", "float16"),
        ("log_softmax", "float32"),
    ]


def out_of_a_selection(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    largest, first = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(y, 1, out=(largest, first))
    ordered, order = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long)
    torch.sort(y, 1, out=(ordered, order))
    two, which = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.long)
    torch.topk(y, 2, out=(two, which))
    second, place = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.kthvalue(y, 2, out=(second, place))
    return largest, first, ordered, order, two, which, second, place


def out_of_a_move(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    a, b, c, d = torch.empty(2, 6), torch.empty(2, 6), torch.empty(4, 6), torch.empty(4)
    torch.index_select(y, 0, torch.tensor([1, 2]), out=a)
    torch.gather(y, 0, torch.zeros(2, 6, dtype=torch.long), out=b)
    torch.clamp(y, 0.0, 1.0, out=c)
    torch.linalg.svdvals(y, out=d)
    return a, b, c, d


def out_of_what_is_cast(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach()
    a, b, c, d = torch.empty(8, 6), torch.empty(4, 6), torch.empty(6), torch.empty(4, 6)
    torch.cat([y, y], out=a)
    torch.exp(y, out=b)
    torch.sum(y, 0, out=c)
    torch.add(y, y, alpha=3, out=d)
    return a, b, c, d


@pytest.mark.default_case(front_end="graph", name="bf16", low=torch.bfloat16)
@each_low(*FRONT_ENDS)
@pytest.mark.parametrize("writes", [out_of_a_selection, out_of_a_move, out_of_what_is_cast], ids=lambda f: f.__name__)
def test_out_may_have_another_dtype_than_the_operand(writes: Any, front_end: str, name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args = Two(writes), one()
    levels = [f"{level},dtype={name}" for level in ("O0", "O1", "O2", "O3")]
    exact, rounded, *further = at_levels(model, args, front_end, *levels)
    assert_eager(exact(), model, args)
    module = rounded()
    if writes is out_of_what_is_cast:
        assert_same(module(*args), under_autocast(model, args, low))
    for got in (module(*args), *(make()(*args) for make in further)):
        torch.testing.assert_close(got, model(*args), atol=0.05, rtol=0.05)


@pytest.mark.default_case(front_end="graph", name="bf16", low=torch.bfloat16)
@each_low(*FRONT_ENDS)
def test_tensors_in_a_list_are_written_to(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y, z = self.l(x).detach(), x.clone()
        torch._foreach_add_([y, z], 1.0)
        return y, z

    model, args = Two(forward), one()
    assert_at_all_levels(model, args, front_end, name, low)


@pytest.mark.default_case(front_end="view", name="bf16", low=torch.bfloat16)
@each_low("view", "graph")
def test_a_value_made_to_require_grad_keeps_its_dtype(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = torch.zeros_like(self.l(x).float()).requires_grad_()  # its node has no value in Dynamo's graph
        return self.m(y[:, :3].repeat(1, 2))

    assert_at_all_levels(Two(forward), one(), front_end, name, low)


@pytest.mark.default_case(name="bf16", low=torch.bfloat16)
@each_low("view")
def test_a_layer_put_in_its_own_place_is_followed(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.m = self.m.to(torch.float32)  # assigns `.data`, for which Dynamo adds a function that nobody reads
        return self.m(self.l(x))

    assert_at_all_levels(Two(forward), one(), front_end, name, low)


def written_through_a_cast_to_its_own_dtype(self: Any, x: Tensor, low: Tensor) -> Tensor:
    """Beside low inputs nobody knows whether the code named the dtype that it has under autocast, or read it."""
    h = self.l(x + low)
    h.to(device=h.device, dtype=h.dtype).unsqueeze(0).mul_(0.5)
    return h


@pytest.mark.parametrize("way", ["O1,dtype=bf16", "O2,dtype=bf16", "O3,dtype=bf16"])
def test_a_cast_to_the_dtype_of_a_value_is_no_copy_beside_low_inputs(way: str) -> None:
    model, x, low = Two(written_through_a_cast_to_its_own_dtype), example(), example().bfloat16()
    view = fxamp.convert(model, (x, low), policy=way)
    torch.testing.assert_close(view(x, low), under_autocast(model, (x, low)).float(), rtol=0.02, atol=0.02)
