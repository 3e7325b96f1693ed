"""Views capture recurrent layers, which Dynamo leaves to Python unless it is told otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import BF16, FRESH, assert_as_autocast, assert_eager, casts, decided
from tests.support.helpers import Layers, autocast_runs_lstms

pytestmark = FRESH


class _Tagger(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.states, self.tag = kind(6, 5, num_layers=2, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.states(x)
        return self.tag(states)


@pytest.mark.parametrize(("kind", "op"), [(nn.LSTM, "lstm"), (nn.GRU, "gru"), (nn.RNN, "rnn_tanh")])
def test_a_model_with_a_recurrent_layer_is_one_graph_and_has_the_bits_of_autocast(kind: Any, op: str) -> None:
    torch.manual_seed(0)
    model, x = _Tagger(kind).eval(), torch.randn(4, 2, 6)
    exact, rounded = (fxamp.convert(model, (x,), policy=policy) for policy in ("O0", "O1,dtype=bf16"))
    assert len(fxamp.graphs(rounded)) == 1
    assert len(decided(rounded, op)) == 1
    assert casts(rounded)
    assert_eager(exact, model, (x,))
    assert_as_autocast(rounded, model, (x,), BF16)
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # before torch 2.13
def test_padded_sequences_of_several_lengths_are_those_of_autocast() -> None:
    def packed(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.states(packed)[0], batch_first=True)[0]

    torch.manual_seed(0)
    model = Layers(packed, first=nn.Linear(6, 6), states=nn.LSTM(6, 5, batch_first=True))
    args = torch.randn(3, 9, 6, requires_grad=True), torch.tensor([9, 7, 3])
    exact, rounded = (fxamp.convert(model, policy=policy) for policy in ("O0", "O1,dtype=bf16"))
    assert_eager(exact, model, args)
    assert_as_autocast(rounded, model, args, BF16)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16"])
def test_an_lstm_that_reads_the_input_trains_by_every_backend(way: str, policy: str) -> None:
    """AOTAutograd fails at one whose input has no gradient; its graph then runs uncompiled."""
    if policy != "O0" and not autocast_runs_lstms():
        pytest.skip("oneDNN has no kernel that trains this layer on this CPU")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(6, 5), Unpacked(), nn.Linear(5, 3)), torch.randn(4, 2, 6)
    view = fxamp.convert(model, policy=policy, backend=way)
    outcome: list[list[Any]] = []
    for called, amp in ((model, policy != "O0"), (view, False)):
        model.zero_grad()
        with torch.autocast("cpu", BF16, enabled=amp):
            out = called(x)
        out.float().square().sum().backward()
        outcome.append([out.float(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *outcome))
    assert decided(view, "lstm") == (["bfloat16"] if policy != "O0" else ["float32"])


class Unpacked(nn.Module):
    """Takes the outputs of a recurrent layer, and not its last state."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0]
