"""The compiler is given one graph of a model. How those of both training modes are merged, `fxamp/capture` tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxamp.capture import states
from fxamp.capture.model.captured import Captures


@pytest.fixture(scope="module")
def one_mode() -> Iterator[None]:
    """Capture a model in the training mode that it is in, and in no other, which takes half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_all_states", lambda model, run: Captures((run(),)))
        yield
