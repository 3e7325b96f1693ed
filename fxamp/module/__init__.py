"""The converted module: how its code is written and called, what it compares at each call, how it is copied and saved.

Imports capture's description of the user's model, and the contract. Everything that handles a converted module uses it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .moved import found

if not TYPE_CHECKING:  # modules saved by older versions name the former file `fxamp/module.py`
    __getattr__ = functools.partial(found, __name__)
