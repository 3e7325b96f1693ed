"""What goes wrong when a graph of FP32 ops is rewritten: each trap, through every front end."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.notes import is_inserted
from tests.support.front_ends import (
    BF16,
    F32,
    FP16,
    FRONT_ENDS,
    WARNINGS,
    Case,
    at_levels,
    check,
    colours,
    convert,
    decided,
    fresh,
    one,
    tensors,
    under_autocast,
)
from tests.support.helpers import Two, assert_same, example, run

pytestmark = [
    *WARNINGS, pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta")
]  # fmt: skip
__all__ = ["fresh"]


def two() -> tuple[Tensor, Tensor]:
    return example(), example(4).flip(0)


def ids() -> tuple[Tensor]:
    return (torch.tensor([[1, 300, 301], [299, 7, 7]]),)


# Dtypes that the author wrote, and numbers.


def casts_of_every_spelling(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return y.half(), y.bfloat16().float(), y.double(), y.to(torch.float16).to(F32), y.type(torch.float64), y.to(x)


def casts_to_named_types(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return y.type("torch.DoubleTensor"), self.m(y.type(dtype="torch.FloatTensor")), y.type("torch.LongTensor")


def a_cast_that_is_returned_and_read(self: Any, x: Tensor) -> Any:
    low = self.l(x).to(BF16)
    return low, self.m(low.float())


def a_cast_by_name_that_is_returned(self: Any, x: Tensor) -> Any:
    low = self.l(x).bfloat16()
    return low, self.m(low.float())


def moves_that_are_no_casts(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x).to("cpu").to(memory_format=torch.contiguous_format).contiguous())


def relative_casts(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    h = y.float().pow(2).mean(-1, keepdim=True).type_as(y)
    return self.m(y * h.to(y.dtype)) + h.to(y)


def dtype_arguments(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    wide = torch.softmax(y, -1, dtype=F32) + y.sum(-1, keepdim=True, dtype=F32) + y.cumsum(0, dtype=F32)
    return wide, y.mean(0, dtype=torch.float64), torch.zeros_like(y, dtype=torch.float64), y.prod(-1, dtype=F32)


def numbers_out_of_range(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m((y + 1e5) - 1e5), torch.where(y > 0, y, -1e9).clamp(max=1e6)


def scalar_and_vector(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) * self.scalar), self.m(self.l(x) * self.one)


class Scales(Two):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.register_buffer("scalar", torch.tensor(1.1))
        self.register_buffer("one", torch.tensor([1.1]))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("queue", torch.zeros(4, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def half_meets_bfloat16(self: Any, x: Tensor) -> Any:
    return self.l(x).half() + self.m(x), self.m(self.l(x).half().float())


# Data that is not FP32.


def integers_and_booleans(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    best = y.argmax(-1)
    rows = y.gather(1, best[:, None]) + F.one_hot(best, 6).sum() + F.embedding(best, self.m.weight)
    return best, y > 0, rows, y[torch.tensor([2, 0])], best.cumsum(0)


def wide_branch(self: Any, x: Tensor) -> Any:
    return self.l(x), (x.double() @ x.double().t()).exp() + 1, self.m(x).double() * 2


def complex_rotation(self: Any, x: Tensor) -> Any:
    q = torch.view_as_complex(self.l(x).reshape(-1, 3, 2))
    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    return self.m(torch.view_as_real(q * turn).flatten(1)), q.detach()


def complex_output(self: Any, x: Tensor) -> Any:
    z = torch.complex(self.l(x), self.m(x))
    w = torch.fft.fft(self.l(x)) + torch.view_as_complex(self.m(x).reshape(-1, 3, 2)).sum()
    return z @ z.mH, w @ w.t(), z * 2j, self.m((w @ w.mH).real[:, :1] + w.abs()), torch.stack([z, w]).mean(0), z.imag


def complex_input(self: Any, x: Tensor) -> Any:
    return x @ x.mH, x.T @ x, self.m(self.l(x.real) * x.imag)


def decisions_on_fp32_values(self: Any, x: Tensor) -> Any:
    z = x / 3
    values, indices = z.topk(2)
    return self.l(z), z.argmax(-1), indices, values, z > 0.1, z.round(), torch.bucketize(z, torch.linspace(-1, 1, 9))


def bits(self: Any, x: Tensor) -> Any:
    return self.l(x).view(torch.int32), self.m(x)


def noise_like(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return torch.rand_like(y), torch.randn_like(y), y.new_zeros(2), torch.rand(3)


def dropped(self: Any, x: Tensor) -> Any:
    return self.m(F.dropout(self.l(x), 0.5)), torch.bernoulli(torch.full((4,), 0.5))


# Mutation and aliases.


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


def inputs_and_views_returned(self: Any, x: Tensor) -> Any:
    return x, x.t(), self.l(x), None, 3


def buffers_written(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    self.queue.copy_(y.detach())
    self.count.add_(1)
    return self.m(y) + self.average


def normalised(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options), nn.Linear(6, 6))


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(302, 6, **options)
        self.out = nn.Linear(6, 302)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


def renormalised() -> nn.Module:
    model = Words(max_norm=1.0)
    model.words.weight.requires_grad_(False)
    return model


def channels_last(self: Any, x: Tensor) -> Any:
    y = self.c(x.view(2, 2, 2, 3).to(memory_format=torch.channels_last))
    return y, y.contiguous().view(2, -1), y.permute(0, 2, 3, 1).reshape(-1, 6), y.float().half()


# Structure.


def tied() -> nn.Module:
    model = Words()
    model.out.weight = model.words.weight
    return model


def several_outputs(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    a, b, c = y.split(2, 1)
    values, indices = y.max(1)
    u = y.unbind(0)[1]
    return self.m(torch.cat([a, c, b], 1)), values, indices, u, y.topk(2), {"median": y.median(0), "none": None}


def called_twice(self: Any, x: Tensor) -> Any:
    return self.l(F.layer_norm(self.l(x), (6,)).exp()), self.l(x.double().float())


def constants(self: Any, x: Tensor) -> Any:
    return self.l(torch.ones(6) + x) + torch.zeros(6, dtype=F32) + torch.arange(6) + torch.full((6,), 0.1)


def any_count(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    keep = x > 0
    return y[keep], x.nonzero(), self.m(y[keep.any(1)]), torch.unique(x > 0)


def regions(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = self.l(x)
    with torch.autocast("cpu", enabled=False):
        exact = self.l(x)
    with torch.autocast("cpu", dtype=FP16):
        half = self.m(x)
    return self.m(target) + exact, half.float()


JIT = ("jit",)  # ahead of time, test_preflight.py, test_modes.py and test_capture.py have it
REGION = {"fx": "region at"}
LAYERS = {"c": lambda: nn.Conv2d(2, 6, 1)}
TRAPS = {
    "casts of every spelling": Case(partial(Two, casts_of_every_spelling), one),
    "casts to named types": Case(partial(Two, casts_to_named_types), one),
    # Just in time the dtype of what is returned tells no cast to a dtype from one that restores a dtype.
    "a cast that is returned and read": Case(
        partial(Two, a_cast_that_is_returned_and_read), one, legs=("fx", "export")
    ),
    "a cast by name that is returned": Case(partial(Two, a_cast_by_name_that_is_returned), one),
    "moves that are no casts": Case(partial(Two, moves_that_are_no_casts), one),
    "relative casts": Case(partial(Two, relative_casts), one),
    "dtype arguments": Case(partial(Two, dtype_arguments), one),
    "numbers out of range": Case(partial(Two, numbers_out_of_range), one),
    "0-dim and 1-D scales": Case(partial(Scales, scalar_and_vector), one),
    "fp16 meets bf16": Case(partial(Two, half_meets_bfloat16), one),
    "integers and booleans": Case(partial(Two, integers_and_booleans), one),
    "float64": Case(partial(Two, wide_branch), one),
    "complex": Case(partial(Two, complex_rotation), one),
    "complex output": Case(partial(Two, complex_output), one),
    "complex input": Case(partial(Two, complex_input), lambda: (torch.complex(*two()),)),
    "decisions on FP32 values": Case(partial(Two, decisions_on_fp32_values), one),
    "dropout": Case(partial(Two, dropped), one, legs=JIT),
    "in place": Case(partial(Two, in_place), one),
    "sources of another dtype": Case(partial(Two, sources_of_another_dtype), lambda: (example(), torch.tensor([2, 0]))),
    "write through a view": Case(partial(Two, write_through_a_view), one),
    "write between two uses": Case(partial(Two, write_between_two_uses), one),
    "write to an input": Case(partial(Two, write_to_an_input), one),
    "inputs and views returned": Case(partial(Two, inputs_and_views_returned), one, legs=JIT),
    "buffers written": Case(partial(Scales, buffers_written), one),
    "batch norm": Case(normalised(), one, legs=JIT),
    "batch norm without affine": Case(normalised(affine=False), one, legs=JIT),
    "batch norm without statistics": Case(normalised(track_running_stats=False), one, legs=JIT),
    "embedding": Case(partial(Words, padding_idx=7, scale_grad_by_freq=True), ids),
    "embedding with max_norm": Case(renormalised, ids),
    "channels last": Case(partial(Two, channels_last, c=nn.Conv2d(2, 6, 1)), one),
    "tied": Case(tied, ids, legs=JIT),
    "several outputs": Case(partial(Two, several_outputs), one),
    "called twice": Case(partial(Two, called_twice), one, legs=JIT),
    "constants": Case(partial(Two, constants), one, legs=JIT),
    "any count": Case(partial(Two, any_count), one, legs=JIT),
    "regions": Case(partial(Two, regions), one, REGION),
}


@pytest.mark.parametrize(("trap", "front_end"), [(t, leg) for t, case in TRAPS.items() for leg in case.legs])
def test_nothing_changes_but_what_autocast_rounds(trap: str, front_end: str) -> None:
    check(TRAPS[trap], front_end)


def o1(model: nn.Module, args: tuple[Any, ...], front_end: str, policy: str = "O1") -> tuple[Any, Any]:
    """Return the converted model and what it gives, from seed 0."""
    module = convert(model, args, front_end, policy)
    torch.manual_seed(0)
    with torch.no_grad():
        return module, module(*args)


def plain(model: nn.Module, args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(*args)


each_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


# What autocast would change, and a converted model does not.


@each_front_end
def test_noise_is_drawn_in_the_dtype_of_the_model(front_end: str) -> None:
    model = Two(noise_like)
    module, got = o1(model, one(), front_end)
    assert_same(got, plain(model, one()))
    assert decided(module, "linear") == ["bfloat16"]
    assert not torch.equal(under_autocast(model, one())[0].float(), got[0])


@each_front_end
def test_the_bits_of_a_value_are_those_of_the_model(front_end: str) -> None:
    model = Two(bits)
    module, got = o1(model, one(), front_end)
    assert torch.equal(got[0], plain(model, one())[0])
    assert decided(module, "linear") == ["float32", "bfloat16"]


@each_front_end
def test_a_cast_that_does_nothing_shares_memory_as_before(front_end: str) -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        wide = y.float()
        wide.add_(1)
        return self.m(y * 2)

    model = Two(write)
    _, got = o1(model, one(), front_end)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.02, atol=0.02)


RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to(x.dtype)": lambda y, x: y.to(x.dtype), "to(dtype=)": lambda y, x: y.to(dtype=x.dtype, device=x.device),
    "to(x)": lambda y, x: y.to(x), "type(x.dtype)": lambda y, x: y.type(x.dtype),
    "type_as(x)": lambda y, x: y.type_as(x),
}  # fmt: skip


@each_front_end
@pytest.mark.parametrize("spelling", RELATIVE)
def test_a_relative_cast_that_does_nothing_shares_memory_as_before(spelling: str, front_end: str) -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        RELATIVE[spelling](y, x).mul_(2)
        return self.m(y)

    model = Two(write)
    for made in at_levels(model, one(), front_end, "O1", "O3"):
        for got, eager in zip(run(made(), model, one(), {})[:2], run(model, model, one(), {})[:2], strict=True):
            torch.testing.assert_close(got, eager, rtol=0.02, atol=0.02)


FIELDS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda y: y.max(1).values, "min": lambda y: torch.min(y, 1).values, "sort": lambda y: y.sort(1).values,
    "median": lambda y: y.median(1).values, "mode": lambda y: y.mode(1).values, "cummax": lambda y: y.cummax(1).values,
    "cummin": lambda y: torch.cummin(y, dim=1).values, "topk": lambda y: y.topk(2).values,
    "kthvalue": lambda y: y.kthvalue(2, 1).values, "aminmax": lambda y: y.aminmax(dim=1).max,
    "indices": lambda y: torch.max(y, 1).indices, "svd": lambda y: torch.linalg.svd(y).S,
}  # fmt: skip
if torch.__version__ < "2.13":
    del FIELDS["aminmax"]  # it had no derivative


@each_front_end
@pytest.mark.parametrize("op", FIELDS)
def test_a_field_of_what_an_op_returns_has_the_dtype_of_the_model(op: str, front_end: str) -> None:
    check(Case(partial(Two, lambda self, x: FIELDS[op](self.l(x))), one), front_end)


def observe(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    wide = torch.promote_types(y.dtype, torch.float16)
    return self.m(y) * y.element_size(), y.to(wide), y.new_ones(2).to(wide) * torch.finfo(F32).eps


def by_the_size_of_an_element(self: Any, x: Tensor) -> Any:
    return self.m(x) * self.l(x).element_size()


@each_front_end
@pytest.mark.parametrize("forward", [observe, by_the_size_of_an_element])
def test_a_dtype_that_decides_something_is_that_of_the_model(front_end: str, forward: Callable[..., Any]) -> None:
    model = Two(forward)
    _, got = o1(model, one(), front_end)
    # By export and just in time the model is captured under autocast, which decides.
    expected = tensors(autocast_or_plain(model, front_end))
    for ours, eager in zip(tensors(got), expected, strict=True):
        torch.testing.assert_close(ours, eager.float(), rtol=0.02, atol=0.02)


def autocast_or_plain(model: nn.Module, front_end: str) -> Any:
    with torch.autocast("cpu", enabled=front_end != "fx"):
        return plain(model, one())


@each_front_end
def test_decisions_are_taken_on_fp32_values_at_every_level(front_end: str) -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def choose(self: Any, x: Tensor) -> Any:
        z = x / 3
        return self.l(z), z.argmax(-1), z.topk(2).indices, z > 0.3333, torch.bucketize(z, torch.linspace(-1, 1, 99))

    model = Two(choose)
    for made in at_levels(model, (x,), front_end, "O1", "O2"):
        module = made()
        got = plain(module, (x,))
        assert_same(got[1:], plain(model, (x,))[1:])
        assert decided(module, "linear") == ["bfloat16"]


@each_front_end
def test_numbers_count_as_they_are_written(front_end: str) -> None:
    model = Two(numbers_out_of_range)
    module, got = o1(model, one(), front_end, "O1,dtype=fp16")
    assert all(t.isfinite().all() for t in got)
    exact = plain(model, one())
    assert torch.equal(got[1] == -1e9, exact[1] == -1e9)
    torch.testing.assert_close(got[0], exact[0], rtol=0.05, atol=0.05)
    codes = {d.op: d.code for d in fxamp.plan_of(module).decisions if d.colour == "float32"}
    assert codes["add"] == codes["where"] == "literal"


@each_front_end
def test_a_scale_of_no_dimension_promotes_nothing_and_one_of_one_does(front_end: str) -> None:
    module, _ = o1(Scales(scalar_and_vector), one(), front_end)
    if front_end == "fx":  # no shapes: see unknown_rank
        assert decided(module, "mul")[1] == "float32"
    else:
        assert decided(module, "mul") == ["bfloat16", "float32"]


@each_front_end
def test_the_two_low_dtypes_meet_in_fp32(front_end: str) -> None:
    module, _ = o1(Two(half_meets_bfloat16), one(), front_end)
    assert decided(module, "add") == ["float32"]
    for graph in fxamp.graphs(module):  # nothing is rounded to one and then to the other
        for node in graph.graph.nodes:
            if is_inserted(node) and node.all_input_nodes:
                source = node.all_input_nodes[0].meta.get("val")
                assert source is None or {source.dtype, node.meta["val"].dtype} != {FP16, BF16}


@each_front_end
def test_a_move_to_a_device_or_format_is_no_cast(front_end: str) -> None:
    module, got = o1(Two(moves_that_are_no_casts), one(), front_end)
    assert decided(module, "linear") == ["bfloat16", "bfloat16"]
    assert set(decided(module, "to")) <= {"bfloat16"}
    assert got.dtype == F32


@each_front_end
def test_complex_numbers_and_double_precision_are_left_alone(front_end: str) -> None:
    def mixed(self: Any, x: Tensor) -> Any:
        return complex_rotation(self, x)[1], wide_branch(self, x)[1]

    model = Two(mixed)
    exact = plain(model, one())
    for made in at_levels(model, one(), front_end, "O1", "O2", "O3"):
        q, wide = plain(made(), one())
        assert (q.dtype, wide.dtype) == (torch.complex64, torch.float64)
        assert torch.equal(wide, exact[1])
        torch.testing.assert_close(q, exact[0], rtol=0.02, atol=0.02)


# What begins at O2.


@each_front_end
def test_large_positions_stay_apart_until_they_are_bounded(front_end: str) -> None:
    def rotary(self: Any, x: Tensor) -> Any:
        positions = torch.arange(2000, 2004).float()[:, None]
        angle = positions * self.one
        return self.l(x) * torch.cat([angle.sin(), angle.cos()] * 3, -1)

    model = Scales(rotary)
    for made in at_levels(model, one(), front_end, "O1", "O2"):
        module = made()
        assert (plain(module, one()) - plain(model, one())).abs().max() < 0.05
        assert decided(module, "mul")[0] == "float32"


@each_front_end
def test_a_tiny_eps_is_not_lost_at_o2(front_end: str) -> None:
    def norm(self: Any, x: Tensor) -> Any:
        y = self.l(x) * 0
        return self.m(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-8)), y / (y.abs() + 1e-9)

    model = Two(norm)
    _, got = o1(model, one(), front_end, "O2,dtype=fp16")
    for ours, eager in zip(got, plain(model, one()), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.01, atol=0.01)


# Mutation.


@each_front_end
def test_buffers_that_forward_writes_keep_their_dtype_and_their_updates(front_end: str) -> None:
    torch.manual_seed(0)
    model, eager = Scales(buffers_written), Scales(buffers_written)
    eager.load_state_dict(model.state_dict())
    module = convert(model, one(), front_end)
    for _ in range(3):
        module(*one())
        eager(*one())
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert int(model.get_buffer("count")) == 3


@each_front_end
def test_a_renormalised_embedding_writes_to_its_master(front_end: str) -> None:
    model = renormalised()
    table = model.get_parameter("words.weight")
    before = table.detach().clone()
    module = convert(model, ids(), front_end)
    assert torch.equal(table, before)
    module(*ids())
    assert table.dtype == F32
    assert (table[ids()[0]].norm(dim=-1) <= 1.0001).all()
    assert not torch.equal(table, before)


@each_front_end
def test_an_input_that_forward_writes_to_is_written_to(front_end: str) -> None:
    module = convert(Two(write_to_an_input), one(), front_end)
    x = example()
    module(x)
    assert torch.equal(x, example() + 1)


# Gradients.


@each_front_end
def test_casts_are_shared_as_the_policy_says(front_end: str) -> None:
    model = Two(lambda self, x: (self.l(x), self.m(x), self.l(x * 2)))
    policies = [f"O1,output_dtype=low,share_casts={share}" for share in ("always", "weights", "never")]
    # Of x and 2x, and two weights and two biases; of x once more; of l's weight and bias once more.
    for made, casts in zip(at_levels(model, one(), front_end, *policies), (6, 7, 9), strict=True):
        module = made()
        module(*one())
        assert fxamp.plan_of(module).casts == casts


@each_front_end
def test_a_tied_weight_is_cast_once_and_gets_both_gradients(front_end: str) -> None:
    torch.manual_seed(0)
    model = tied()
    module = convert(model, ids(), front_end)
    module(*ids()).logsumexp(-1).sum().backward()
    ours = model.out.weight.grad  # type: ignore[union-attr]
    model.zero_grad()
    with torch.autocast("cpu"):
        loss = model(*ids()).float().logsumexp(-1).sum()
    loss.backward()
    torch.testing.assert_close(ours, model.out.weight.grad, rtol=0.02, atol=0.01)  # type: ignore[union-attr]
    assert decided(module, "embedding") == ["float32"]
    # The table, the bias and what was looked up; ahead of time the logits on their way out.
    assert fxamp.plan_of(module).casts == (3 if front_end == "jit" else 4)


# Values that leave the graph.


def scaled_by_item(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m(y) * y.detach().abs().max().item()


def scaled_by_numpy(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m(y) * float(y.detach().abs().numpy().max())


def asserted(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    torch._assert(y.shape[1] == 6, "six columns")
    return self.m(y)


LEAVING: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "item": (scaled_by_item, {}),
    "numpy": (scaled_by_numpy, {"fx": "numpy|TraceError|TypeError", "export": "numpy"}),
    "assert": (asserted, {}),
}


@each_front_end
@pytest.mark.parametrize("kind", LEAVING)
def test_what_python_reads_of_a_value_is_right(kind: str, front_end: str) -> None:
    forward, refused = LEAVING[kind]
    model = Two(forward)
    if front_end in refused:
        with pytest.raises(fxamp.CaptureError, match=refused[front_end]):
            convert(model, one(), front_end)
        return
    _, got = o1(model, one(), front_end)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.02)


# What the graph holds inside.


def loop(self: Any, x: Tensor) -> Any:
    def more(i: Tensor, h: Tensor) -> Tensor:
        return i < 3

    def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(self.l(h))

    return torch._higher_order_ops.while_loop(more, step, (torch.tensor(0), self.m(x)))


def running(self: Any, x: Tensor) -> Any:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carried = torch.tanh(carried @ self.l.weight + row)
        return carried, carried * 2

    return torch._higher_order_ops.scan(step, torch.zeros(6), self.m(x))


def branches(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda t: self.m(t).float(), lambda t: t * 2, (self.l(x),))


INSIDE = {"while_loop": loop, "scan": running, "cond": branches}


@pytest.mark.parametrize("front_end", ["export", "jit"])
@pytest.mark.parametrize("kind", INSIDE)
def test_what_is_carried_round_a_loop_keeps_its_dtype(kind: str, front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(INSIDE[kind]).requires_grad_(False)
    module = convert(model, one(), front_end)
    for x in (example(), -example()):
        got, expected = tensors(module(x)), tensors(model(x))
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        for ours, eager in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)
    assert "bfloat16" in decided(module, "linear")


def test_a_region_that_is_compiled_once_is_right_wherever_it_is_called() -> None:
    @torch.compiler.nested_compile_region
    def block(layer: nn.Module, t: Tensor) -> Tensor:
        return torch.tanh(layer(t))

    model = Two(lambda self, x: self.m(block(self.l, block(self.l, x).float() + 1)))
    module, got = o1(model, one(), "jit")
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.03)
    assert "higher_order::invoke_subgraph" in {d.op for d in fxamp.plan_of(module).decisions}


@each_front_end
def test_one_layer_may_run_in_two_dtypes(front_end: str) -> None:
    def twice(self: Any, x: Tensor) -> Any:
        return self.l(x), (x.float() @ self.l.weight.float())

    model = Two(twice)
    module, got = o1(model, one(), front_end)
    assert torch.equal(got[1], plain(model, one())[1])
    assert (decided(module, "linear"), decided(module, "matmul")) == (["bfloat16"], ["float32"])


@each_front_end
def test_a_sparse_matrix_multiplies_in_one_dtype(front_end: str) -> None:
    model = Two(lambda self, x: self.m(torch.sparse.mm(self.adjacency, self.l(x))))
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    _, got = o1(model, one(), front_end)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("front_end", ["export", "jit"])
def test_attention_in_eval_takes_a_float_padding_mask(front_end: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    model = Two(lambda self, x, mask: self.layer(x, x, x, key_padding_mask=mask)[0], layer=layer).eval()
    args = (torch.randn(2, 5, 6), torch.tensor([[0.0, 0, 0, 0, float("-inf")], [0, 0, 0, 0, 0]]))
    module, got = o1(model, args, front_end)
    assert torch.equal(got, under_autocast(model, args).float())
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        torch.testing.assert_close(module(*args), plain(model, args), rtol=0.03, atol=0.03)


# What is done with the module.


def test_another_dtype_of_an_input_is_planned_anew() -> None:
    model = Two(lambda self, x: self.m(self.l(x.to(self.l.weight.dtype)) + x))
    module = convert(model, None, "jit")
    assert module(example()).dtype == F32
    low = module(example().to(BF16))
    assert low.dtype == F32
    torch.testing.assert_close(low, module(example()), rtol=0.05, atol=0.05)
    assert len(fxamp.graphs(module)) == 2


def test_a_compiled_model_can_be_moved_and_loaded() -> None:
    torch.manual_seed(0)
    model = Two()
    module = convert(model, None, "jit")
    module(example())
    state = {k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(module(example()), under_autocast(model, one()).float())
    model.double()
    assert torch.equal(module(example().double()), model(example().double()))


@each_front_end
def test_keys_do_not_move_when_another_layer_comes_in(front_end: str) -> None:
    def more(self: Any, x: Tensor) -> Any:
        return self.m(torch.tanh(self.extra(self.l(x))))

    first, _ = o1(Two(), one(), front_end)
    second, _ = o1(Two(more, extra=nn.Linear(6, 6)), one(), front_end)
    assert set(colours(second)) - set(colours(first)) == {"extra/linear#0", "/tanh#0"}
    assert set(colours(first)) == {"l/linear#0", "m/linear#0"}


def storage_set(self: Any, x: Tensor) -> Any:
    y = self.l(x).detach().clone()
    y.set_(x * 2)
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


# What a refusal says.
REPLACED: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "set_": (storage_set, {"fx": r"Tensor\.set_ at .*test_traps\.py"}),
    "resize_": (storage_resized, {}),
    "requires_grad_": (leaf_inside, {"fx": r"Tensor\.requires_grad_ at .*test_traps\.py"}),
    "data": (data_swapped, {"fx": r"assigning \.data .*test_traps\.py", "export": "does not compute what"}),
}


@each_front_end
@pytest.mark.parametrize("kind", REPLACED)
def test_storage_that_is_replaced_is_right_or_refused(kind: str, front_end: str) -> None:
    forward, refused = REPLACED[kind]
    model = Two(forward)
    if front_end in refused:
        with pytest.raises(fxamp.CaptureError, match=refused[front_end]) as raised:
            convert(model, one(), front_end)
        assert re.search(r"fxamp\.(compile\(model|convert\(model, args)\)", str(raised.value))
        return
    got = convert(model, one(), front_end)(*one())
    torch.testing.assert_close(got, model(*one()), rtol=0.02, atol=0.02)
    assert got.requires_grad
