"""Just in time, a cast to the dtype of a tensor follows that tensor, where its line says which one it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.relative import _path
from tests.helpers import example

F32, BF16 = torch.float32, torch.bfloat16


class Model(nn.Module):
    """Two layers and a forward of one's own."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(0.7, 1.3, 6))
        self.base, self.low = nn.Linear(6, 6).bfloat16().requires_grad_(False), BF16
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def sum_in_one_line(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return F.softplus(y + self.scale.to(y.dtype)[None])


def quotient_inside_a_product(self: Model, x: Tensor) -> Tensor:
    q = self.l(x)
    k = self.m(x)
    return torch.matmul(q, (k / self.scale.to(dtype=q.dtype)).t())


def updated_in_place(self: Model, x: Tensor) -> Tensor:
    y = self.l(x) * 3
    y += self.scale.to(dtype=y.dtype)
    return F.softplus(y)


def dtype_argument(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return F.softmax(y, dim=1, dtype=y.dtype)


SEEN = [sum_in_one_line, quotient_inside_a_product, updated_in_place, dtype_argument]


def read_of_a_parameter(self: Model, x: Tensor) -> Tensor:
    return restored(self.l(x), self.scale)


def restored(y: Tensor, scale: Tensor) -> Tensor:
    ready = scale.to(y.dtype)
    return F.softplus(y + ready)


def through_a_variable(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    dtype = y.dtype
    ready = self.scale.to(dtype)
    return F.softplus(y + ready)


def argument_through_a_variable(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    dtype = y.dtype
    weights = F.softmax(y.float() - 1, dim=1, dtype=dtype)
    return torch.einsum("ij,kj->ik", weights, self.m(x))


UNSEEN = [read_of_a_parameter, through_a_variable, argument_through_a_variable]


def mask_of_a_factory(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    mask = torch.zeros(4, 4, dtype=y.dtype)
    mask[:, 0] = float("-inf")
    return F.scaled_dot_product_attention(y[None], self.m(x)[None], y[None], attn_mask=mask)


def sum_of_a_comparison(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return y * (x > 0).sum(dim=1, keepdim=True, dtype=y.dtype)


FACTORIES = [mask_of_a_factory, sum_of_a_comparison]


def run(forward: Any, policy: str, *, ambient: bool) -> tuple[Tensor, Tensor, fxamp.Plan]:
    """Return what autocast gives, what the compiled model gives, and its plan."""
    torch._dynamo.reset()
    model = Model(forward)
    with torch.autocast("cpu"):
        expected = model(example())
    module: Any = torch.compile(model, backend=fxamp.backend(policy, "eager"))
    with torch.autocast("cpu", enabled=ambient):
        got = module(example())
    return expected, got, fxamp.plan_of(module)


@pytest.mark.parametrize("ambient", [False, True], ids=["", "ambient autocast"])
@pytest.mark.parametrize("forward", SEEN)
def test_o1_is_autocast_bit_for_bit(forward: Any, ambient: bool) -> None:
    expected, got, _ = run(forward, "O1", ambient=ambient)
    assert expected.dtype == BF16
    assert torch.equal(expected.float(), got)


@pytest.mark.parametrize("forward", [*UNSEEN, sum_of_a_comparison])
def test_what_the_line_does_not_say_is_known_under_ambient_autocast(forward: Any) -> None:
    expected, got, _ = run(forward, "O1", ambient=True)
    assert torch.equal(expected.float(), got)


@pytest.mark.parametrize("forward", UNSEEN[:2])
def test_without_it_such_a_cast_is_a_deviation_with_its_code(forward: Any) -> None:
    expected, got, plan = run(forward, "O1", ambient=False)
    assert not torch.equal(expected.float(), got)
    assert "user_cast" in {d.code for d in plan.decisions if d.op == "to"}


def low_attribute(self: Model, x: Tensor) -> Tensor:
    return (x * 1.001).to(self.low)


def low_weight(self: Model, x: Tensor) -> Tensor:
    return F.linear(x.to(self.base.weight.dtype), self.base.weight)


@pytest.mark.parametrize("policy", ["O0", "O1", "O2"])
@pytest.mark.parametrize("ambient", [False, True], ids=["", "ambient autocast"])
@pytest.mark.parametrize("forward", [low_attribute, low_weight])
def test_a_dtype_of_the_modules_own_is_the_authors(forward: Any, ambient: bool, policy: str) -> None:
    _, got, _ = run(forward, policy, ambient=ambient)
    expected = Model(forward)(example())
    assert got.dtype == expected.dtype == BF16
    assert torch.equal(got, expected)


def test_torchs_own_encoder_layer_runs_with_a_padding_mask_under_ambient_autocast() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(6, 6)
            self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return self.layer(self.l(x), src_key_padding_mask=mask)

    model, x = Padded().train(), torch.randn(2, 4, 6)
    mask = torch.tensor([[False, False, False, True], [False] * 4])
    for policy in ("O0", "O1", "O2"):
        torch._dynamo.reset()
        with torch.autocast("cpu"):
            got = torch.compile(model, backend=fxamp.backend(policy, "eager"))(x, mask)
            expected = model(x, mask)
        assert got.dtype == F32
        assert torch.allclose(got, expected.float(), atol=0.05)


@pytest.mark.parametrize("ambient", [False, True], ids=["", "ambient autocast"])
@pytest.mark.parametrize("forward", [*SEEN, *UNSEEN, *FACTORIES])
def test_o0_is_eager_bit_for_bit(forward: Any, ambient: bool) -> None:
    _, got, _ = run(forward, "O0", ambient=ambient)
    assert torch.equal(got, Model(forward)(example()))


def test_a_module_that_the_policy_keeps_fp32_is_not_lowered_by_a_read() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(lambda self, x: restored(self.l(x), self.scale))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    torch._dynamo.reset()
    outer = Outer()
    module: Any = torch.compile(outer, backend=fxamp.backend("O1,modules.inner=fp32", "eager"))
    with torch.autocast("cpu"):
        got = module(example())
    assert torch.equal(got, outer(example()))


def test_the_dtype_that_a_cast_restores_is_a_floating_one() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        angles = torch.arange(6)[None].float().cos()
        ready = angles.to(x.dtype)
        return self.l(x) * ready

    _, _, plan = run(forward, "O1", ambient=False)
    codes = [(d.code, d.colour) for d in plan.decisions if d.op == "to"]
    assert codes == [("cast", "float32"), ("user_cast", "float32")]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("y = a + b.to(a.dtype)", ("to", ("add",))),
        ("y = a @ b.to(a.dtype)[..., None]", ("to", ("getitem", "matmul"))),
        ("return torch.bmm(q, k.transpose(-1, -2) / scale.to(dtype=q.dtype))", ("to", ("div", "bmm"))),
        ("score += c2p / scale.to(dtype=c2p.dtype)", ("to", ("div",))),
        ("y += b.to(dtype=y.dtype)", ("to", ("add_",))),
        ("y = torch.matmul(q, (k / scale.to(q.dtype)).t())", ("to", ("div", "t", "matmul"))),
        ("y = torch.softmax(x, 1, dtype=x.dtype)", ("softmax", ())),
        ("y = torch.stack([a, b.to(a.dtype)])", None),
        ("y = b.to(a.dtype)", None),
        ("y = f(b.to(a.dtype) if a is None else a)", None),
        ("y = b.to(self.weight.dtype) * self.weight", None),
        ("y = torch.matmul(a,", None),
        ("y = a + b.float()", None),
        ("y = (a + b.to(a.dtype)) * (c / b.to(c.dtype))", None),
        ("y = x.to(y.dtype) * y + x.double() * y", None),
        ("y = torch.softmax(y, 1, dtype=y.dtype) + torch.ones(8, dtype=torch.float64)", None),
        ("y = torch.softmax(y, 1, dtype=y.dtype) + torch.ones(8, **options)", None),
    ],
)
def test_the_way_from_a_cast_to_the_tensor_that_it_reads(line: str, found: Any) -> None:
    assert _path(line) == found


def two_reads(self: Model, x: Tensor) -> Tensor:
    y, z = self.l(x), x.exp()
    return (y + self.scale.to(y.dtype)) * (z / self.scale.to(z.dtype))


def another_cast(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return x.to(y.dtype) * y + x.double() * y


def another_dtype_argument(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return torch.softmax(y, -1, dtype=y.dtype) + torch.ones(6, dtype=torch.float64)


@pytest.mark.parametrize("forward", [two_reads, another_cast, another_dtype_argument])
def test_a_line_with_two_casts_is_left_alone(forward: Any) -> None:
    _, got, _ = run(forward, "O0", ambient=False)
    expected = Model(forward)(example())
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
