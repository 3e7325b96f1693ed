"""At O1 gradients are autocast's to the last bit, and so is what a training run logs.

Autocast casts a leaf parameter once a region and sums the gradients of its readers in 16 bits; every other value it
casts anew for each reader, so that these gradients are summed in FP32, in autograd's order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.observe.workload import floats
from passes.runtime.casts import CAST, again
from tests.support.architectures import BY_NAME
from tests.support.baseline import UnderAutocast
from tests.support.front_ends import FRESH
from tests.support.helpers import Two

pytestmark = FRESH

BF16 = torch.bfloat16
MODELS = (
    "BertForMaskedLM", "GPT2LMHeadModel", "ViTForImageClassification", "LlamaForCausalLM",
    "ResNetForImageClassification",
)  # fmt: skip


def compiled(model: nn.Module) -> Any:
    return fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")


def passed(called: Any, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the outputs in FP32 and the gradients of one forward and backward pass."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = [t.float() for t in floats(called(**inputs))]
    next(t for t in outputs if t.requires_grad).mean().backward()  # the model's own loss is the only one that reads
    return [*(t.detach() for t in outputs), *(p.grad for p in model.parameters() if p.grad is not None)]


def trained(name: str, steps: int, compile: Any) -> tuple[list[Tensor], list[float]]:
    """Return what one pass of a small model gives, and the losses of so many steps after it."""
    model, inputs = BY_NAME[name](2)
    inputs = {"labels": torch.zeros(2, dtype=torch.long), **inputs}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called, losses = compile(model.train()), []
    first = [t.clone() for t in passed(called, model, inputs)]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = called(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return first, losses


CACHED = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("BertForMaskedLM", 8),
        ("ResNetForImageClassification", 8),
        *(pytest.param(name, 50, marks=pytest.mark.matrix) for name in MODELS),
        pytest.param("WavLMForSequenceClassification", 1, marks=[CACHED, pytest.mark.matrix]),
    ],
)
def test_outputs_gradients_and_losses_of_a_run_are_autocasts(name: str, steps: int) -> None:
    """WavLM calls attention as one function, with low queries and FP32 weights."""
    (found, losses), (expected, theirs) = (
        trained(name, steps, compile) for compile in (compiled, lambda model: UnderAutocast(model, BF16))
    )
    assert len(found) == len(expected)
    assert [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)] == []
    assert losses == theirs


def heads(self: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(self.l(x), (6,))
    return self.m(h).sin() + self.l(h).cos() + h * 2


@pytest.mark.parametrize(("rows", "asked", "storages"), [(64, "", 0), (60_000, "", 1), (64, ",share_casts=storage", 1)])
def test_copies_of_a_large_value_share_a_storage_where_it_is_read(rows: int, asked: str, storages: int) -> None:
    """The layer norm is FP32 here and its two low readers would each copy 360,000 elements."""
    model, x = Two(heads), {"x": torch.randn(rows, 6)}
    policy = "O1,dtype=bf16,ops.layer_norm=fp32"
    module = fxamp.compile(model, policy=policy + asked, backend="eager")
    apart = fxamp.compile(model, policy=f"{policy},share_casts=weights", backend="eager")
    expected = passed(apart, model, x)
    assert all(map(torch.equal, passed(module, model, x), expected))
    targets = [n.target for g in fxamp.graphs(module) for n in g.graph.nodes]
    assert targets.count(again) == storages


def with_loss(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.l(x)
    return F.cross_entropy(logits.float(), x.softmax(-1)), logits


@pytest.mark.parametrize("share", ["", ",share_casts=always", ",share_casts=weights"])
def test_an_output_that_is_restored_is_the_cast_that_its_author_made(share: str) -> None:
    """A language model returns its logits beside a loss of `logits.float()`, which in FP32 is the same tensor."""
    model, x = Two(with_loss), torch.randn(60_000, 6)
    view = fxamp.convert(model, (x,), policy=f"O1,dtype=bf16{share}")

    def trained(called: Any, write: bool) -> list[Tensor]:
        model.zero_grad()
        loss, logits = called(x)
        logits = logits.float()
        if write:  # as in FP32, backward of the loss does not read them
            logits.mul_(2)
        (loss + logits.square().mean() * write).backward()
        return [loss.detach(), logits.detach(), *(p.grad for p in model.l.parameters() if p.grad is not None)]

    for write in (False, True):
        found, expected = (trained(called, write) for called in (view, UnderAutocast(model, BF16)))
        assert len(found) == 4
        assert all(map(torch.equal, found[:2], expected[:2]))
        sums_in_fp32 = write  # of both gradients of the logits, which autocast rounds before it adds them
        assert all(
            torch.allclose(a, b, rtol=0.01) if sums_in_fp32 else torch.equal(a, b)
            for a, b in zip(found, expected, strict=True)
        )
    (graph,) = fxamp.graphs(view)
    targets = [n.target for n in graph.graph.nodes]
    assert [t for t in targets if t is again or t == "float"] == ["float"]
    assert graph.graph.output_node().all_input_nodes[1].target == "float"


@pytest.mark.parametrize("share", ["", ",share_casts=always"])
def test_a_copy_that_its_author_returns_may_be_written_before_backward(share: str) -> None:
    def copied(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.l(x).bfloat16()
        return low.float().view(-1), F.mse_loss(low, torch.zeros_like(low))

    model, x, gradients = Two(copied), torch.randn(60_000, 6), []
    for called in (fxamp.convert(model, (x,), policy=f"O1,dtype=bf16{share}"), UnderAutocast(model, BF16)):
        model.zero_grad()
        copy, loss = called(x)
        with torch.no_grad():
            copy.zero_()
        loss.backward()
        gradients += [p.grad.clone() for p in model.l.parameters() if p.grad is not None]
    assert len(gradients) == 4
    assert all(map(torch.equal, gradients[:2], gradients[2:]))


@pytest.mark.parametrize(
    "read",
    [
        lambda h: torch.cdist(h, h) @ h,
        lambda h: F.triplet_margin_loss(h, h, h * 2, margin=3.0) * h,
        lambda h: F.margin_ranking_loss(h, h, torch.ones(6, 32), margin=0.1) * h,
        lambda h: F.poisson_nll_loss(h, h) * h,
        lambda h: F.binary_cross_entropy_with_logits(h, h) * h,
        lambda h: F.kl_div(h, h.abs().log(), reduction="sum", log_target=True) * h,
        lambda h: torch.stack([h, h.sin(), h, h.float()])[0] * h,
        lambda h: torch.addcmul(h.float(), h, h) * h,
    ],
    ids=["cdist", "triplet", "ranking", "poisson", "cross entropy", "divergence", "stack", "addcmul"],
)
def test_a_value_that_one_op_reads_twice_has_autocasts_gradient(read: Any) -> None:
    torch.manual_seed(0)
    model, x = Two(lambda self, x: read(self.wide(x))), {"x": torch.randn(6, 16)}
    model.wide = nn.Linear(16, 32)
    expected = passed(UnderAutocast(model, BF16), model, x)
    module = compiled(model)
    assert all(map(torch.equal, expected, passed(module, model, x)))
    assert not fxamp.plan_of(module).deviations


def _by_slice(made: Tensor, weight: Tensor) -> None:
    made[:4] += weight[:4]


@pytest.mark.parametrize(
    "write",
    [
        lambda made, weight: made.__setitem__(slice(None), weight), lambda made, weight: made.copy_(weight),
        lambda made, weight: made.view(-1).add_(weight.view(-1)), _by_slice,
        lambda made, weight: made.index_add_(0, torch.arange(8), weight),
    ],
)  # fmt: skip
@pytest.mark.parametrize("early", [False, True])
def test_a_value_has_gradients_that_one_with_gradients_is_written_to(write: Any, early: bool) -> None:
    """Several products read it, each of whose casts has a gradient of its own, as under autocast."""

    def forward(self: Any, x: Tensor) -> Tensor:
        made = torch.zeros(8, 8)
        read = made.t() if early else made
        write(made, self.wide.weight)
        read = read * 1
        return (x @ read).sin() + (x @ read @ read).sin()

    torch.manual_seed(0)
    model, x = Two(forward), {"x": torch.randn(6, 8)}
    model.wide = nn.Linear(8, 8)
    expected = passed(UnderAutocast(model, BF16), model, x)
    module = compiled(model)
    assert all(map(torch.equal, expected, passed(module, model, x)))
    assert not fxamp.plan_of(module).deviations


def test_a_compiler_gets_plain_casts_of_them() -> None:
    found: list[Any] = []

    def inner(gm: GraphModule, example_inputs: list[Any]) -> GraphModule:
        found.extend(n.target for n in gm.graph.nodes)
        return gm

    model, x = Two(heads), torch.randn(60_000, 6)
    fxamp.compile(model, policy="O1,dtype=bf16,ops.layer_norm=fp32", backend=inner)(x)
    assert again not in found
    assert found.count(CAST) > 5


class Block(nn.Module):
    """Reads a value in FP32 by two layers, inside a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.q, self.k, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), reentrant

    def forward(self, x: Tensor) -> Any:
        def block(h: Tensor) -> Any:
            return self.q(h) * self.k(h)

        return checkpoint(block, self.first(x).float().exp(), use_reentrant=self.reentrant)


