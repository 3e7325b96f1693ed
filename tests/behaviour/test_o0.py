"""With every colour FP32 a converted model is the original, bit for bit: outputs, gradients, buffers, RNG, keys.

Each check is run here on some models, and in `test_matrix.py` on all of them.
"""

from __future__ import annotations

import pytest
import torch

import fxamp
from fxamp.trust.distance import distance, floats
from reports.subjects import converted, run, set_mode, subject
from reports.zoo import BY_NAME, SOME, ZOO

# The models in which torch.export itself reorders a gradient sum.
REORDERED = frozenset({"hf_llama"})
# What is captured with sizes that change; the others are in the matrix.
RESIZED = ("lenet5",)
# Those that symbolic tracing captures.
FX = tuple(entry.name for entry in ZOO if entry.family == "own")


def check(name: str, training: bool, front_end: str) -> None:
    found, module = subject(name, front_end), converted(name, "O0", front_end)
    set_mode(found, module, training)
    expected, got = run(found.model, found), run(module, found)
    assert len(expected[0]) == len(got[0]) > 0
    for a, b in zip(expected[0], got[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert expected[1].keys() == got[1].keys()
    if name in REORDERED:
        assert distance(got[1], expected[1]) <= 1e-6
    else:
        for key, gradient in expected[1].items():
            assert torch.equal(gradient, got[1][key]), key
    for key, buffer in expected[2].items():
        assert torch.equal(buffer, got[2][key]), key
    assert torch.equal(expected[3], got[3])
    assert list(found.model.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SOME)
def test_o0_is_the_original_bit_for_bit(name: str, training: bool) -> None:
    check(name, training, "graph")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FX)
def test_o0_of_a_symbolic_trace_is_the_original_bit_for_bit(name: str, training: bool) -> None:
    check(name, training, "fx")


@pytest.mark.parametrize("name", [n if n in RESIZED else pytest.param(n, marks=pytest.mark.matrix) for n in BY_NAME])
def test_a_model_takes_batches_of_another_size_than_the_example(name: str) -> None:
    zoo = BY_NAME[name]
    model = zoo.build().eval()
    args, kwargs = zoo.inputs(3)
    module = fxamp.convert(model, args, kwargs, policy="O0")
    args, kwargs = zoo.inputs(5)
    with torch.no_grad():
        for got, expected in zip(floats(module(*args, **kwargs)), floats(model(*args, **kwargs)), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", SOME)
def test_o0_inserts_no_cast(name: str) -> None:
    assert converted(name, "O0").plan.casts == 0
