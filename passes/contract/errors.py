"""The errors that the compiler raises on purpose, under one base class; it is that of the product's errors too."""

from __future__ import annotations

from .public import public


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
