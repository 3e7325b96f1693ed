"""A state that the caller carries from call to call keeps its dtype and its value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from tests.support.front_ends import F32, FRESH, convert, tensors
from tests.support.helpers import autocast_runs_lstms

pytestmark = FRESH


class Recurrent(nn.Module):
    """A recurrent layer or cell over a sequence, packed or not, with a state that the caller carries over."""

    def __init__(self, kind: Any, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.cells, self.packed = kind(6, 5, **options), packed
        self.out = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        given: Any = None if not state else state[0] if len(state) == 1 else state
        if isinstance(self.cells, (nn.LSTMCell, nn.GRUCell)):
            for step in x.unbind(0):
                given = self.cells(step, given)
            return self.out(given[0] if isinstance(given, tuple) else given), given
        if self.packed:
            y, given = self.cells(pack_padded_sequence(x, torch.tensor([2, 2, 1])), given)
            return self.out(pad_packed_sequence(y)[0]), given
        y, given = self.cells(x, given)
        return self.out(y), given


RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "LSTM, two ways": (partial(Recurrent, nn.LSTM, bidirectional=True), (2, 3, 5), "view"),
    "LSTM, packed": (partial(Recurrent, nn.LSTM, packed=True), (1, 3, 5), "view"),  # of which Dynamo captures nothing
    "GRU": (partial(Recurrent, nn.GRU), (1, 3, 5), "graph"),
    "LSTMCell": (partial(Recurrent, nn.LSTMCell), (3, 5), "view"),
    "GRUCell": (partial(Recurrent, nn.GRUCell), (3, 5), "view"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.matrix) if k in ("GRU", "GRUCell") else k for k in RECURRENT]
)
def test_a_carried_state_keeps_its_dtype(kind: str) -> None:
    build, size, front_end = RECURRENT[kind]
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(2, 3, 6)
    state = (torch.zeros(size),) * (2 if "LSTM" in kind else 1)
    module = convert(model, (x, *state), front_end)
    ours = eager = state
    with torch.no_grad():
        for _ in range(3):
            got, ours = module(x, *ours)
            expected, eager = model(x, *eager)
            ours, eager = tuple(tensors(ours)), tuple(tensors(eager))
            assert {t.dtype for t in (got, *ours)} == {F32}
            torch.testing.assert_close((got, *ours), (expected, *eager), rtol=0.03, atol=0.03)


class Tagger(nn.Module):
    def __init__(self, first: nn.Module, both: bool) -> None:
        super().__init__()
        self.first, self.out = first, nn.Linear(16 if both else 8, 4)
        self.cells = nn.LSTM(8, 8, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(self.first(x))[0])
        return out


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_gradients_of_an_input_of_both_directions_are_autocasts_or_named(both: bool, wide: bool) -> None:
    """Autocast casts an FP32 input for each direction, and sums its gradients in FP32; one cast sums them low."""
    if wide and not autocast_runs_lstms():
        pytest.skip("torch.autocast cannot train it on this CPU")
    torch.manual_seed(0)
    model = Tagger(nn.Embedding(20, 8) if wide else nn.Linear(8, 8), both)
    x = torch.randint(20, (6, 3)) if wide else torch.randn(6, 3, 8)
    view, found = fxamp.convert(model, (x,), policy="O1,dtype=bf16"), []
    for run in (view, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=run is model):
            output = run(x)
        output.float().square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    equal = all(map(torch.equal, *found))
    assert equal is not (both and wide)
    assert [d.code for d in fxamp.plan_of(view).deviations] == ([] if equal else ["sum_order"])
