"""An error in the words of the command: that of the user's input, of the code of the target, or of fxamp itself."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

from .usage import UsageError

A_LOSS = (
    "let TARGET return (fxamp.TrainStep(model, loss_fn, optimizer), (inputs, target)), or a model whose output is a "
    "loss, or has one as .loss or in a tuple; or give --loss"
)
PICK = "write `def loss(output): return {}` and give --loss, such as --loss net.py:loss"
_ERRORS = "passes.contract.errors"
logger = logging.getLogger(__name__)


def told(error: BaseException) -> str:
    """Return what to say of an error in one line."""
    if isinstance(error, UsageError):
        return str(error)
    if _ERRORS in sys.modules:  # else nothing has raised one of them
        from passes.contract.errors import FxampError

        from ..errors import NoLossError

        if isinstance(error, NoLossError):
            return f"{error.there}; {PICK.format(error.scalar) if error.scalar else A_LOSS}"
        if isinstance(error, FxampError):
            return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    logger.debug("unexpected", exc_info=True)
    return _unexpected(error)


def _unexpected(error: BaseException) -> str:
    """Return what to say of an error that no message is made for: code of the target has raised it, or ours has.

    It is the code that is furthest in, leaving torch and the standard library aside.
    """
    import torch

    import passes

    compiler, library, python = (os.path.join(os.path.dirname(str(m.__file__)), "") for m in (passes, torch, os))
    trace = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    code = [
        (file, line) for file, line in trace
        if not file.startswith(("<", library)) and (not file.startswith(python) or "site-packages" in file)
    ]  # fmt: skip
    file, line = (code or trace)[-1]
    what = f"{type(error).__name__} at {os.path.basename(file)}:{line}: {error}"
    if code and not file.startswith((os.path.join(Path(__file__).parents[1], ""), compiler)):
        return f"the code of the target raised {what}"
    return f"unexpected {what}; please report it"
