"""What a step did about the range of FP16: whether its loss was scaled, its gradients unscaled, and its step taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .differences import Difference
from .rows import Row
from .step import Step


@dataclass(frozen=True)
class Scaling:
    """The facts of loss scaling in one step.

    Attributes:
        low_gradients: Gradients were computed in FP16, so small ones become zero without a loss scale.
        scaler: "enabled", "disabled", or "" where none was seen.
        scaled: A gradient scaler has scaled the loss.
        unscaled: How often gradients were unscaled.
        skipped: The optimizer did not step, since gradients were not finite.
    """

    low_gradients: bool
    scaler: str
    scaled: bool
    unscaled: int
    skipped: bool

    def __str__(self) -> str:
        if not self.low_gradients:
            return "not needed: no gradient was computed in FP16"
        loss = "the loss was scaled" if self.scaled else "the loss was NOT scaled"
        scaler = f"the scaler is {self.scaler}" if self.scaler else "no scaler was seen"
        after = ", the step was skipped: gradients were not finite" if self.skipped else ""
        return f"gradients in FP16; {scaler}; {loss}; gradients were unscaled {self.unscaled} times{after}"


def scaling_of(step: Step, rows: Iterable[Row]) -> Scaling:
    """Return the facts of loss scaling of a step."""
    low = any(row.phase == "backward" and "float16" in row.operands for row in rows)
    scaler = "" if step.scaler is None else "enabled" if step.scaler.is_enabled() else "disabled"
    return Scaling(low, scaler, step.watch.scaled and scaler != "disabled", step.watch.unscaled, step.skipped)


def scaling_differences(scaling: Scaling, step: Step) -> list[Difference]:
    """Return what of the scaling of a TrainStep is wrong; of a model alone the loop is not known."""
    if step.scaler is None:
        return []
    found = []
    if scaling.low_gradients and not scaling.scaled:
        why = "gradients below 6e-8 become zero; give the TrainStep a LossScaler that is enabled"
        found.append(Difference("scaling", "loss", "scaled", f"unscaled, with a scaler that is {scaling.scaler}", why))
    if scaling.skipped:
        found.append(Difference("scaling", "optimizer", "a step", "", "it was skipped: gradients were not finite"))
    if step.ended and scaling.scaled and not scaling.skipped and not scaling.unscaled:
        found.append(Difference("scaling", "gradients", "unscaled once", "scaled gradients into the optimizer"))
    return found
