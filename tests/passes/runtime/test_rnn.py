"""The recurrent functions against the modules that they stand for, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fxamp
from passes.runtime import rnn
from tests.support.exported import graph_of, plan_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN", "ignore:The tensor attributes self.rnn._flat_weights"
)

FEATURES, HIDDEN, LAYERS, BATCH = 5, 6, 2, 3


def function_of(module: nn.LSTM | nn.RNN, x: Any, hx: Any = None) -> Any:
    weights = [getattr(module, name) for names in module._all_weights for name in names]
    config = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional, module.batch_first)
    if isinstance(module, nn.LSTM):
        return rnn.lstm(x, hx, weights, *config, module.proj_size)
    return rnn.rnn(x, hx, weights, *config, module.nonlinearity)


def made(kind: str, **config: Any) -> nn.LSTM | nn.RNN:
    torch.manual_seed(0)
    if kind.startswith("lstm"):
        return nn.LSTM(FEATURES, HIDDEN, LAYERS, proj_size=4 if kind == "lstm_proj" else 0, **config)
    return nn.RNN(FEATURES, HIDDEN, LAYERS, nonlinearity=kind.removeprefix("rnn_"), **config)


def an_input(form: str) -> Any:
    torch.manual_seed(1)
    if form == "packed":
        return pack_sequence([torch.randn(n, FEATURES) for n in (4, 2, 1)])
    if form == "packed_unsorted":
        return pack_sequence([torch.randn(n, FEATURES) for n in (2, 4, 1)], enforce_sorted=False)
    # As many steps as sequences, so that one input serves batch_first and its opposite.
    return torch.randn(BATCH, BATCH, FEATURES) if form == "batched" else torch.randn(4, FEATURES)


def a_state(module: nn.LSTM | nn.RNN, form: str) -> Any:
    torch.manual_seed(2)
    count = LAYERS * (2 if module.bidirectional else 1)
    batch = () if form == "unbatched" else (BATCH,)
    h = torch.randn(count, *batch, module.proj_size or HIDDEN)
    return (h, torch.randn(count, *batch, HIDDEN)) if isinstance(module, nn.LSTM) else h


def leaves(value: Any) -> list[Any]:
    return [x for v in value for x in leaves(v)] if isinstance(value, (tuple, list)) else [value]


def assert_same(ours: Any, theirs: Any) -> None:
    assert isinstance(ours[0], PackedSequence) == isinstance(theirs[0], PackedSequence)
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert (a is None and b is None) or (a.shape == b.shape and torch.equal(a, b))


KINDS = ("lstm", "lstm_proj", "rnn_tanh", "rnn_relu")
FORMS = ("batched", "unbatched", "packed", "packed_unsorted")
CONFIGS = [
    dict(zip(("bidirectional", "batch_first", "bias"), v, strict=True))
    for v in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(k for k, on in c.items() if on) or "plain")
def test_it_gives_what_the_module_gives(kind: str, form: str, config: dict[str, bool]) -> None:
    module, x = made(kind, **config).eval(), an_input(form)
    assert_same(function_of(module, x), module(x))
    hx = a_state(module, form)
    assert_same(function_of(module, x, hx), module(x, hx))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_dropout_and_gradients(kind: str, form: str) -> None:
    module, x = made(kind, dropout=0.5, bidirectional=True).train(), an_input(form)
    found = []
    for run in (nn.Module.__call__, function_of):
        torch.manual_seed(3)
        out = run(module, x)
        floats = [v for v in leaves(out) if isinstance(v, Tensor) and v.is_floating_point()]
        torch.stack([v.sum() for v in floats]).sum().backward()
        found.append((out, [p.grad for p in module.parameters()], torch.get_rng_state()))
        module.zero_grad()
    (theirs, their_grads, their_rng), (ours, our_grads, our_rng) = found
    assert_same(ours, theirs)
    assert_same(our_grads, their_grads)
    assert torch.equal(our_rng, their_rng)
    assert not torch.equal(leaves(function_of(module, x))[0], leaves(module.eval()(x))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_batch_is_rejected_as_the_module_rejects_it(kind: str) -> None:
    module, x = made(kind), an_input("batched")
    hx = a_state(module, "batched")
    short = tuple(s[:, :1] for s in hx) if isinstance(hx, tuple) else hx[:, :1]
    with pytest.raises(RuntimeError, match="Expected hidden"):
        module(x, short)
    with pytest.raises(RuntimeError, match=r"initial state .* must have shape \(2, 3, "):
        function_of(module, x, short)


def test_an_input_of_four_dimensions_is_rejected() -> None:
    with pytest.raises(ValueError, match="2 or 3 dimensions, not 4"):
        function_of(made("lstm"), torch.randn(2, 3, 4, FEATURES))


class Recurrent(nn.Module):
    """An LSTM and a linear layer behind it."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(FEATURES, HIDDEN, LAYERS, batch_first=True, **config)
        self.last = nn.Linear((config.get("proj_size") or HIDDEN) * (2 if config.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0])


RECURRENT: list[dict[str, bool]] = [{}, {"bidirectional": True}, {"bias": False}]


EVERY_CONFIG = pytest.mark.parametrize(
    "config", [RECURRENT[0], *(pytest.param(c, marks=pytest.mark.matrix) for c in RECURRENT[1:])], ids=str
)


@EVERY_CONFIG
def test_an_lstm_with_projections_is_kept_whole_on_a_cpu(config: dict[str, bool]) -> None:
    model, x = Recurrent(proj_size=4, **config).eval(), torch.randn(2, 3, FEATURES)
    module = graph_of(model, x)
    plan = fxamp.plan_of(module)
    decided = {d.op: d for d in plan.decisions}
    assert decided["lstm"] in plan.deviations
    assert (decided["lstm"].colour, decided["lstm"].code) == ("float32", "composite")
    assert "composite kept whole: lstm" in plan.notes
    with torch.no_grad():
        got, whole = module(x), model.rnn(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(got, model.last(whole).float())


@EVERY_CONFIG
def test_an_lstm_without_projections_runs_low(config: dict[str, bool]) -> None:
    plan = plan_of(Recurrent(**config).eval(), torch.randn(2, 3, FEATURES))
    assert {d.op: d.colour for d in plan.decisions if d.op in ("lstm", "linear")} == dict.fromkeys(
        ["lstm", "linear"], "bfloat16"
    )


def test_an_lstm_with_projections_runs_low_on_cuda() -> None:
    plan = plan_of(Recurrent(proj_size=4), torch.randn(2, 3, FEATURES), policy="O1,device=cuda,dtype=fp16")
    assert {d.op: d.colour for d in plan.decisions if d.op in ("lstm", "linear")} == dict.fromkeys(
        ["lstm", "linear"], "float16"
    )
