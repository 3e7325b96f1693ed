"""A value is cast once for all that read it, and only to what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.measure.counts import op_counts, step_counts
from tests.support.front_ends import (
    BF16,
    F32,
    FRESH,
    FRONT_ENDS,
    assert_trains_as_autocast,
    at_levels,
    casts,
    convert,
    converted,
    decided,
    each_front_end,
    each_low,
    one,
)
from tests.support.helpers import Two, example

pytestmark = FRESH


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_casts_are_shared_as_the_policy_says(front_end: str) -> None:
    model = Two(lambda self, x: (self.l(x), self.m(x), self.l(x * 2)))
    policies = [
        "O1,output_dtype=low",
        *(f"O1,output_dtype=low,share_casts={s}" for s in ("always", "weights", "never")),
    ]
    # Of x and 2x, two weights and two biases; of x, which needs no gradients, once more; of l's weight and bias too.
    for made, count in zip(at_levels(model, one(), front_end, *policies), (6, 6, 7, 9), strict=True):
        module = made()
        module(*one())
        assert fxamp.plan_of(module).casts == count


def masked(self: Any, x: Tensor) -> Tensor:
    batch = x.view(8, 8, 6)
    return self.m(batch) @ torch.where(batch[:, :6] > 0, self.l.weight.t(), -1.0)  # repeated over the batch


def read_twice(self: Any, x: Tensor) -> Tensor:
    turned = self.l.weight.t()
    return self.m(x) @ turned + (x * 2) @ turned


@pytest.mark.parametrize("forward", [masked, read_twice])
def test_gradients_are_summed_in_fp32_where_autocast_sums_them_so(forward: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(64, 6)
    module = fxamp.convert(model, (x,), policy="O1,dtype=bf16,share_casts=weights")
    assert_trains_as_autocast(module, model, x)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_an_activation_is_cast_once_for_all_its_readers(front_end: str) -> None:
    model = nn.ModuleDict({k: nn.Linear(6, 6, bias=False) for k in "qkv"})
    holder = Two(lambda self, x: tuple(self.heads[k](x) for k in "qkv"), heads=model)
    module = convert(holder, one(), front_end, "O1,output_dtype=low")
    module(*one())
    sources = [n.all_input_nodes[0] for n in casts(module)]
    assert len(sources) == len(set(sources)) == 4
    assert all(n.args[1] == BF16 for n in casts(module))


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_logits_are_upcast_once_for_the_loss(front_end: str) -> None:
    def head(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.l(x)), target)

    def upcast(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.l(x)).float(), target)

    args = (example(), torch.tensor([3, 99, 0, 498]))
    found = []
    for forward in (head, upcast):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two(forward, head=nn.Linear(6, 499))
        module = convert(model, args, front_end)
        torch.testing.assert_close(module(*args), model(*args), rtol=0.01, atol=0.01)
        wide = [
            n for g in fxamp.graphs(module) for n in g.graph.nodes
            if n.op.startswith("call") and isinstance(n.meta.get("val"), Tensor) and n.meta["val"].shape == (4, 499)
            and n.meta["val"].dtype == F32
        ]  # fmt: skip
        found.append(len(wide))
    assert found[0] <= 1
    assert found[1] <= 1


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_value_is_cast_once_per_dtype(front_end: str) -> None:
    def fan_out(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        wide = torch.relu(y)
        return self.m(wide), self.l(wide), self.m(x) + wide, wide.abs() * 2

    for made in at_levels(Two(fan_out), one(), front_end, "O1,ops.relu=fp32,share_casts=always", "O2,ops.relu=fp32"):
        module = made()
        module(*one())
        sources = [(n.all_input_nodes[0], n.args[1]) for n in casts(module)]
        pairs = [(n.target if n.op == "get_attr" else n, dtype) for n, dtype in sources]
        assert len(pairs) == len(set(pairs)) > 0


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_pair_of_casts_with_two_readers_is_removed(front_end: str) -> None:
    def moved(self: Any, x: Tensor) -> Any:
        y = self.l(x).t().t()
        return self.m(y), self.l(y)

    _, module = converted(moved, front_end, "O1,output_dtype=low")
    sources = [n.all_input_nodes[0].op for n in casts(module)]
    assert "call_function" not in sources
    assert "call_method" not in sources


@pytest.mark.default_case(front_end="view", name="bf16", low=torch.bfloat16)
@each_low(*FRONT_ENDS)
def test_every_cast_is_to_the_dtype_that_was_asked_for(name: str, low: torch.dtype, front_end: str) -> None:
    _, module = converted(lambda self, x: self.m(F.gelu(self.l(x))).exp(), front_end, f"O1,dtype={name}")
    assert {n.args[1] for n in casts(module)} == {low, F32}
    assert set(decided(module, "linear")) == {str(low).removeprefix("torch.")}


def no_grad_first(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        known = self.l(self.m(x))
    return self.m(self.l(x + known))


def no_grad_last(self: Any, x: Tensor) -> Tensor:
    y = self.m(self.l(x))
    with torch.no_grad():
        target = self.l(self.m(x * 0.9))
    return y - target


@pytest.mark.default_case(policy="O1,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16"])
@pytest.mark.parametrize("forward", [no_grad_first, no_grad_last])
def test_a_weight_is_cast_once_for_passes_with_and_without_gradients(forward: Any, policy: str) -> None:
    """Self-conditioning of diffusion, consistency losses: one forward without gradients, and one with."""
    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(64, 6)
    view = fxamp.convert(model, (x,), policy=policy)
    if policy.startswith("O1"):
        assert_trains_as_autocast(view, model, x)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    view(x)
    theirs, ours = step_counts(under_autocast), step_counts(lambda: fxamp.graphs(view)[0](x)[0].sum())
    assert ours.casts <= theirs.casts
    with torch.no_grad():  # a cast with its history hands none on
        assert not view(x).requires_grad


def in_two_checkpoints(self: Any, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return torch.tanh(self.m(self.l(x)))

    return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)


def in_a_checkpoint_and_outside(self: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda x: torch.tanh(self.m(self.l(x))), self.m(self.l(x)), use_reentrant=False)
    return self.m(self.l(y))


def in_a_checkpoint_inside_another(self: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(self.l(x))

    def outer(x: Tensor) -> Tensor:
        y = checkpoint(inner, self.m(x), use_reentrant=False)
        return checkpoint(inner, self.m(torch.sin(y)), use_reentrant=False)

    return checkpoint(outer, self.m(self.l(x)), use_reentrant=False)


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16"])
@pytest.mark.parametrize("forward", [in_two_checkpoints, in_a_checkpoint_and_outside, in_a_checkpoint_inside_another])
def test_a_weight_in_several_checkpoints_is_cast_no_more_often_than_by_autocast(forward: Any, policy: str) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(64, 6)
    view = fxamp.convert(model, (x,), policy=policy)
    if policy.startswith("O1"):
        assert_trains_as_autocast(view, model, x)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    theirs, ours = step_counts(under_autocast), step_counts(lambda: view(x).sum())
    assert ours.casts <= theirs.casts


def by_a_number(self: Any, x: Tensor) -> Tensor:
    return self.m(self.l(x) * self.l.weight.square().mean()) + self.m.weight.sum()


def inside_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Any:
        return by_a_number(self, x)

    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [by_a_number, inside_a_checkpoint])
def test_a_number_beside_a_low_tensor_is_read_as_it_is_as_under_autocast(forward: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(64, 6)
    view = fxamp.convert(model, (x,), policy="O2,dtype=bf16")

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    theirs, ours = step_counts(under_autocast), step_counts(lambda: view(x).sum())
    assert ours.casts <= theirs.casts
    assert [d.colour for d in fxamp.plan_of(view).decisions if d.op == "mul"] == ["bfloat16"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_in_reentrant_checkpoints_is_cast_no_more_often_than_by_autocast(level: str) -> None:
    """Layers of ALBERT share their weights; O1 sums the gradients of each layer apart, as a reentrant checkpoint."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 64, "num_hidden_layers": 3}
    config = transformers.AlbertConfig(
        vocab_size=60, num_attention_heads=2, attn_implementation="eager", classifier_dropout_prob=0.0, **sizes
    )
    model = transformers.AlbertForSequenceClassification(config).train()
    layer, tokens = model.albert.encoder.albert_layer_groups[0], torch.randint(0, 60, (4, 12))
    run = layer.forward
    layer.forward = lambda x, *args, **kwargs: checkpoint(lambda h: run(h, *args, **kwargs), x, use_reentrant=True)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens).logits.float().square().sum()

    view = fxamp.convert(model, (tokens,), policy=f"{level},dtype=bf16")
    view(tokens)
    counts, gradients = [], []
    for forward in (under_autocast, lambda: view(tokens).logits.square().sum()):
        model.zero_grad()
        counts.append(op_counts(forward).casts)  # `torch.autograd.grad` is not for such a checkpoint
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert counts[1] <= counts[0]
    assert len(gradients[0]) == len(gradients[1]) > 20
    if level == "O1":
        assert all(map(torch.equal, *gradients))


def test_a_reentrant_checkpoint_sums_gradients_of_a_weight_apart_at_o1() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(self.m(self.l(x))), self.m(self.l(x)), use_reentrant=True)
        return self.m(self.l(y))

    torch.manual_seed(0)
    model, x = Two(forward), torch.randn(64, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()  # `torch.autograd.grad` is not for it
    autocasts = [p.grad for p in model.parameters()]
    model.zero_grad()
    fxamp.convert(model, (x,), policy="O1,dtype=bf16")(x).sum().backward()
    for parameter, theirs in zip(model.parameters(), autocasts, strict=True):
        assert theirs is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, theirs)
