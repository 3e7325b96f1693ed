"""Each test of a diagnostic begins with nothing compiled, and with the same random numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what Dynamo compiled, seed, and keep what is only a warning off the log."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    logging.getLogger("fxamp").setLevel(logging.ERROR)
    yield
    logging.getLogger("fxamp").setLevel(logging.NOTSET)
