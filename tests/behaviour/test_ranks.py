"""Two gloo ranks under BF16 autocast, by the README's recipes: the losses of plain torch.compile under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import TOOLS, train

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]
NEEDS = {
    "Trainer": "accelerate", "Accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning",
    "Fabric's plugin": "lightning", "Lightning's plugin": "lightning",
}  # fmt: skip


@pytest.mark.parametrize("tool", ["by hand", *(pytest.param(t, marks=pytest.mark.matrix) for t in NEEDS)])
def test_two_ranks_have_the_losses_of_autocast(tool: str, tmp_path: Path) -> None:
    assert NEEDS.keys() | {"by hand"} == TOOLS.keys()
    pytest.importorskip(NEEDS.get(tool, "torch"))
    # A process in which a trainer has trained is not as it was.
    together = [(True, False)] if tool == "by hand" else [(True,), (False,)]
    ours, theirs = (losses for both in together for losses in train(tool, both, tmp_path))
    assert len(ours) == len(theirs) > 1
    assert ours[0] == theirs[0]
    # What a cast that several ops share gives back is summed in BF16, in another order.
    assert ours == pytest.approx(theirs, rel=2e-3)