def test_a_reentrant_checkpoint_detaches_its_inputs_which_autocast_then_casts_once() -> None:
    x = {"x": torch.randn(8, 16)}
    expected, got = [], []
    for reentrant in (True, False):
        own, model = Block(reentrant), Block(reentrant)
        expected.append(passed(UnderAutocast(own, BF16), own, x))
        got.append(passed(compiled(model), model, x))
    assert all(map(torch.equal, expected[0] + expected[1], got[0] + got[1]))
    assert not all(map(torch.equal, *got))


def checkpointed(self: Any, x: Tensor) -> Tensor:
    inside: Tensor = checkpoint(lambda t: self.m(t).relu(), self.l(x), use_reentrant=False)
    return inside


def inside_and_outside(self: Any, x: Tensor) -> Tensor:
    return checkpointed(self, x) + self.m(x)


def inside_in_fp32_too(self: Any, x: Tensor) -> Tensor:
    def block(t: Tensor) -> Tensor:
        return self.m(t).relu() + self.m.weight.abs().sum() + self.m.bias.abs().sum()

    inside: Tensor = checkpoint(block, self.l(x), use_reentrant=False)
    return inside + self.m(x)


@pytest.mark.parametrize(
    ("forward", "codes"), [(checkpointed, set()), (inside_and_outside, set()), (inside_in_fp32_too, {"sum_order"})]
)
def test_a_weight_that_a_checkpoint_shares_has_a_code_where_it_is_not_cast_outside(
    forward: Any, codes: set[str]
) -> None:
    torch.manual_seed(0)
    model, x = Two(forward), {"x": torch.randn(64, 6)}
    expected = passed(UnderAutocast(model, BF16), model, x)
    module = compiled(model)
    differ = [not torch.equal(a, b) for a, b in zip(expected, passed(module, model, x), strict=True)]
    assert any(differ) == bool(codes)
    # Only the weight and the bias that both read, m's, which come last.
    assert not any(differ[:3])
    assert {d.code for d in fxamp.plan_of(module).deviations} == codes
