"""Every model of the zoo, in train and eval, by both front ends, at every level, in both low dtypes.

Run it with `python -m pytest -m matrix`.
"""

from __future__ import annotations

import pytest
import torch

import fxamp
from tests.behaviour import test_o0, test_o1
from tests.support.front_ends import FRONT_ENDS
from tests.support.subjects import run
from tests.support.zoo import BY_NAME

pytestmark = [
    pytest.mark.matrix,
    # FP16 gradients are looked at here, not trained on.
    pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale"),
]
every_capture = pytest.mark.parametrize(("name", "front_end"), [(n, f) for n in BY_NAME for f in FRONT_ENDS])
every_model = pytest.mark.parametrize("name", BY_NAME)
both_dtypes = pytest.mark.parametrize("low", test_o1.DTYPES)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@every_capture
@both_modes
def test_o0_is_the_original_bit_for_bit(name: str, front_end: str, training: bool) -> None:
    test_o0.check(name, training, front_end)
    assert fxamp.plan_of(test_o0.converted_by(front_end, name, "O0", training)[1]).casts == 0


@every_model
@both_dtypes
def test_o1_forward_in_eval_is_autocast_bit_for_bit_or_says_why(name: str, low: str) -> None:
    test_o1.needs_kernels(name, low)
    test_o1.check_forward(name, low)


@every_model
@both_dtypes
def test_o1_gradients_are_within_twice_autocasts_distance_from_float64(name: str, low: str) -> None:
    test_o1.needs_kernels(name, low, gradients=True)
    test_o1.check_gradients(name, low)


@every_model
@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O1", "fp16")])
def test_a_training_step_never_casts_more_than_autocast(name: str, level: str, low: str) -> None:
    test_o1.needs_kernels(name, low, gradients=True)
    test_o1.check_casts(name, level, low)


@every_capture
@both_modes
@both_dtypes
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_forward_and_backward_run_and_stay_finite(
    name: str, front_end: str, training: bool, low: str, level: str
) -> None:
    test_o1.needs_kernels(name, low)
    found, module = test_o0.converted_by(front_end, name, f"{level},dtype={low}", training)
    expected = run(found.model, found)
    outputs, gradients, buffers, _ = run(module, found)
    assert [o.dtype for o in outputs] == [o.dtype for o in expected[0]]
    assert all(torch.isfinite(o).all() for o in outputs)
    assert gradients.keys() == expected[1].keys()
    assert [key for key, g in gradients.items() if not torch.isfinite(g).all()] == []
    assert [key for key, b in buffers.items() if b.is_floating_point() and not torch.isfinite(b).all()] == []
