"""Public classes and errors are shown as users write them: `fxamp.PolicyError`, wherever the class lies."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)


def public(cls: C) -> C:
    """Say that a class is found in `fxamp`; a decorator around all others, which may look names up in its module."""
    cls.__module__ = "fxamp"
    return cls
