"""Every error that fxamp raises on purpose, under one base class."""

from __future__ import annotations


class FxampError(Exception):
    """The base of every error fxamp raises on purpose. Catch this one to catch them all."""


class CaptureError(FxampError, RuntimeError):
    """The model cannot be captured faithfully, or is called in a way its capture does not cover."""


class NotFaithfulError(CaptureError):
    """This front end would lose something of the model; `capture="jit"` keeps it."""


class RejectedError(CaptureError):
    """The model itself raises for the example inputs."""


class NotAModuleError(CaptureError, TypeError):
    """Something other than a module was given where a module is needed."""


class PolicyError(FxampError, ValueError):
    """The policy asks for something unknown, contradictory, or not to be had on this device."""


class PlanError(FxampError, ValueError):
    """A plan does not fit the graph, or cannot be read."""


class VerificationError(FxampError):
    """A rewritten graph does not do what its plan says. Such a graph is never emitted."""


class ScaleCollapseError(FxampError, FloatingPointError):
    """Too many optimizer steps in a row were skipped because gradients were not finite."""


# The way out of every refusal of a front end that captures ahead of time.
INSTEAD = "Use capture='jit' or fxamp.compile(model), which keep it, or change that construct"
