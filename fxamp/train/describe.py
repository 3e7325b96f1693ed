"""A TrainStep as a reader wants it: where its weights are cast, what it waits for, what became of its steps."""

from __future__ import annotations

from .step import TrainStep

_SHOWN = 5  # weights and events named one by one


def describe(step: TrainStep) -> tuple[tuple[str, str], ...]:
    """Return what there is to say of a step, as names and texts. The history of its scaler is read from the device."""
    weights, scaler = step.weights, step.scaler
    casts = "at every use"
    if weights.mode == "per_step":
        casts = f"{len(weights.kept)} weights are cast once a window, instead of up to {weights.times} times"
    named = list(weights.per_use.items())
    rows = [
        ("window", f"{step.accumulate_steps} micro-batches, {step.windows} windows finished"),
        ("weights", f"{weights.mode}: {casts}"),
        *((f"per use: {path}", reason) for path, reason in named[:_SHOWN]),
        *[("per use", f"{len(named) - _SHOWN} more, which step.weights.per_use names")] * (len(named) > _SHOWN),
        ("waits for the device", "; ".join(f"once a window, since {why}" for why in step.waits) or "never"),
        ("loss scaling", f"{scaler.kind}, scale {scaler.get_scale():g}" if scaler.is_enabled() else scaler.kind),
    ]
    if step.on_overflow == "skip_microbatch":
        rows.append(("on overflow", "skip_microbatch, which keeps one more set of gradients"))
    skipped = [event for event in scaler.history if event.skipped]
    if scaler.history:
        rows.append(("steps skipped", f"{len(skipped)} of the last {len(scaler.history)}"))
    rows += [
        (f"skipped at update {event.update}", f"scale {event.scale:g}, {event.culprit or 'decided on the device'}")
        for event in skipped[-_SHOWN:]
    ]
    return tuple(rows)
