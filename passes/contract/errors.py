"""The errors that the compiler raises on purpose, under one base class; it is that of the product's errors too.

They are shown as users write them, `fxamp.PolicyError`, wherever the class lies, and so are other public classes.
"""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)


def public(cls: C) -> C:
    """Say that a class is found in `fxamp`; a decorator around all others, which may look names up in its module."""
    cls.__module__ = "fxamp"
    return cls


@public
class FxampError(Exception):
    """The base class of every error that fxamp raises on purpose.

    Example:
        >>> try:
        ...     fxamp.convert(model, (x,), policy="O5")
        ... except fxamp.FxampError as error:
        ...     print(error)
        unknown level 'O5'; legal: O0, O1, O2, O3...
    """


@public
class CaptureError(FxampError, RuntimeError):
    """The model cannot be captured faithfully, or is called in a way that its capture does not cover.

    The error is also a RuntimeError.

    Example:
        >>> fxamp.plan_of(nn.Linear(8, 4))
        Traceback (most recent call last):
            ...
        fxamp.CaptureError: ...
    """


@public
class PolicyError(FxampError, ValueError):
    """The policy asks for something unknown, contradictory, or missing on this device. The error is also a ValueError.

    Example:
        >>> fxamp.Policy("O1", dtype="fp8")
        Traceback (most recent call last):
            ...
        fxamp.PolicyError: dtype 'fp8' is not a low dtype; legal: fp16, bf16 ...
    """


@public
class PlanError(FxampError, ValueError):
    """A plan does not fit the graph, or cannot be read. The error is also a ValueError.

    Example:
        >>> fxamp.Plan.from_json("{}")
        Traceback (most recent call last):
            ...
        fxamp.PlanError: plan: JSON, but not a plan (no "version"); ...
    """


@public
class VerificationError(FxampError):
    """A rewritten graph does not do what its plan says, which is a defect of fxamp or of a rule that was registered.

    Example:
        >>> issubclass(fxamp.VerificationError, fxamp.FxampError)
        True
    """
