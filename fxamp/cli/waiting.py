"""Show on a terminal what a long step is doing; nothing is written to a file or a pipe."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TextIO

from ..report.forms.harmless import visible

PATIENCE = 2.0  # seconds


@contextlib.contextmanager
def waiting(what: str, to: TextIO, patience: float = PATIENCE) -> Iterator[None]:
    """Show a line once the body has taken longer than `patience`, and remove it at the end.

    Args:
        what: the text, which says what is being done.
        to: standard error.
        patience: in seconds.
    """
    if not to.isatty():
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        to.write(visible(f"fxamp: {what} ..."))
        to.flush()

    timer = threading.Timer(patience, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            to.write("\r\x1b[K")
            to.flush()
