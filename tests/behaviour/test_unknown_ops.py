"""Ops without a rule, custom and higher-order, run as under torch.autocast: the same outputs, the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import library as operators

import fxamp
from tests.support.front_ends import (
    BF16,
    FRESH,
    assert_trains_as_autocast,
    captured,
    convert,
    each_capture,
    each_front_end,
    one,
    tensors,
)
from tests.support.helpers import Two, example, in_turns

pytestmark = [*FRESH, pytest.mark.filterwarnings("ignore:flex_attention called without")]


def _low_only(q: Tensor, k: Tensor) -> Tensor:
    if torch.float32 in (q.dtype, k.dtype):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, not {q.dtype} and {k.dtype}")
    return q * torch.tanh(k)


def _fp32_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError(f"only FP32, not {x.dtype}")
    return torch.sin(x)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w).float()  # autocast reaches into the kernel


def _of_each(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    return tuple(gradient.to(t.dtype) * t for t in ctx.saved_tensors)


def _of_product(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return gradient @ w.T, x.T @ gradient


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_KERNELS = (
    ("low_only(Tensor q, Tensor k)", _low_only, lambda q, k: torch.empty_like(q), _of_each),
    ("fp32_only(Tensor x)", _fp32_only, torch.empty_like, _of_each),
    ("product(Tensor x, Tensor w)", _product, _product, _of_product),
)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Register three custom ops: for 16 bits alone, for FP32 alone, and one whose kernel calls a matrix product."""
    with operators._scoped_library("fxamp_unknown", "FRAGMENT") as library:
        for schema, kernel, fake, backward in _KERNELS:
            name = f"fxamp_unknown::{schema.partition('(')[0]}"
            library.define(f"{schema} -> Tensor")
            library.impl(name.partition("::")[2], kernel, "CompositeExplicitAutograd")
            operators.register_fake(name, fake, lib=library)
            operators.register_autograd(name, backward, setup_context=_keep_inputs, lib=library)
        yield torch.ops.fxamp_unknown


def reads_low(self: Any, ops: Any, x: Tensor) -> Tensor:
    return self.m(ops.low_only(self.l(x), self.m(x)))


