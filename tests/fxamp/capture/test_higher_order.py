"""Bodies of higher-order ops, and transforms of torch.func, are rewritten inside by the backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


class Recomputing(nn.Module):
    """Two blocks with dropout, and one of them with a batch norm, in checkpoints; inside another one if `nested`."""

    def __init__(self, nested: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nested, self.settings = nested, {"use_reentrant": False, **settings}
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.normed = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 16))
        self.plain = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU())

    def forward(self, x: Tensor) -> Any:
        def block(h: Tensor) -> Any:
            return self.again(self.normed, h) + h if self.nested else self.normed(h)

        h = F.dropout(self.again(block, self.first(x)), 0.2, self.training)
        return self.last(self.again(self.plain, h))

    def again(self, block: Any, h: Tensor) -> Any:
        return checkpoint(block, h, **self.settings)


def _saves_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"nested": True}, {"use_reentrant": True}, {"preserve_rng_state": False}, {"early_stop": False},
        {"context_fn": partial(create_selective_checkpoint_contexts, _saves_products)},
    ],
    ids=lambda given: "".join(given) or "plain",
)  # fmt: skip
def test_a_checkpoint_recomputes_as_the_authors_code_does(settings: Any, checked: bool, policy: str) -> None:
    def step(call: Any, model: nn.Module, low: bool) -> list[Tensor]:
        torch.manual_seed(5)
        with torch.autocast("cpu", BF16, enabled=low):
            out = call(x)
        out.float().square().sum().backward()
        tensors = [p.grad for p in model.parameters()] + list(model.buffers())
        return [out.detach().float(), *(t.clone() for t in tensors if t is not None), torch.get_rng_state()]

    x = torch.randn(8, 16)
    model, own = Recomputing(**settings), Recomputing(**settings)
    view = fxamp.convert(model, *(((x,),) if checked else ()), policy=policy)
    expected, got = step(own, own, low=policy != "O0"), step(view, model, low=False)
    assert [torch.equal(a, b) for a, b in zip(expected, got, strict=True)] == [True] * len(got)
    assert not fxamp.plan_of(view).notes
    assert len(fxamp.plan_of(view).decisions) >= 7


class Written(nn.Module):
    """Writes what its checkpoint reads: a buffer and a tensor after it, or inside it the value that it is given."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean: Tensor
        self.first, self.l, self.inside = nn.Linear(6, 6), nn.Linear(6, 6), inside
        self.register_buffer("mean", torch.zeros(6))
        self.scale = torch.ones(6)

    def forward(self, x: Tensor) -> Any:
        def block(h: Tensor) -> Tensor:
            return self.l(h.mul_(2) if self.inside else h * self.scale - self.mean).sin()

        h = checkpoint(block, self.first(x), use_reentrant=False)
        if not self.inside:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0).float(), 0.1)
                self.scale.mul_(1.1)
        return h


def in_place(model: nn.Module) -> Any:
    return torch.compile(model, backend=fxamp.backend("O1,dtype=bf16", "eager"))


def viewed(model: nn.Module) -> Any:
    return fxamp.convert(model, policy="O1,dtype=bf16")


@pytest.mark.parametrize("convert", [viewed, in_place])
@pytest.mark.parametrize("weights", [False, True])
def test_what_a_checkpoint_reads_from_a_module_is_read_again_as_it_is_then(weights: bool, convert: Any) -> None:
    def gradient(call: Any, model: Any) -> Any:
        with torch.autocast("cpu", BF16):
            out = call(example())
        if weights:
            with torch.no_grad():
                model.l.weight.mul_(1.01)
        out.float().sum().backward()
        return model.l.bias.grad

    own, model = Written(inside=False), Written(inside=False)
    assert torch.equal(gradient(own, own), gradient(convert(model), model))


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16"])
def test_what_a_checkpoint_is_given_may_not_be_written_before_backward(policy: str) -> None:
    out = fxamp.convert(Written(inside=True), policy=policy)(example())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.vmap runs no checkpoint")
def test_a_checkpoint_under_vmap_is_as_under_autocast() -> None:
    model, x = Recomputing().eval().requires_grad_(False), torch.randn(8, 16)
    view = fxamp.convert(model, policy="O1,dtype=bf16,output_dtype=autocast")
    with torch.autocast("cpu", BF16):
        expected = torch.vmap(lambda row: model(row[None])[0])(x)
    assert torch.equal(torch.vmap(lambda row: view(row[None])[0])(x), expected)


def test_a_penalty_on_gradients_goes_through_a_checkpoint() -> None:
    def penalty(call: Any) -> Tensor:
        x = torch.linspace(-1, 1, 32).view(2, 16).requires_grad_()
        (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        slope.norm().backward()
        found = model.first.weight.grad
        model.zero_grad()
        assert found is not None
        return found

    model = Recomputing().eval()
    assert torch.equal(penalty(fxamp.convert(model, policy="O0")), penalty(model))


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
