"""What a converted module of fxamp 0.1 says when its pickle is loaded."""

from __future__ import annotations

import pickle

import pytest

import fxamp


def test_a_pickle_of_a_converted_module_of_0_1_says_what_to_do() -> None:
    old = b"cfxamp.module.module\n_load\n(tR."  # a call of the function by which 0.1 rebuilt a module
    with pytest.raises(fxamp.CaptureError, match="load the state_dict of its model"):
        pickle.loads(old)
