"""The same compiler behind `torch.compile`, at the first call.

Imports the compiler, the user's model, and the checks; and, for torch's structured trace, the record of a report.
`convert` and the training step use it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..module.moved import found

if not TYPE_CHECKING:  # modules saved by older versions name the former file `fxamp/dynamo.py`
    __getattr__ = functools.partial(found, __name__)
