"""Tables are read and not cast; their gradients, and writes to them, reach the master."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import (
    F32,
    FRESH,
    FRONT_ENDS,
    Case,
    assert_at_all_levels,
    casts,
    check,
    convert,
    decided,
    each_front_end,
    each_low,
    legs,
    one,
)
from tests.support.helpers import Two

pytestmark = FRESH


def ids() -> tuple[Tensor]:
    return (torch.tensor([[1, 300, 301], [299, 7, 7]]),)


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


def tied() -> nn.Module:
    model = Words()
    model.out.weight = model.words.weight
    return model


CASES = {
    "embedding": Case(partial(Words, padding_idx=7, scale_grad_by_freq=True), ids),
    "with max_norm": Case(renormalised, ids),
    "tied": Case(tied, ids, legs=("view",)),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_a_table_gives_what_the_model_gives(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="view")
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


@pytest.mark.default_case(front_end="graph")
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
    # The table, the bias, what was looked up, and the logits on their way out.
    assert fxamp.plan_of(module).casts == 4


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_table_is_read_and_not_cast(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(lambda self, i: self.l(self.words(i)), words=nn.Embedding(500, 6, padding_idx=7))
    ids = (torch.tensor([[1, 7, 499]]).repeat(2, 1),)
    module = convert(model, ids, front_end)
    module(*ids).sum().backward()
    gradient: Any = model.words.weight.grad  # type: ignore[union-attr]
    assert gradient.dtype == F32
    assert not gradient[7].any()
    assert gradient[499].any()
    assert not [n for n in casts(module) if "words" in str(n.all_input_nodes[0].target)]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_sparse_gradient_is_sparse_and_trains(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(lambda self, i: self.l(self.words(i)), words=nn.Embedding(50, 6, sparse=True))
    table: Any = model.words.weight  # type: ignore[union-attr]
    ids = (torch.tensor([[1, 7, 49]]),)
    module = convert(model, ids, front_end)
    optimizer, scaler = torch.optim.SparseAdam([table], lr=0.1), fxamp.LossScaler("cpu", init_scale=8.0)
    before = table.detach().clone()
    scaler.scale(module(*ids).square().mean()).backward()
    assert table.grad.is_sparse
    assert table.grad.dtype == F32
    scaler.step(optimizer)
    scaler.update()
    assert [i for i in range(50) if not torch.equal(before[i], table[i])] == [1, 7, 49]


@pytest.mark.default_case(front_end="view", name="fp16", low=torch.float16)
@each_low(*FRONT_ENDS)
def test_an_embedding_bag_takes_computed_weights(front_end: str, name: str, low: torch.dtype) -> None:
    def bags(self: Any, x: Tensor) -> Any:
        return self.e(torch.arange(24).view(4, 6) % 10, per_sample_weights=self.l(x))

    torch.manual_seed(0)
    model, args = Two(bags, e=nn.EmbeddingBag(10, 6, mode="sum")), one()
    assert_at_all_levels(model, args, front_end, name, low)
