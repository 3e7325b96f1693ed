"""Watchers of the passes, as one that verifies what each has done; they are called before and after every pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from .casts.verify import verify
from .form import Ensures, Pass, Unit


class Watcher:
    """An object that is called before and after every pass over every graph; it may not change its arguments."""

    def before(self, step: Pass, unit: Unit) -> None:
        """Called before each pass."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Called after each pass, with how often each of its rewrites was made."""


class Verified(Watcher):
    """Verifies after each pass the properties that the pass ensures."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Raise VerificationError if a property does not hold."""
        if step.ensures is not Ensures.NOTHING_NEW:
            verify(unit.graph, unit.decided if step.ensures is Ensures.DTYPES else None)


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=(Verified(),))


def watchers() -> tuple[Watcher, ...]:
    """Return the present watchers; verification is always the first of them."""
    return _WATCHERS.get()


@contextlib.contextmanager
def watched(*more: Watcher) -> Iterator[None]:
    """Add these watchers for all passes that run inside this context, in this thread."""
    token = _WATCHERS.set((*_WATCHERS.get(), *more))
    try:
        yield
    finally:
        _WATCHERS.reset(token)
