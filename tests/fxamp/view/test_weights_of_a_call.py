"""In one call a weight is cast once, however many graphs read it and however often: autocast's bits at its casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.helpers import Layers

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
O1 = "O1,dtype=bf16"


def one_step(self: Any, x: Tensor) -> Tensor:
    x = x + torch.tanh(self.f(x))
    if x.abs().max() > 1e4:
        x = x / 2
    return x


def solver(self: Any, x: Tensor) -> Tensor:
    """A solver's steps, each of which looks at its error."""
    for _ in range(4):
        x = one_step(self, x)
    return x


def one_cell(self: Any, x: Tensor, h: Tensor) -> Tensor:
    h = self.cell(x, h)
    torch._dynamo.graph_break()
    return h


def cell(self: Any, x: Tensor) -> Tensor:
    """A recurrent cell in front of a break, called for each step."""
    h = torch.zeros_like(x)
    for _ in range(3):
        h = one_cell(self, x, h)
    return h


def tied(self: Any, x: Tensor) -> Tensor:
    """A weight that is read on both sides of a break, as an embedding's is by the head."""
    h = nn.functional.linear(x, self.f.weight).relu()
    torch._dynamo.graph_break()
    return nn.functional.linear(h, self.f.weight.t())


def with_and_without(self: Any, x: Tensor) -> Tensor:
    """A weight that is read behind a break without gradients too."""
    h = self.f(x)
    torch._dynamo.graph_break()
    with torch.no_grad():
        scale = self.f(x).abs().mean()
    torch._dynamo.graph_break()
    return self.f(h) * scale


def regions(self: Any, x: Tensor) -> Tensor:
    """A weight that is read on both sides of a break inside a region without autocast, and of it."""
    h = self.f(x)
    with torch.autocast("cpu", enabled=False):
        h = self.f(h.float())
    torch._dynamo.graph_break()
    return self.f(h)


def table(self: Any, x: Tensor) -> Tensor:
    """A table that encoder and decoder look up behind a break, as it is, and that the head reads low at last."""
    torch._dynamo.graph_break()
    ids = torch.arange(32) % 16
    encoded = nn.functional.embedding(ids, self.f.weight) * x
    decoded = nn.functional.embedding(ids.flip(0), self.f.weight) * encoded.sigmoid()
    return nn.functional.linear(decoded, self.f.weight)


FORWARDS = (solver, cell, tied, with_and_without, regions, table)


def model_of(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    return Layers(forward, f=nn.Linear(16, 16), cell=nn.GRUCell(16, 16))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def casts_of(model: Any) -> int:
    return sum(row.casts for row in fxamp.census(model, X, loss=loss_of).casts)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_gradients_are_autocasts_at_no_cast_more(forward: Callable[[Any, Tensor], Tensor]) -> None:
    model = model_of(forward)
    gradients = []
    for run in (fxamp.convert(model, (X,), policy=O1), model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=run is model):
            output = run(X)
        loss_of(output).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys() != set()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    view = fxamp.convert(model, (X,), policy=O1)
    assert not [note for note in fxamp.plan_of(view).notes if "sum_order" in note]
    census = fxamp.census(view, X, loss=loss_of)
    # Of a loop round a break Python runs the frame itself, in which there is no op.
    assert [d for d in census.differences if d.kind != "uncaptured"] == []
    with torch.autocast("cpu", torch.bfloat16):
        autocast = casts_of(model)
    assert sum(row.casts for row in census.casts) <= autocast


@pytest.mark.parametrize("weights", ["per_use", "per_step"])
@pytest.mark.parametrize("forward", FORWARDS[:3], ids=lambda f: f.__name__)
def test_a_train_step_is_the_loop_by_hand(forward: Callable[[Any, Tensor], Tensor], weights: Any) -> None:
    losses = []
    for by_hand in (True, False):
        model = model_of(forward)
        view = fxamp.convert(model, policy=O1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = fxamp.TrainStep(view, loss_of, optimizer, accumulate_steps=2, weights=weights)
        batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(20)]
        found: list[Tensor] = []
        for i, x in enumerate(batches):
            if not by_hand:
                found.append(step(x).loss.detach())
                continue
            loss = loss_of(view(x))
            (loss / 2).backward()
            found.append(loss.detach())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(torch.stack([*found, *(p.detach().sum() for p in model.parameters())]))
    assert torch.equal(*losses)


def test_a_weight_that_is_written_between_two_reads_is_cast_again() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.f(x)
        torch._dynamo.graph_break()
        self.f.weight.data.mul_(0.5)
        torch._dynamo.graph_break()
        return self.f(h)

    model, plain = model_of(forward), model_of(forward)
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = plain(X)
    assert torch.equal(view(X), expected.float())
    assert torch.equal(model.f.weight, plain.f.weight)
