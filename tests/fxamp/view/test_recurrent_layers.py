"""Views capture recurrent layers, which Dynamo leaves to Python unless it is told otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import BF16, FRESH, assert_as_autocast, assert_eager, casts, decided

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


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.states = nn.Linear(6, 6), nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True)
        padded: Tensor = nn.utils.rnn.pad_packed_sequence(self.states(packed)[0], batch_first=True)[0]
        return padded


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # before torch 2.13
def test_padded_sequences_of_several_lengths_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    model, args = _Packed(), (torch.randn(3, 9, 6, requires_grad=True), torch.tensor([9, 7, 3]))
    exact, rounded = (fxamp.convert(model, policy=policy) for policy in ("O0", "O1,dtype=bf16"))
    assert_eager(exact, model, args)
    assert_as_autocast(rounded, model, args, BF16)
