"""O1 rounds what `torch.autocast` rounds: forward bit for bit, gradients as near to the truth, never more casts.

Each check is run here on some models in BF16, and in `test_matrix.py` on all of them in both dtypes.
"""

from __future__ import annotations

import pytest
import torch

from fxamp.observe.workload import floats
from passes.contract.reasons import DEVIATIONS
from tests.support.baseline import UnderAutocast, distance
from tests.support.helpers import in_turns
from tests.support.subjects import converted, oracle, run, set_mode, subject, training_counts, unchanged
from tests.support.trial.first import Calls, first_difference
from tests.support.zoo import NO_FP16_ON_CPU, SOME

# FP16 gradients are counted here, not trained on.
pytestmark = pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def first_deviation(name: str, low: str) -> tuple[str, str]:
    """Return the code and the key of the first node whose value differs from what autocast gives the captured graph."""
    found = subject(name)
    calls = Calls(lambda: torch.autocast("cpu", dtype=DTYPES[low]))
    with torch.no_grad():
        return first_difference(calls.of_view(found.model, found.args, found.kwargs, f"O1,dtype={low}"))


def needs_kernels(name: str, low: str, *, gradients: bool = False) -> None:
    """Skip what autocast itself cannot run on this CPU: oneDNN has low kernels for some layers on some CPUs only.

    Where autocast is to give gradients too, it needs other kernels.
    """
    if name not in NO_FP16_ON_CPU:
        return
    found = subject(name)
    try:
        with torch.set_grad_enabled(gradients):
            UnderAutocast(found.model, DTYPES[low])(*found.args, **found.kwargs)
    except RuntimeError as e:
        pytest.skip(f"torch.autocast raises too: {e}")


def check_forward(name: str, low: str) -> None:
    found, module = subject(name), converted(name, f"O1,dtype={low}")
    set_mode(found, module, False)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=DTYPES[low]):
            expected = floats(found.model(*found.args, **found.kwargs))
        got = floats(module(*found.args, **found.kwargs))
    assert len(expected) == len(got) > 0
    if all(torch.equal(a.float(), b.float()) for a, b in zip(expected, got, strict=True)):
        return
    code, where = first_deviation(name, low)
    assert code in DEVIATIONS, where


def check_gradients(name: str, low: str) -> None:
    found, module = subject(name), converted(name, f"O1,dtype={low}")
    set_mode(found, module, False)
    _, truth = oracle(found)
    got = run(module, found)[1]
    expected = run(UnderAutocast(found.model, DTYPES[low]), found)[1]
    assert distance(got, truth) <= 2 * distance(expected, truth)


def check_casts(name: str, level: str, low: str) -> None:
    found, module = subject(name), converted(name, f"{level},dtype={low}")
    expected, got = training_counts(name, f"{level},dtype={low}")
    with unchanged(found.model), torch.no_grad():
        outputs = len(floats(module(*found.args, **found.kwargs)))
    assert 0 < got.casts <= expected.casts + max(0, outputs - 1)


@pytest.mark.parametrize("name", SOME)
def test_o1_forward_in_eval_is_autocast_bit_for_bit_or_says_why(name: str) -> None:
    needs_kernels(name, "bf16")
    check_forward(name, "bf16")


@pytest.mark.parametrize("name", SOME)
def test_o1_gradients_are_within_twice_autocasts_distance_from_float64(name: str) -> None:
    needs_kernels(name, "bf16")
    check_gradients(name, "bf16")


@pytest.mark.parametrize(("name", "level"), in_turns(SOME[:3], ["O1", "O2"]))
def test_a_training_step_never_casts_more_than_autocast(name: str, level: str) -> None:
    needs_kernels(name, "bf16")
    check_casts(name, level, "bf16")
