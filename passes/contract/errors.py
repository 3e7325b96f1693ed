"""Every error that fxamp raises on purpose, under one base class; and how the error of another is told."""

from __future__ import annotations


class FxampError(Exception):
    """The base class of every error that fxamp raises on purpose.

    Example:
        >>> try:
        ...     fxamp.convert(model, (x,), policy="O5")
        ... except fxamp.FxampError as error:
        ...     print(error)
        unknown level 'O5'; legal: O0, O1, O2, O3...
    """


class CaptureError(FxampError, RuntimeError):
    """The model cannot be captured faithfully, or is called in a way that its capture does not cover.

    The error is also a RuntimeError.

    Example:
        >>> fxamp.plan_of(nn.Linear(8, 4))
        Traceback (most recent call last):
            ...
        passes.contract.errors.CaptureError: ...
    """


class NotFaithfulError(CaptureError):
    """The captured graphs do not compute what the model computes, and what `torch.compile` captures does."""


class NotAModuleError(CaptureError, TypeError):
    """An argument that must be a module is something else. The error is also a CaptureError and a TypeError.

    Example:
        >>> fxamp.compile("model")
        Traceback (most recent call last):
            ...
        passes.contract.errors.NotAModuleError: fxamp converts a torch.nn.Module, a GraphModule or ... not str.
    """


class PolicyError(FxampError, ValueError):
    """The policy asks for something unknown, contradictory, or missing on this device. The error is also a ValueError.

    Example:
        >>> fxamp.Policy("O1", dtype="fp8")
        Traceback (most recent call last):
            ...
        passes.contract.errors.PolicyError: dtype 'fp8' is not a low dtype; legal: fp16, bf16 ...
    """


class NoLossError(PolicyError):
    """A step has no loss, and no function was given that makes one of its output.

    Attributes:
        found: says what there is in its place.
    """

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}: give loss= (loss_fn of a TrainStep), a function of the output, or of output and target, that "
            "returns a tensor of one element."
        )
        self.found = found


class PlanError(FxampError, ValueError):
    """A plan does not fit the graph, or cannot be read. The error is also a ValueError.

    Example:
        >>> fxamp.Plan.from_json("{}")
        Traceback (most recent call last):
            ...
        passes.contract.errors.PlanError: plan: JSON, but not a plan (no "version"); ...
    """


class VerificationError(FxampError):
    """A rewritten graph does not do what its plan says, which is a defect of fxamp or of a rule that was registered.

    Example:
        >>> issubclass(fxamp.VerificationError, fxamp.FxampError)
        True
    """


class ScaleCollapseError(FxampError, FloatingPointError):
    """Too many optimizer steps in a row were skipped because gradients were not finite.

    The error is also a FloatingPointError. The loss scaler is in a consistent state when the error is raised.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> sgd, scaler = torch.optim.SGD([("weight", weight)], lr=0.1), fxamp.LossScaler(max_skips=1)
        >>> scaler.scale(weight.sum() * float("inf")).backward()
        >>> scaler.step(sgd)
        >>> scaler.update()
        Traceback (most recent call last):
            ...
        passes.contract.errors.ScaleCollapseError: 1 steps in a row were skipped, because gradients were not finite...
    """


class MeasureError(FxampError):
    """What Inductor makes of a step cannot be counted: something for it is missing here, or the step does not fit it.

    The message says what is missing, and how to get it.
    """


def in_short(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
