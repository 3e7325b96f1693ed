"""With every colour FP32 a converted model is the original, bit for bit: outputs, gradients, buffers, RNG, keys.

Each check is run here on some models, and in `test_matrix.py` on all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

import fxamp
from fxamp.observe.workload import floats
from tests.support.baseline import distance
from tests.support.front_ends import FRONT_ENDS
from tests.support.subjects import Subject, converted, run, set_mode, subject
from tests.support.trial.judge import exported
from tests.support.zoo import BY_NAME, SOME

# The models in which torch.export itself reorders a gradient sum.
REORDERED = frozenset({"hf_llama"})
# What is captured with sizes that change; the others are in the matrix.
RESIZED = ("lenet5",)


def converted_by(front_end: str, name: str, policy: str, training: bool) -> tuple[Subject, Any]:
    """Return a model of the zoo in a mode, and a view of it or its converted graph, which has only that mode."""
    found = subject(name)
    if front_end == "view":
        module = converted(name, policy)
        set_mode(found, module, training)
        return found, module
    set_mode(found, found.model, training)
    return found, fxamp.convert(_program(name, training), policy=policy)


@functools.cache
def _program(name: str, training: bool) -> ExportedProgram:
    return exported(subject(name))


def check(name: str, training: bool, front_end: str) -> None:
    found, module = converted_by(front_end, name, "O0", training)
    expected, got = run(found.model, found), run(module, found)
    assert len(expected[0]) == len(got[0]) > 0
    for a, b in zip(expected[0], got[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert expected[1].keys() == got[1].keys()
    if front_end == "graph" and name in REORDERED:
        assert distance(got[1], expected[1]) <= 1e-6
    else:
        for key, gradient in expected[1].items():
            assert torch.equal(gradient, got[1][key]), key
    for key, buffer in expected[2].items():
        assert torch.equal(buffer, got[2][key]), key
    assert torch.equal(expected[3], got[3])
    if front_end == "view":
        assert list(found.model.state_dict()) == list(module.state_dict())


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SOME)
def test_o0_is_the_original_bit_for_bit(name: str, training: bool, front_end: str) -> None:
    check(name, training, front_end)


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
    assert fxamp.plan_of(converted(name, "O0")).casts == 0
