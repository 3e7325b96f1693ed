"""Where the host waits for the device at the end of a window: where Python chooses by what is known there alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .window.conditional import waits

if TYPE_CHECKING:
    from .step import TrainStep


def reasons_to_wait(step: TrainStep) -> tuple[str, ...]:
    """Return why a step waits for the device at the end of a window, once; nothing where it never does."""
    if not step.scaler.is_enabled() and step.max_grad_norm is None and step._kept is None:
        return ()
    in_graph = step.compiled is not None and step.windows > 1 and not step.compiled.update.eager
    deciding = [] if in_graph else [o for o in step.optimizers if waits(o)]
    reasons = [f"{type(o).__name__} steps or not as Python decides" for o in deciding]
    reasons += [f"{type(s).__name__} follows the steps that were taken" for s in step.schedulers]
    reasons += ["the average of the weights follows the steps that were taken"] * bool(step.averages)
    if step._kept is not None and step.ranks.replicas:
        reasons.append("ranks ask each other which gradients there are, before they exchange them")
    return tuple(dict.fromkeys(reasons))
