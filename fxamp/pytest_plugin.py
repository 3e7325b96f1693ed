"""The pytest plugin of fxamp: a precision plan beside each test that asks for one.

    def test_net(precision_plan):
        precision_plan.check(Net(), (torch.randn(3, 16),))    # compared with test_module/test_net.plan.json
        precision_plan.run(Net(), torch.randn(3, 16))         # one step of it runs as planned

pytest imports this file in every run of an environment that has fxamp. So the file imports neither torch nor the
compiler until a test uses the fixture; and if another package named `passes` hides ours, only tests with the fixture
fail.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .report.gate.precision_plan import PrecisionPlan


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes plans."""
    parser.getgroup("fxamp").addoption(
        "--update-precision-plans", action="store_true",
        help="write precision plans that are missing or have changed; their tests fail in this run",
    )  # fmt: skip


@pytest.fixture
def precision_plan(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> PrecisionPlan:
    """Compare models with the precision plans committed beside the test."""
    from .report.gate.precision_plan import PrecisionPlan

    # torch writes hundreds of empty records of each capture, for TORCH_TRACE; pytest 9 would print them all.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", "TORCH_TRACE" not in os.environ)
    return PrecisionPlan(request, tmp_path_factory)
