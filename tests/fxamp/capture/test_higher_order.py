"""Bodies of higher-order ops, and transforms of torch.func, are rewritten inside by the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.support.front_ends import FRESH, compiled, equal
from tests.support.helpers import Two, example

pytestmark = FRESH
BF16, F32 = torch.bfloat16, torch.float32


def test_a_checkpointed_block_is_rewritten_inside() -> None:
    def block(self: Two, x: Tensor) -> Any:
        return self.m(F.gelu(self.l(x))) + x

    def f(self: Two, x: Tensor) -> Any:
        return checkpoint(lambda t: block(self, t), self.m(x), use_reentrant=False)

    model = Two(f)
    x = example()
    with torch.autocast("cpu"):
        expected = model(x)
    expected.float().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    module = compiled(model)
    got = module(x)
    got.sum().backward()
    assert equal(got, expected)
    for ours, theirs in zip([p.grad for p in model.parameters()], gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=2e-2, atol=1e-3)  # type: ignore[arg-type]
    plan = fxamp.plan_of(module)
    assert "higher_order::tag_activation_checkpoint" in {d.op for d in plan.decisions}
    inside = {(d.op, d.colour) for d in plan.decisions if d.graph == 1}
    assert inside == {("linear", "bfloat16"), ("gelu", "bfloat16"), ("add", "bfloat16")}


@pytest.mark.parametrize("given", [torch.float16, BF16])
def test_what_a_checkpoint_gives_low_is_cast_to_fp32_before_it_is_written(given: torch.dtype) -> None:
    def f(self: Two, x: Tensor, low: Tensor) -> Any:
        h = checkpoint(lambda a: self.l(a.float()).to(a.dtype), low, use_reentrant=False)
        wide = h.to(x.dtype)
        wide[..., :2] = wide[..., 2:4]
        return wide, h

    model, x, low = Two(f), example(), example().to(given)
    module = torch.compile(model, backend=fxamp.backend("O1,dtype=bf16", "eager"))
    with torch.autocast("cpu"):
        expected, got = model(x, low), module(x, low)
    assert equal(got, expected)
    assert [t.dtype for t in got] == [F32, given]
    assert torch.equal(compiled(model)(x, low)[0], expected[0])


def test_what_a_checkpoint_saves_is_not_more_than_without_fxamp() -> None:
    def f(self: Two, x: Tensor) -> Any:
        return checkpoint(lambda t: self.m(F.gelu(self.l(t))), x, use_reentrant=False)

    def saved(module: Any) -> int:
        held: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            held.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = module(x)
        assert out.requires_grad
        return sum(t.nbytes for t in held if not isinstance(t, nn.Parameter))

    model, x = Two(f), example(64)
    assert saved(compiled(model)) <= saved(model)


def test_transforms_of_torch_func() -> None:
    def mapped(self: Two, x: Tensor) -> Any:
        return torch.vmap(lambda row: self.m(self.l(row)))(x) + self.m(x)

    def differentiated(self: Two, x: Tensor) -> Any:
        return torch.func.grad(lambda t: self.m(torch.tanh(self.l(t))).sum())(x) * self.m(x)

    for f in (mapped, differentiated):
        model, x = Two(f), example()
        with torch.autocast("cpu"):
            expected = model(x)
        gradients = torch.autograd.grad(expected.sum(), [*model.parameters()], allow_unused=True)
        module = fxamp.convert(model, (x,), policy="O1,output_dtype=autocast")
        got = module(x)
        assert equal(got, expected)
        for ours, theirs in zip(
            torch.autograd.grad(got.sum(), [*model.parameters()], allow_unused=True), gradients, strict=True
        ):
            assert ours is theirs is None or torch.equal(ours, theirs)
        assert not fxamp.plan_of(module).deviations
        assert equal(fxamp.convert(model, (x,), policy="O0")(x), model(x))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_kept_whole_where_the_policy_says_so() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def f(self: Two, x: Tensor) -> Any:
        q, k = self.l(x).view(1, 1, 4, 6), self.m(x).view(1, 1, 4, 6)
        return flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + (i - j)).view(4, 6)

    model, x = Two(f), example()
    with torch.no_grad():
        module = compiled(model, "O1,unknown_ops=keep")
        assert torch.allclose(module(x), model(x), atol=0.05)
    kept = {d.op: (d.colour, d.code) for d in fxamp.plan_of(module).decisions}
    assert kept["higher_order::flex_attention"] == ("float32", "keep")
    assert kept["linear"][0] == "bfloat16"
