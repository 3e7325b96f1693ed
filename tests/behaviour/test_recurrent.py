"""Recurrent layers: a carried state keeps its dtype and value, and a conversion does not grow with the time steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from tests.support.exported import program_of
from tests.support.fakes import counted_fakes
from tests.support.front_ends import (
    F32,
    FP16,
    FRESH,
    assert_as_autocast,
    assert_eager,
    assert_trains_as_autocast,
    convert,
    equal,
    tensors,
)
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
def test_gradients_of_an_input_of_both_directions_are_autocasts(both: bool, wide: bool) -> None:
    """Autocast casts an FP32 input for each direction, and sums its gradients in FP32."""
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
    assert all(map(torch.equal, *found))
    assert not fxamp.plan_of(view).deviations


# Ways to convert a layer for an example, each as a function that does it, and the numbers of frames to compare.
DOORS: dict[str, tuple[Callable[[nn.Module, Tensor], Callable[[], Any]], int, int]] = {
    "view": (lambda m, x: partial(fxamp.convert, m, (x,), policy="O1,dtype=bf16", check=False), 50, 1000),
    "plan": (lambda m, x: partial(fxamp.plan, m, (x,), policy="O2,dtype=bf16"), 50, 1000),
    "plan for CUDA": (lambda m, x: partial(fxamp.plan, m, (x,), policy="O1,dtype=bf16,device=cuda"), 50, 1000),
    "traced": (lambda m, x: partial(fxamp.convert, symbolic_trace(nn.Sequential(m)), (x,), policy="O1"), 50, 1000),
    # torch.export itself runs all steps.
    "exported": (lambda m, x: partial(fxamp.convert, program_of(m, (x,)), policy="O1"), 5, 20),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # which an export makes
@pytest.mark.parametrize("two_ways", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("door", ["view", *(pytest.param(d, marks=pytest.mark.slow) for d in DOORS if d != "view")])
def test_a_conversion_for_many_frames_runs_no_more_on_fakes_than_for_few(door: str, kind: Any, two_ways: bool) -> None:
    layer, (conversion, *frames) = kind(8, 16, batch_first=True, bidirectional=two_ways), DOORS[door]
    counts = []
    for steps in frames * 2:  # what is found out of a size the first time is remembered
        torch._dynamo.reset()
        convert = conversion(layer, torch.randn(3, steps, 8))
        with counted_fakes() as count:
            convert()
        counts.append(count())
    assert counts[2] == counts[3] > 0


@pytest.mark.slow
@pytest.mark.parametrize("two_ways", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_conversion_for_a_thousand_frames_takes_the_time_of_one_for_fifty(kind: Any, two_ways: bool) -> None:
    layer, times = kind(8, 16, batch_first=True, bidirectional=two_ways), dict[int, list[float]]()
    for steps in (2, *(50, 1000) * 5):  # the first loads what the others need
        torch._dynamo.reset()
        began = time.process_time()
        DOORS["view"][0](layer, torch.randn(3, steps, 8))()
        times.setdefault(steps, []).append(time.process_time() - began)
    assert min(times[1000]) <= 1.3 * min(times[50])


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RNN": (nn.RNN, {"batch_first": True}),
    "RNN, relu, two layers, two ways": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True}),
    "GRU": (nn.GRU, {}),
    "GRU, batch first, two ways": (nn.GRU, {"batch_first": True, "bidirectional": True}),
    "GRU, three layers, dropout": (nn.GRU, {"num_layers": 3, "dropout": 0.5, "bias": False}),
    "LSTM, two layers, dropout": (nn.LSTM, {"num_layers": 2, "dropout": 0.5, "batch_first": True}),
    "LSTM, projections, two ways": (nn.LSTM, {"proj_size": 4, "bidirectional": True}),
}


class Framed(nn.Module):
    """A recurrent layer between two linear ones, whose last state is an output too."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        width = (options.get("proj_size") or 5) * (2 if options.get("bidirectional") else 1)
        self.first, self.cells, self.last = nn.Linear(6, 6), kind(6, 5, **options), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        y, state = self.cells(self.first(x))
        return self.last(y), state


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_of_many_frames_has_the_bits_of_eager_at_o0_and_of_autocast_at_o1(name: str) -> None:
    kind, options = OPTIONS[name]
    torch.manual_seed(0)
    model, x = Framed(kind, **options), torch.randn(20, 20, 6)
    exact, rounded = (fxamp.convert(model, (x,), policy=policy) for policy in ("O0", "O1,dtype=bf16"))
    assert_eager(exact, model, (x,))
    if kind is nn.LSTM and not options.get("proj_size") and not autocast_runs_lstms():
        assert_as_autocast(rounded, model, (x,))
    else:
        assert_trains_as_autocast(rounded, model, x)


def test_a_layer_in_fp16_has_the_bits_of_autocast() -> None:
    torch.manual_seed(0)
    model, x = Framed(nn.GRU), torch.randn(4, 2, 6)
    view = fxamp.convert(model, (x,), policy="O1,dtype=fp16")
    with torch.no_grad(), torch.autocast("cpu", FP16):
        expected = model(x)
    with torch.no_grad():
        assert equal(view(x), expected)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_one_capture_with_dynamic_sizes_serves_sequences_of_any_length(kind: Any) -> None:
    torch.manual_seed(0)
    model = Framed(kind).eval()
    with torch.no_grad():
        view = fxamp.convert(model, (torch.randn(9, 4, 6),), policy="O1,dtype=bf16", dynamic=True)
    for steps in (9, 5, 30):
        assert_as_autocast(view, model, (torch.randn(steps, 4, 6),))
    assert len(fxamp.graphs(view)) == 1