def reads_low_beside_fp32(self: Any, ops: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    return ops.low_only(h, h) * ops.fp32_only(h.float())


def reads_fp32(self: Any, ops: Any, x: Tensor) -> Tensor:
    return self.m(ops.fp32_only(torch.nn.functional.layer_norm(x, (6,)) + self.l(x).float()))


def reads_the_input(self: Any, ops: Any, x: Tensor) -> Tensor:
    return self.l(ops.fp32_only(x)) + self.m(x)


def calls_a_product(self: Any, ops: Any, x: Tensor) -> Tensor:
    return ops.product(self.l(x).float(), self.m.weight) + x


CASES = (reads_low, reads_low_beside_fp32, reads_fp32, reads_the_input, calls_a_product)


def _outputs_and_gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    output = call(x)
    output.float().square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return [output.detach().float(), *(g.clone() for g in (x.grad, *gradients) if g is not None)]


def _under_autocast(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.autocast("cpu", BF16):
            return model(*args)

    return call


@pytest.mark.default_case(capture="ahead")
@each_capture
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_custom_op_runs_as_under_autocast(case: Callable[..., Tensor], capture: str, ops: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(lambda self, x: case(self, ops, x)), example()
    expected = _outputs_and_gradients(_under_autocast(model), model, x)
    module = captured(model, (x,), capture, "O1,dtype=bf16")
    got = _outputs_and_gradients(module, model, x)
    assert len(got) == len(expected) > 2
    assert all(map(torch.equal, got, expected))
    plan = fxamp.plan_of(module)
    assert {d.code for d in plan.decisions if "::" in d.op} == {"as_autocast"}
    assert not plan.deviations


@pytest.mark.default_case(level="O2", capture="ahead")
@each_capture
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_beyond_o1_a_custom_op_gets_the_dtypes_that_autocast_hands_it(level: str, capture: str, ops: Any) -> None:
    def f(self: Any, x: Tensor) -> Tensor:
        h = self.l(x)
        low, wide = ops.low_only(h, h * 2), ops.fp32_only(torch.nn.functional.softmax(h.float(), -1))
        return self.m(low) + ops.fp32_only(x) * wide

    model, x = Two(f), example()
    module = captured(model, (x,), capture, f"{level},dtype=bf16")
    module(x).sum().backward()
    decided = [(d.op, d.colour, d.autocast_dtype) for d in fxamp.plan_of(module).decisions if "::" in d.op]
    low, fp32 = ("fxamp_unknown::low_only", "bfloat16"), ("fxamp_unknown::fp32_only", "float32")
    assert sorted(set(decided)) == sorted({(*low, "bfloat16"), (*fp32, "float32")})
    torch.testing.assert_close(module(x), _under_autocast(model)(x).float(), rtol=0.05, atol=0.05)


class Adds(Two):
    def forward(self, x: Tensor) -> Any:
        return self.l(torch.ops.fxamp_unknown.fp32_only(x))


@pytest.mark.usefixtures("ops")
def test_a_module_with_such_an_op_is_copied_and_saved(tmp_path: Path) -> None:
    model, x = Adds(), example()
    module = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    torch.save(module, tmp_path / "module.pt")
    for again in (copy.deepcopy(module), torch.load(tmp_path / "module.pt", weights_only=False)):
        assert torch.equal(again(x), module(x))


@pytest.mark.default_case(capture="ahead")
@each_capture
def test_by_another_choice_the_op_does_not_run_under_autocast(capture: str, ops: Any) -> None:
    model, x = Two(lambda self, x: calls_a_product(self, ops, x)), example()
    module = captured(model, (x,), capture, "O1,dtype=bf16,unknown_ops=keep")
    assert not torch.equal(module(x), _under_autocast(model)(x))
    assert [d.code for d in fxamp.plan_of(module).decisions if "::" in d.op] == ["keep"]


@pytest.mark.default_case(capture="ahead")
@each_capture
def test_an_op_that_autocast_hands_the_wrong_dtype_fails_as_under_autocast(capture: str, ops: Any) -> None:
    model, x = Two(lambda self, x: ops.fp32_only(self.l(x))), example()
    with pytest.raises(RuntimeError, match=r"only FP32, not torch\.bfloat16"):
        _under_autocast(model)(x)
    with pytest.raises(Exception, match=r"only FP32, not torch\.bfloat16"):
        captured(model, (x,), capture, "O1,dtype=bf16")(x)
    for way_out in ("unknown_ops=keep", "ops.fxamp_unknown::fp32_only=fp32"):
        torch._dynamo.reset()
        assert captured(model, (x,), capture, f"O1,dtype=bf16,{way_out}")(x).dtype == torch.float32


def _position(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + 0.1 * (q - k)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _flex(**options: Any) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def f(self: Any, x: Tensor, bias: Tensor) -> Tensor:
        q, k = (layer(x).view(1, 16, 1, 6).transpose(1, 2) for layer in (self.l, self.m))
        # The bias is FP32, and so are the products that it makes the inner graph compute.
        biased = options or {"score_mod": lambda score, b, h, i, j: score + bias[i, j]}
        return self.m(flex_attention(q, k, k, **biased).reshape(16, 6))

    return f


def _block_mask() -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return {"block_mask": create_block_mask(_causal, None, None, 16, 16, device="cpu")}


@pytest.mark.parametrize(("kind", "beyond"), in_turns(["score_mod", "block_mask", "captured"], ["O1", "O2", "O3"]))
def test_flex_attention_is_as_under_autocast(kind: str, beyond: str) -> None:
    torch.manual_seed(0)
    options = {"score_mod": {"score_mod": _position}, "block_mask": _block_mask(), "captured": {}}[kind]
    model, x, bias = Two(_flex(**options)), torch.randn(16, 6), torch.randn(16, 16)
    with torch.no_grad():  # on a CPU it has no backward
        expected = _under_autocast(model)(x, bias)
        module = fxamp.compile(model, policy=f"{beyond},dtype=bf16", backend="eager")
        assert torch.equal(module(x, bias), expected.float())
    plan = fxamp.plan_of(module)
    found = [(d.colour, d.code) for d in plan.decisions if d.op == "higher_order::flex_attention"]
    assert found == [("bfloat16", "as_autocast")]
    assert not plan.deviations


class _Scaled(torch.autograd.Function):
    """What Dynamo captures as a higher-order op, `autograd_function_apply`, whose forward autocast reaches into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w) * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (gradient @ w.T.to(gradient.dtype)).to(x.dtype) * 1.5, (x.T.to(gradient.dtype) @ gradient).to(
            w.dtype
        ) * 1.5


@pytest.mark.parametrize("scale", [1, 3])
def test_an_unknown_higher_order_op_is_as_under_autocast(scale: int) -> None:
    torch.manual_seed(0)
    model, x = Two(lambda self, x: self.m(_Scaled.apply(self.l(x) * scale, self.m.weight))), example()  # type: ignore[no-untyped-call]
    expected = _outputs_and_gradients(_under_autocast(model), model, x)
    module = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
    got = _outputs_and_gradients(module, model, x)
    assert len(got) == len(expected) > 2
    assert all(map(torch.equal, got, expected))
    plan = fxamp.plan_of(module)
    assert {d.code for d in plan.decisions if d.op == "higher_order::autograd_function_apply"} == {"as_autocast"}
    assert not plan.deviations


def test_a_region_is_left_where_the_op_raises(ops: Any) -> None:
    model, x = Two(lambda self, x: ops.fp32_only(self.l(x))), example()
    module = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
    with pytest.raises(Exception, match="only FP32"):
        module(x)
    assert not torch.is_autocast_enabled("cpu")
    weight = torch.randn(6, 6, requires_grad=True)
    with torch.autocast("cpu", BF16):
        before = torch.mm(x, weight)
    with torch.no_grad():
        weight.zero_()
    with torch.autocast("cpu", BF16):  # a cast of the weight that autocast had kept would be stale
        after = torch.mm(x, weight)
    assert before.any()
    assert not after.any()
    assert tensors(after)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_what_a_composite_calls_and_nothing_decomposes_runs_as_under_autocast(front_end: str) -> None:
    model = Two(lambda self, x: self.b(x, x.tanh()), b=nn.Bilinear(6, 6, 4)).eval()
    module = convert(model, one(), front_end)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(*one()), model(*one()))
    assert fxamp.plan_of(module).deviations == ()


def pooled(self: Any, x: Tensor) -> Tensor:
    """Attention over the valid rows, pooled by their mean and scaled by their deviation."""
    h, valid = self.l(x), x > -1
    weights = torch.masked.softmax(h @ h.t(), -1, mask=valid[:, :1].t().expand(len(x), -1))
    mean = torch.masked.mean(self.m(x), 0, mask=valid)
    return weights @ h * mean / (torch.masked.std(h, 0, mask=valid, unbiased=False) + 1)


def normalized(self: Any, x: Tensor) -> Tensor:
    return self.m(x) + torch.masked.normalize(self.l(x), 2.0, -1, mask=x > 0)


@pytest.mark.parametrize("forward", [pooled, normalized])
def test_a_python_function_that_the_tracer_calls_whole_runs_as_under_autocast(forward: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(32, 6)
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert_trains_as_autocast(view, model, x)
    codes = {d.code for d in fxamp.plan_of(view).decisions if "masked" in d.op}
    assert codes == {"as_autocast"}
