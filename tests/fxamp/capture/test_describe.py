"""Just in time, what Python reads of dtypes is autocast's, for autocast is on while Dynamo captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import FRESH
from tests.support.helpers import Layers, example, in_turns

pytestmark = FRESH
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


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


CASTS = [
    read_of_a_parameter, through_a_variable, argument_through_a_variable, sum_in_one_line, quotient_inside_a_product,
    updated_in_place, dtype_argument,
]  # fmt: skip


def mask_of_a_factory(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    mask = torch.zeros(4, 4, dtype=y.dtype)
    mask[:, 0] = float("-inf")
    return F.scaled_dot_product_attention(y[None], self.m(x)[None], y[None], attn_mask=mask)


def sum_of_a_comparison(self: Model, x: Tensor) -> Tensor:
    y = self.l(x)
    return y * (x > 0).sum(dim=1, keepdim=True, dtype=y.dtype)


def factories(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    ones, steps = torch.ones(6, dtype=h.dtype), torch.arange(0.1, 6, dtype=h.dtype)
    return h + ones / 3 + steps / 7 + torch.full((6,), 0.1, dtype=h.dtype) + torch.tensor(0.3, dtype=h.dtype)


def window_and_writes(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return torch.hann_window(6, dtype=h.dtype) * torch.zeros(4, 6, dtype=h.dtype).add_(0.1).mul_(h)


FACTORIES = [mask_of_a_factory, sum_of_a_comparison, factories, window_and_writes]


def smallest_number(self: Model, x: Tensor) -> Tensor:
    h = self.l(x).sigmoid()
    return h.clamp(min=torch.finfo(h.dtype).eps).log() + h / (h.amax(-1, keepdim=True) + torch.finfo(h.dtype).tiny)


def logits_of_probabilities(self: Model, x: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(probs=self.l(x).sigmoid(), validate_args=False).logits


def branch_on_a_dtype(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return h * 3.3 if h.dtype == torch.float32 else h * 1.7


def branch_on_a_size(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return h * h.element_size() / 3


def norm_with_a_dtype(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return torch.linalg.vector_norm(h * 3, dim=1, dtype=h.dtype)


def mask_of_a_comparison(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return h / 3 + (x > 0).to(h.dtype) / 7


def cast_by_name_of_a_type(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return x.type(h.dtype) + h / 3


def device_and_dtype(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    return x.to(h.device, h.dtype) * 1.1 + x.to(device=h.device, dtype=h.dtype) / 3 + x.to(h) / 7


def literal_beside_a_read(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    assert h.dtype != torch.float64
    return F.softplus(h.to(torch.float32) + x.to(h.dtype))


def random_numbers(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    torch.manual_seed(0)
    return h + torch.randn(4, 6, dtype=h.dtype) + torch.rand_like(h)


def over_a_break(self: Model, x: Tensor) -> Tensor:
    h = self.l(x)
    torch._dynamo.graph_break()
    return h + h * 0.3


READS = [
    *CASTS, *FACTORIES, smallest_number, logits_of_probabilities, branch_on_a_dtype, branch_on_a_size,
    norm_with_a_dtype, mask_of_a_comparison, cast_by_name_of_a_type, device_and_dtype, literal_beside_a_read,
    random_numbers, over_a_break,
]  # fmt: skip


def every_other(first: int) -> list[Any]:
    """Return what reads a dtype, every other one for the matrix, where the other test has it by default."""
    return [r if i % 2 == first else pytest.param(r, marks=pytest.mark.matrix) for i, r in enumerate(READS)]


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


@pytest.mark.parametrize(
    "low", [pytest.param(BF16, id="bf16"), pytest.param(FP16, id="fp16", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("forward", every_other(0))
def test_o1_is_autocast_bit_for_bit_whatever_reads_a_dtype(forward: Any, low: torch.dtype) -> None:
    torch._dynamo.reset()
    model = Model(forward)
    with torch.autocast("cpu", dtype=low):
        expected = model(example())
    got = fxamp.compile(model, policy=fxamp.Policy("O1", dtype=low), backend="eager")(example())
    assert got.dtype == model(example()).dtype
    assert torch.equal(expected.float(), got.float())


@pytest.mark.parametrize("forward", [factories, window_and_writes])
def test_a_factory_makes_the_dtype_that_it_read_without_a_cast(forward: Any) -> None:
    view = fxamp.convert(Model(forward), (example(),), policy="O1,output_dtype=autocast,modules.m=fp32")
    casts = [n for gm in fxamp.graphs(view) for n in gm.graph.nodes if n.target == "to"]
    assert not casts
    assert not fxamp.plan_of(view).deviations


def test_an_override_of_a_factory_is_obeyed() -> None:
    for policy, dtype in (("O1,ops.hann_window=fp32", "float32"), ("O1,ops.hann_window=low", "bfloat16")):
        view = fxamp.convert(Model(window_and_writes), (example(),), policy=policy)
        assert [d.colour for d in fxamp.plan_of(view).decisions if d.op == "hann_window"] == [dtype]
        assert view(example()).dtype == torch.float32


@pytest.mark.parametrize("forward", every_other(1))
def test_under_ambient_autocast_what_leaves_a_graph_has_its_dtype(forward: Any) -> None:
    expected, got, _ = run(forward, "O1", ambient=True)
    assert got.dtype == expected.dtype
    assert torch.equal(expected, got)


@pytest.mark.parametrize("forward", CASTS[:2])
def test_without_autocast_such_a_cast_is_a_deviation_with_its_code(forward: Any) -> None:
    expected, got, plan = run(forward, "O1", ambient=False)
    assert not torch.equal(expected.float(), got)
    assert "user_cast" in {d.code for d in plan.decisions if d.op == "to"}
    assert any("captured without autocast" in note for note in plan.notes)


def low_attribute(self: Model, x: Tensor) -> Tensor:
    return (x * 1.001).to(self.low)


def low_weight(self: Model, x: Tensor) -> Tensor:
    return F.linear(x.to(self.base.weight.dtype), self.base.weight)


@pytest.mark.parametrize(
    ("forward", "ambient", "policy"), in_turns([low_attribute, low_weight], [False, True], ["O0", "O1", "O2"])
)
def test_a_dtype_of_the_modules_own_is_the_authors(forward: Any, ambient: bool, policy: str) -> None:
    _, got, _ = run(forward, policy, ambient=ambient)
    expected = Model(forward)(example())
    # Under autocast an attribute and a dtype that was read look the same, and at O0 nothing that was read is low.
    unknown = forward is low_attribute and ambient and policy == "O0"
    assert got.dtype == (F32 if unknown else BF16)
    assert torch.equal(got.to(BF16), expected)


@pytest.mark.default_case(policy="O2")
@pytest.mark.parametrize("policy", ["O0", "O1", "O2"])
def test_what_a_compiled_model_makes_of_low_weights_of_its_own_is_low(policy: str) -> None:
    got = fxamp.compile(Model(low_weight), policy=policy, backend="eager")(example())
    assert got.dtype == BF16
    assert torch.equal(got, Model(low_weight)(example()))


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
        assert got.dtype == (F32 if policy == "O0" else BF16)
        assert torch.allclose(got.float(), expected.float(), atol=0.05)


@pytest.mark.parametrize(("forward", "ambient"), in_turns([*CASTS, *FACTORIES], [False, True]))
def test_o0_is_eager_bit_for_bit(forward: Any, ambient: bool) -> None:
    _, got, _ = run(forward, "O0", ambient=ambient)
    assert torch.equal(got, Model(forward)(example()))


def test_a_module_that_the_policy_keeps_fp32_is_not_lowered_by_a_read() -> None:
    torch._dynamo.reset()
    outer = Layers(lambda m, x: m.inner(x), inner=Model(lambda self, x: restored(self.l(x), self.scale)))
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
