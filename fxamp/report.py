"""A plan as a reader wants it: totals first, then every node with its colour and the reason for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tabulate import tabulate

from passes.errors import FxampError
from passes.plan import Decision, Plan

from .diff import Diffable, plan_in
from .harmless import markdown, visible
from .train.describe import describe
from .train.step import TrainStep

HEADERS = ("node", "op", "colour", "autocast", "reason", "source")


@dataclass(frozen=True)
class Report:
    """Show one plan as a table, as Markdown, or as JSON.

    Attributes:
        plan: What was decided.
        training: What there is to say of the training step that runs it, as names and texts.
    """

    plan: Plan
    training: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Write the report as text: totals, notes, a summary per op, a row per node."""
        return self._written("simple", "", visible)

    def to_markdown(self) -> str:
        """Write the report as Markdown."""
        return self._written("pipe", "## ", markdown)

    def to_json(self) -> str:
        """Write the totals and the whole plan as JSON, the same text for the same plan."""
        data = {
            "totals": self._totals(),
            "ops": [{"op": op, "colour": colour, "count": count} for op, colour, count in self._ops()],
            "deviations": [asdict(decision) for decision in self.plan.deviations],
            "plan": json.loads(self.plan.to_json()),
        }
        if self.training:
            data["training"] = dict(self.training)
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """Refuse: HTML is not written yet."""
        raise FxampError("a report cannot be written as HTML yet; use str(report), to_markdown() or to_json()")

    def _totals(self) -> dict[str, object]:
        plan = self.plan
        return {
            "policy": str(plan.policy),
            "capture": plan.capture,
            "verified": plan.verified,
            "torch": plan.torch_version,
            "nodes": len(plan.decisions),
            "colours": _joined(Counter(decision.colour for decision in plan.decisions)),
            "casts inserted": plan.inserted_casts,
            "casts after elimination": plan.casts,
            "deviations from autocast": _joined(Counter(decision.code for decision in plan.deviations)),
        }

    def _ops(self) -> list[tuple[str, str, int]]:
        counts = Counter((decision.op, decision.colour) for decision in self.plan.decisions)
        return [(op, colour, count) for (op, colour), count in sorted(counts.items())]

    def _written(self, style: str, heading: str, cell: Callable[[str], str]) -> str:
        def table(rows: list[tuple[str, ...]], headers: tuple[str, ...]) -> str:
            return tabulate([[cell(value) for value in row] for row in rows], headers, style, disable_numparse=True)

        several = any(decision.graph for decision in self.plan.decisions)
        parts = [
            f"{heading}Totals",
            table([(name, str(value)) for name, value in self._totals().items()], ("", "")),
            f"{heading}Ops",
            table([(op, colour, str(count)) for op, colour, count in self._ops()], ("op", "colour", "nodes")),
            f"{heading}Nodes",
            table([_row(decision, several) for decision in self.plan.decisions], HEADERS),
        ]
        if self.training:
            parts[2:2] = [f"{heading}Training", table(list(self.training), ("", ""))]
        if self.plan.notes:
            # Second, because what was not done as usual matters more than what was.
            parts[2:2] = [f"{heading}Notes", "\n".join(f"- {cell(note)}" for note in self.plan.notes)]
        return "\n\n".join(parts) + "\n"


def report(converted_or_plan: Diffable | TrainStep) -> Report:
    """Report on a plan, the path of a saved one, a converted module, or a TrainStep of one.

    Raises:
        FxampError: There is no plan in what was given.
    """
    step = converted_or_plan if isinstance(converted_or_plan, TrainStep) else None
    given = step.converted_model if step is not None else converted_or_plan
    plan = plan_in(given)
    if plan is None:
        raise FxampError(
            f"report: a {type(given).__name__} has no plan; give a Plan, the path of a saved one, "
            "or a module that fxamp.convert returned"
        )
    return Report(plan, describe(step) if step is not None else ())


def _row(decision: Decision, several: bool) -> tuple[str, ...]:
    key = f"{decision.graph}:{decision.key}" if several else decision.key
    # Autocast's dtype is of interest where ours is another one.
    autocast = decision.autocast_dtype if decision.autocast_dtype != decision.colour else ""
    return key, decision.op, decision.colour, autocast, decision.reason, decision.source


def _joined(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
