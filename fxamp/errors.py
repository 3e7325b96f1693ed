"""The errors of the product, beside those of the compiler; and how the error of another is told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from passes.contract.errors import CaptureError, FxampError, PolicyError, public
from passes.contract.policy import nearest

F = TypeVar("F", bound=Callable[..., Any])


class NotFaithfulError(CaptureError):
    """The captured graphs do not compute what the model computes, and what `torch.compile` captures does."""


@public
class NotAModuleError(CaptureError, TypeError):
    """An argument that must be a module is something else. The error is also a CaptureError and a TypeError.

    Example:
        >>> fxamp.compile("model")
        Traceback (most recent call last):
            ...
        fxamp.NotAModuleError: fxamp converts a torch.nn.Module, a GraphModule or ... not str.
    """


class NoLossError(PolicyError):
    """A step has no loss, and no function was given that makes one of its output.

    Attributes:
        there: says what there is in its place.
        scalar: code that reads a scalar off `output` which may be the loss; "" if there is none.
    """

    def __init__(self, there: str, scalar: str = "") -> None:
        example = f"such as loss=lambda output: {scalar}" if scalar else "that returns a tensor of one element"
        super().__init__(
            f"{there}: give loss= (loss_fn of a TrainStep), a function of the output, or of output and target, "
            f"{example}."
        )
        self.there, self.scalar = there, scalar


class NoKernelError(PolicyError):
    """A layer has no kernel for the low dtype on this machine, under autocast either."""


@public
class ScaleCollapseError(FxampError, FloatingPointError):
    """Too many optimizer steps in a row were skipped because gradients were not finite.

    The error is also a FloatingPointError. The loss scaler is in a consistent state when the error is raised.

    Attributes:
        overflow: Of a TrainStep the first overflow, as `fxamp.find_overflow` gives it, the same on all ranks; its
            `policy` runs in FP32 what overflowed, for `step.switch`. None where it cannot be told.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> sgd, scaler = torch.optim.SGD([("weight", weight)], lr=0.1), fxamp.LossScaler(max_skips=1)
        >>> scaler.scale(weight.sum() * float("inf")).backward()
        >>> scaler.step(sgd)
        >>> scaler.update()
        Traceback (most recent call last):
            ...
        fxamp.ScaleCollapseError: 1 steps in a row were skipped, because gradients were not finite...
    """

    overflow: Any = None


class MeasureError(FxampError):
    """What Inductor makes of a step cannot be counted: something for it is missing here, or the step does not fit it.

    The message says what is missing, and how to get it.
    """


def names_arguments(function: str, meant: Mapping[str, str]) -> Callable[[F], F]:
    """Let the TypeError for an argument that a function does not take say what to write.

    Args:
        function: what users call it.
        meant: what to write instead of arguments of other libraries; for others the nearest name is given.
    """

    def decorate(call: F) -> F:
        known = inspect.signature(call).parameters

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    instead = f": write {meant[name]}" if name in meant else nearest(name, known)
                    raise TypeError(f"{function}() has no argument {name!r}{instead}")
            return call(*args, **kwargs)

        return cast(F, checked)

    return decorate


def in_short(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
