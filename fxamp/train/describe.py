"""Facts about a TrainStep for reports: where its weights are cast, what it waits for, which steps were skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .compiled_step import CompiledStep
from .update import waits

if TYPE_CHECKING:
    from .step import TrainStep

_SHOWN = 5  # weights and events named one by one


def describe(step: TrainStep) -> tuple[tuple[str, str], ...]:
    """Return facts about a step as (name, text) pairs. The history of its scaler is read from the device."""
    weights, scaler = step.weights, step.scaler
    casts = "at every use"
    if weights.mode == "per_step":
        casts = f"{len(weights.kept)} weights are cast once a window, instead of up to {weights.times} times"
    named = list(weights.per_use.items())
    leaves = () if step.compiled is None else step.compiled.leaves
    rows = [
        ("window", f"{step.accumulate_steps} micro-batches, {step.windows} windows finished"),
        *((f"policy from window {window} on", policy) for window, policy in step.switches),
        ("weights", f"{len(leaves)} are read in 16 bits as leaves" if leaves else f"{weights.mode}: {casts}"),
        *((f"per use: {path}", reason) for path, reason in named[:_SHOWN]),
        *[("per use", f"{len(named) - _SHOWN} more, listed in step.weights.per_use")] * (len(named) > _SHOWN),
        *compiled_rows(step.compiled),
        ("waits for the device", "; ".join(f"once a window, since {why}" for why in reasons_to_wait(step)) or "never"),
        ("loss scaling", f"{scaler.kind}, scale {scaler.get_scale():g}" if scaler.is_enabled() else scaler.kind),
    ]
    if step.ranks.replicated > 1:
        rows.append(("ranks", f"{step.ranks.replicated} ranks exchange gradients once a window"))
    elif step.ranks.spread:
        rows.append(("ranks", "parameters are sharded over several ranks, which agree on whether to step"))
    if step.ranks.late:
        size = sum(4 * p.numel() for p in step.model.parameters() if p.requires_grad)
        rows.append(
            ("reduced", f"once a window, for which each rank keeps {size:,} bytes of gradients of the whole model")
        )
    skipped = [event for event in scaler.history if event.skipped]
    if scaler.history:
        rows.append(("steps skipped", f"{len(skipped)} of the last {len(scaler.history)}"))
    rows += [
        (f"skipped at update {event.update}", f"scale {event.scale:g}, {event.culprit or 'decided on the device'}")
        for event in skipped[-_SHOWN:]
    ]
    return tuple(rows)


def compiled_rows(compiled: CompiledStep | None) -> list[tuple[str, str]]:
    """Return facts about the compiled parts of a step; none if it compiles nothing."""
    if compiled is None:
        return []
    rows = [("compiled", f"by '{compiled.settings.name}'")]
    if compiled.leaves.reason:
        rows.append(("no weights as leaves", compiled.leaves.reason))
    if compiled.not_at_rest:
        rows.append(("O2 as when uncompiled", compiled.not_at_rest))
    if compiled.cuda_graph:
        rows.append(("CUDA graph", compiled.cuda_graph))
    for region in compiled.regions:
        counts = ((region.breaks, "graph break"), (region.recompiles, "recompile"), (region.fallbacks, "fallback"))
        said = ", ".join(f"{len(found)} {what}{'s' * (len(found) != 1)}" for found, what in counts)
        rows.append((region.name, f"{region.frames} compiled, {said}"))
        for found, what in counts:
            rows += [(f"{region.name}: {what}", text) for text in found[:_SHOWN]]
    if compiled.update.eager:
        rows.append((f"{compiled.update.region.name}: last ran uncompiled", compiled.update.eager))
    return rows


def reasons_to_wait(step: TrainStep) -> tuple[str, ...]:
    """Return why a step waits for the device once, at the end of a window; nothing if it never waits."""
    if not (step.scaler.is_enabled() or step.max_grad_norm is not None or step.check_finite):
        return ()
    in_graph = step.compiled is not None and step.windows > 1 and not step.compiled.update.eager
    deciding = [] if in_graph else [o for o in step.optimizers if waits(o)]
    reasons = [
        f"Python decides whether {type(o).__name__} steps"
        + ", which fused=True leaves to the device" * ("fused" in o.defaults)
        for o in deciding
    ]
    reasons += [f"{type(s).__name__} follows the steps that were taken" for s in step.schedulers]
    reasons += ["the average of the weights follows the steps that were taken"] * bool(step.averages)
    return tuple(dict.fromkeys(reasons))
