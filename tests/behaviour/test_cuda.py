"""Under CUDA's op lists every node has the dtype that the real CUDA autocast kernels give it; no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from passes.contract.reasons import DEVIATIONS
from passes.ops.rules import FOLLOW, LOW, lookup
from reports.zoo import BY_NAME
from tests.support.cuda_oracle import compare
from tests.support.processes import in_another_process

SECONDS = 600.0  # for all models of the zoo
SOME = ("lenet5", "graph_conv", "gpt")
# What fake CUDA tensors cannot run without a device (the latter in a build for CUDA), and what the rule table says.
UNRUN = {"batch_norm": FOLLOW, "lstm": LOW}


def _check(names: Sequence[str]) -> None:
    found = in_another_process(compare, list(names), seconds=SECONDS)
    assert [model["name"] for model in found] == list(names)
    for model in found:
        assert set(model["unrun"]) <= set(UNRUN), model["name"]
        assert len(model["rows"]) >= 8
        for row in model["rows"]:
            _, _, expected, autocast, got, code = row
            assert autocast == expected, (model["name"], row)
            # The cut stores a value in another dtype where no reader sees the difference.
            assert got == expected or code in ("cut", *DEVIATIONS), (model["name"], row)


def test_every_node_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check(SOME)


@pytest.mark.matrix
def test_every_node_of_the_other_models_has_the_dtype_of_the_real_cuda_autocast_kernels() -> None:
    _check([name for name in BY_NAME if name not in SOME])


@pytest.mark.parametrize("name", UNRUN)
def test_what_cannot_run_here_is_in_the_rule_table(name: str) -> None:
    assert lookup(name, "cuda")[1] == UNRUN[name]
