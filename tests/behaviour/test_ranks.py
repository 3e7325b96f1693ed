"""Two gloo ranks in BF16, by the README's recipes: the losses of torch.compile under autocast, or the trainer's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import TOOLS, train

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]
NEEDS = {
    "Trainer": "accelerate", "Accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning",
}  # fmt: skip
OF_TRAINERS = {
    "Trainer's callback": "accelerate", "Accelerate's view": "accelerate", "Fabric's plugin": "lightning",
    "Lightning's plugin": "lightning",
}  # fmt: skip


@pytest.mark.parametrize("tool", ["by hand", *(pytest.param(t, marks=pytest.mark.matrix) for t in NEEDS)])
def test_two_ranks_have_the_losses_of_autocast(tool: str, tmp_path: Path) -> None:
    assert NEEDS.keys() | OF_TRAINERS.keys() | {"by hand"} == TOOLS.keys()
    pytest.importorskip(NEEDS.get(tool, "torch"))
    # A process in which a trainer has trained is not as it was.
    together = [(True, False)] if tool == "by hand" else [(True,), (False,)]
    ours, theirs = (losses for both in together for losses in train(tool, both, tmp_path))
    assert len(ours) == len(theirs) > 1
    assert ours[0] == theirs[0]
    # What a cast that several ops share gives back is summed in BF16, in another order.
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("tool", OF_TRAINERS)
def test_two_ranks_train_as_by_the_trainers_own_bf16_and_the_plan_ran_on_each(tool: str, tmp_path: Path) -> None:
    pytest.importorskip(OF_TRAINERS[tool])
    ours, theirs = (losses for converted in (True, False) for losses in train(tool, (converted,), tmp_path))
    assert len(ours) > 1
    assert ours == theirs
