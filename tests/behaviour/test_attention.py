"""Attention gets its operands in one dtype, masks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxamp
from tests.support.front_ends import FRESH, convert, decided, each_front_end, o1, one, plain, under_autocast
from tests.support.helpers import OLD_DYNAMO, Two, example
from tests.support.kernels import kernels

pytestmark = FRESH
__all__ = ["kernels"]


@pytest.mark.default_case(front_end="graph")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # autocast's, too
@each_front_end
@pytest.mark.parametrize("ambient", [False, True], ids=["", "ambient autocast"])
def test_attention_gets_its_operands_in_one_dtype(front_end: str, ambient: bool, kernels: Any) -> None:
    def attend(flash: Any, self: Any, x: Tensor, mask: Tensor) -> Any:
        q, k = F.rms_norm(self.l(x), (6,), self.m.weight[0]), F.rms_norm(self.m(x), (6,))
        q, k, v = (t.unflatten(0, (2, 2)) for t in (q, k, self.m(x)))
        attention = F.scaled_dot_product_attention
        return attention(q, k, v, attn_mask=mask), attention(q, k, v, attn_mask=mask > 1), flash(q, k, v)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    model = Two(lambda self, x, mask: attend(kernels.attention, self, x, mask)).requires_grad_(False)
    args = (example(), torch.tensor([[0.5, 1.5], [1.25, 0.0]]))
    with torch.autocast("cpu", enabled=ambient and front_end == "view"):  # an export under autocast has its casts
        module = convert(model, args, front_end, check=False)  # in FP32 the model does not run
        got = module(*args)
    assert decided(module, "scaled_dot_product_attention") == ["bfloat16", "bfloat16"]
    assert decided(module, "fxamp_kernels::attention") == ["bfloat16"]
    for ours, exact in zip(got, attend(plain, model, *args), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0.03, atol=0.03)


def test_under_cudas_lists_attention_gets_its_operands_in_one_dtype() -> None:
    def attend(self: Any, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(F.rms_norm(self.l(x), (6,)), F.rms_norm(self.m(x), (6,)), self.l(x))

    plan = fxamp.plan(Two(attend), one(), policy=fxamp.Policy(device="cuda"))
    colours = [(d.op, d.colour) for d in plan.decisions]
    assert colours[-1] == ("scaled_dot_product_attention", "float16")
    assert OLD_DYNAMO or ("rms_norm", "float16") not in colours  # torch 2.11 has it on no list


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", ["view", "graph"])
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


def _kernels_that_are_on() -> tuple[bool, ...]:
    found = torch.backends.cuda
    return found.flash_sdp_enabled(), found.mem_efficient_sdp_enabled(), found.math_sdp_enabled()


@pytest.mark.parametrize("way", ["compile", "in_place"])
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda kernel: str(kernel.name))
def test_a_region_that_chooses_the_kernel_of_attention_is_followed(kernel: SDPBackend, way: str) -> None:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k = self.l(x), self.m(x)
        with sdpa_kernel([kernel]):
            inside = F.scaled_dot_product_attention(q, k, k)
        return self.m(inside + F.scaled_dot_product_attention(k, q, q))

    torch.manual_seed(0)
    model, x, before = Two(attend), torch.randn(2, 2, 40, 6), _kernels_that_are_on()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    if way == "compile":
        module: Any = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
        got = module(x)
    else:
        module = model
        model.compile(backend="fxamp", options={"policy": "O1", "backend": "eager"})
        with torch.autocast("cpu", torch.bfloat16):
            got = model(x)
    assert torch.equal(got.float(), expected.float())
    assert decided(module, "scaled_dot_product_attention") == ["bfloat16", "bfloat16"]
    assert not fxamp.plan_of(module).deviations
    assert _kernels_that_are_on() == before


@pytest.mark.parametrize("dim_first", [True, False])
def test_the_fused_layer_of_evaluation_is_followed_just_in_time(dim_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=dim_first)).eval()
    torch.backends.mha.set_fastpath_enabled(True)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x).float()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x).float(), expected) is not dim_first  # the fused kernel rounds differently
        torch.backends.mha.set_fastpath_enabled(True)
        module = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
        assert torch.equal(module(x), expected)
    assert OLD_DYNAMO or not fxamp.plan_of(module).deviations


class _Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        found: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return found


@pytest.mark.parametrize(
    ("way", "options", "training", "enabled", "code"),
    [
        ("compile", {}, False, True, "fastpath"),
        ("compile", {}, True, True, "low"),
        pytest.param("compile", {}, False, False, "low", marks=pytest.mark.matrix),
        pytest.param("compile", {"add_bias_kv": True}, False, True, "low", marks=pytest.mark.matrix),
        ("convert", {}, False, True, "fastpath"),
        ("convert", {}, False, False, "low"),
        ("convert", {"add_bias_kv": True}, False, True, "low"),
    ],
)
def test_attention_that_eager_evaluation_fuses_is_named(
    way: str, options: dict[str, Any], training: bool, enabled: bool, code: str
) -> None:
    torch.manual_seed(0)
    model, x = _Attends(dropout=0.5, **options).train(training), torch.randn(2, 5, 8)
    torch.backends.mha.set_fastpath_enabled(enabled)
    with torch.no_grad():
        if way == "compile":
            module: Any = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
        else:
            module = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
        module(x)
    plan = fxamp.plan_of(module)
    inside = {d.code for d in plan.decisions if d.op == "linear" and d.module_path == "attention"}
    assert code in inside
    assert bool(plan.deviations) is (code == "fastpath")
    assert {d.module_path for d in plan.deviations} <= {"attention"}


@pytest.mark.default_case(policy="O2")
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_items_of_a_layer_that_the_model_returns_are_restored(policy: str) -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    view = fxamp.convert(layer, (x, x, x), policy=policy)
    assert [t.dtype for t in view(x, x, x)] == [torch.float32, torch.float32]
    attended, weights = view(x, x, x, need_weights=False)
    assert attended.dtype == torch.float32
    assert weights is None
