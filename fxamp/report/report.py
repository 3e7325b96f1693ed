"""Print a plan: totals first, then every node with its colour and the reason for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec
from tabulate import tabulate

from passes.contract.errors import FxampError
from passes.contract.plan import Decision, Plan

from ..dynamo.compiled import plan_of
from ..module.module import ConvertedModule
from ..train.describe import describe
from ..train.step import TrainStep
from .diff.diff import Diffable, plan_in
from .forms.dot import to_dot
from .forms.harmless import markdown, visible
from .forms.lines import HEADERS as COSTS
from .forms.lines import costliest, source
from .forms.model_explorer import to_model_explorer
from .forms.tree import CASTS, SIZES, chosen, elsewhere, fits, grown, rows, table
from .record.build import record_of
from .record.record import NodeRecord, Record, Totals

HEADERS = ("node", "op", "colour", "autocast", "reason", "source")


@dataclass(frozen=True)
class Report:
    """Show one plan: as a table, as a tree, as Markdown, JSON, a page, or a graph for other tools.

    Attributes:
        plan: The plan that is reported.
        training: Facts about the training step that runs the module, as (name, text) pairs.
        record: The decisions with the costs of the nodes; None unless a converted module was given.
        model: The name of the model's class.

    Example:
        >>> print(str(fxamp.report(converted)).splitlines()[4])
        policy                    O1,dtype=bf16,device=cpu
    """

    plan: Plan
    training: tuple[tuple[str, str], ...] = ()
    record: Record | None = None
    model: str = "model"

    def __str__(self) -> str:
        """Return the report as text: totals, notes, a summary per op, a row per node."""
        return self._written("simple", "", visible)

    def to_tree(
        self, *, style: str = "simple", depth: int | None = None, nodes: bool = False, modules: Sequence[str] = (),
        ops: Sequence[str] = (), colours: Sequence[str] = (), reasons: Sequence[str] = (), width: int | None = None,
        lines: bool = False, edits: bool = False,
    ) -> str:  # fmt: skip
        """Return the totals, the notes and the modules as a tree. Sizes are in MB, 10^6 bytes.

        Args:
            style: The style of the tables, as tabulate names it: "simple", or "pipe" for Markdown.
            depth: How many levels of modules; None for all.
            nodes: List the nodes too.
            modules: Paths of modules; only nodes in one of them or below it are counted.
            ops: Names of ops; only nodes of these ops are counted.
            colours: Dtypes; only nodes that run in one of them are counted.
            reasons: Codes of reasons; only nodes with one of them are counted.
            width: The width of the terminal in characters, into which the tables have to fit; None for any width.
            lines: List the ten lines of your code that cost most, by the bytes of their casts, then by the bytes kept
                for backward.
            edits: List how often each rule of the passes fired, and the rules that never did.

        Example:
            >>> print(fxamp.report(converted).to_tree(ops=["linear"]).splitlines()[-3])
            Sequential        2      2       0        ...
        """
        record = self.record or record_of(self.plan)
        found = chosen(record, modules=modules, ops=ops, colours=colours, reasons=reasons)
        cell, heading = (markdown, "## ") if style == "pipe" else (visible, "")
        parts = self._head(style, heading, cell)
        body = [(cell(name), *rest) for name, *rest in rows(grown(found, self.model), record.has_casts, depth)]
        if len(found) == len(record.nodes):
            body += [(name, "", "", "", str(count), *("",) * 4) for name, count in elsewhere(record)]
        unknown = () if record.totals.bytes is not None else SIZES if record.has_casts else (CASTS, *SIZES)
        parts += [f"{heading}Modules", table(body, style, width, unknown)]
        if lines:
            parts += [f"{heading}Lines", self._lines(record, found, style, cell, width)]
        if nodes:
            several = any(node.graph for node in found)
            listed = [tuple(cell(v) for v in _line(node, several)) for node in found]
            text = tabulate(listed, HEADERS, style, disable_numparse=True)
            parts += [f"{heading}Nodes", text if width is None or fits(text, width) else _narrow(listed)]
        if edits:
            parts += self._edits(style, heading, cell)
        return "\n\n".join(parts) + "\n"

    def to_markdown(self) -> str:
        """Return the report as Markdown.

        Example:
            >>> fxamp.report(converted).to_markdown().splitlines()[0]
            '## Totals'
        """
        return self._written("pipe", "## ", markdown)

    def to_json(self) -> str:
        """Return the totals and the whole plan as JSON; equal plans give equal text.

        Example:
            >>> import json
            >>> json.loads(fxamp.report(converted).to_json())["totals"]["nodes"]
            3
        """
        data = {
            "totals": self._totals(),
            "ops": [{"op": op, "colour": colour, "count": count} for op, colour, count in self._ops()],
            "deviations": [asdict(decision) for decision in self.plan.deviations],
            "plan": json.loads(self.plan.to_json()),
        }
        if self.record is not None:
            data["record"] = msgspec.to_builtins(self.record)
        if self.training:
            data["training"] = dict(self.training)
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def to_html(self, **only: Sequence[str]) -> str:
        """Return an HTML page that needs no network and no other file.

        Args:
            only: The filters `modules`, `ops`, `colours` and `reasons` of `to_tree`; without a filter every node is
                shown.

        Example:
            >>> fxamp.report(converted).to_html().splitlines()[0]
            '<!doctype html>'
        """
        from .page import page  # the templates cost time to load, and most reports are text

        record = self.record or record_of(self.plan)
        return page(record, self.model, self.training, chosen(record, **only))

    def to_dot(self, **only: Sequence[str]) -> str:
        """Return the nodes and their operands in DOT, the language of Graphviz; takes the filters of `to_html`.

        Example:
            >>> fxamp.report(converted).to_dot().splitlines()[0]
            'digraph ...
        """
        return to_dot(chosen(self.record or record_of(self.plan), **only), self.model)

    def to_model_explorer(self, **only: Sequence[str]) -> tuple[str, str]:
        """Return a graph for Google's Model Explorer and data that colours its nodes. Takes the filters of `to_html`.

        Example:
            >>> graph, colours = fxamp.report(converted).to_model_explorer()
        """
        return to_model_explorer(chosen(self.record or record_of(self.plan), **only), self.model)

    def _head(self, style: str, heading: str, cell: Callable[[str], str]) -> list[str]:
        """Write the part that every form begins with: the totals, the notes, and facts about training."""
        totals = [(cell(name), cell(str(value))) for name, value in (*self._totals().items(), *self._sizes())]
        parts = [f"{heading}Totals", tabulate(totals, ("", ""), style, disable_numparse=True)]
        if self.plan.notes:
            # Notes come second, because they say what is unusual.
            parts += [f"{heading}Notes", "\n".join(f"- {cell(note)}" for note in self.plan.notes)]
        if self.training:
            training = [(cell(name), cell(text)) for name, text in self.training]
            parts += [f"{heading}Training", tabulate(training, ("", ""), style, disable_numparse=True)]
        return parts

    def _lines(
        self, record: Record, nodes: Sequence[NodeRecord], style: str, cell: Callable[[str], str], width: int | None
    ) -> str:
        """Write the lines that cost most, without their code if it does not fit; or say why there are none."""
        body = [tuple(map(cell, row)) for row in costliest(record, nodes)]
        if not body:
            return "Costs of lines are known only for a module that fxamp.convert returned with example inputs."
        align = ("left",) * 2 + ("right",) * 5
        text = tabulate(body, COSTS, style, disable_numparse=True, colalign=align)
        if width is None or fits(text, width):
            return text
        bare = [(line.partition(": ")[0], *rest) for line, *rest in body]
        return tabulate(bare, COSTS, style, disable_numparse=True, colalign=align)

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

    def _sizes(self) -> list[tuple[str, str]]:
        """Return the totals of what nodes cost, where they are known."""
        if self.record is None or self.record.totals.bytes is None:
            return []
        t = self.record.totals
        return [
            ("low, % of FLOPs", "none has any" if t.low_flops is None else f"{t.low_flops:g}"),
            ("low, % of bytes", "none" if t.low_bytes is None else f"{t.low_bytes:g}"),
            ("MB cast", f"{(t.cast_bytes or 0) / 1e6:.3g}"),
            ("MB saved for backward", f"{(t.saved_bytes or 0) / 1e6:.3g}" + _instead(t)),
        ]

    def _ops(self) -> list[tuple[str, str, int]]:
        counts = Counter((decision.op, decision.colour) for decision in self.plan.decisions)
        return [(op, colour, count) for (op, colour), count in sorted(counts.items())]

    def _edits(self, style: str, heading: str, cell: Callable[[str], str]) -> list[str]:
        """Write how often each rule of the passes fired, and which never did; nothing if the plan has no counts."""
        if not self.plan.edits:
            return []
        fired = [(cell(rule), count) for rule, count in self.plan.edits.items() if count]
        never = ", ".join(map(cell, self.plan.never_fired)) or "none"
        return [f"{heading}Edits", tabulate(fired, ("pass/rule", "fired"), style), f"Rules that never fired: {never}"]

    def _written(self, style: str, heading: str, cell: Callable[[str], str]) -> str:
        def table(rows: list[tuple[str, ...]], headers: tuple[str, ...]) -> str:
            return tabulate([[cell(value) for value in row] for row in rows], headers, style, disable_numparse=True)

        several = any(decision.graph for decision in self.plan.decisions)
        parts = [
            *self._head(style, heading, cell),
            f"{heading}Ops",
            table([(op, colour, str(count)) for op, colour, count in self._ops()], ("op", "colour", "nodes")),
            f"{heading}Nodes",
            table([_row(decision, several) for decision in self.plan.decisions], HEADERS),
        ]
        return "\n\n".join(parts) + "\n"


def report(converted_or_plan: Diffable | TrainStep) -> Report:
    """Report on a plan, a saved plan, a converted or compiled module, or a TrainStep of such a module.

    Args:
        converted_or_plan: A Plan, the path of a saved one, a module that `fxamp.convert` or `fxamp.compile` returned,
            or a TrainStep of such a module. For a module that `fxamp.convert` returned the report also gives costs, at
            the shapes of the example inputs.

    Raises:
        FxampError: What was given has no plan.
        CaptureError: A compiled module was not called yet.
        PlanError: The file cannot be read, or holds no plan.

    Example:
        >>> print(fxamp.report(converted).to_tree())
        Totals
        ...
        policy                    O1,dtype=bf16,device=cpu
        ...
    """
    step = converted_or_plan if isinstance(converted_or_plan, TrainStep) else None
    given = step.converted_model if step is not None else converted_or_plan
    plan = plan_in(given)
    if plan is None and step is not None and step.compiled is not None and step.compiled.settings.converts:
        plan = plan_of(step.model)
    if plan is None and step is not None:
        raise FxampError(
            f"report: {type(given).__name__} is not converted, so this TrainStep trains it in FP32, and there is no "
            "plan; give TrainStep what fxamp.convert or fxamp.compile returned"
        )
    if plan is None:
        raise FxampError(
            f"report: a {type(given).__name__} has no plan; give a Plan, the path of a saved one, "
            "or a module that fxamp.convert returned"
        )
    converted = given if isinstance(given, ConvertedModule) else None
    return Report(
        plan, describe(step) if step is not None else (), None if converted is None else record_of(converted),
        "model" if converted is None else converted.original,
    )  # fmt: skip


def _row(decision: Decision, several: bool) -> tuple[str, ...]:
    key = f"{decision.graph}:{decision.key}" if several else decision.key
    # Autocast's dtype is shown only where ours differs.
    autocast = decision.autocast_dtype if decision.autocast_dtype != decision.colour else ""
    return key, decision.op, decision.colour, autocast, decision.reason, decision.source


def _line(node: NodeRecord, several: bool) -> tuple[str, ...]:
    autocast = node.autocast if node.autocast != node.colour else ""
    key = f"{node.graph}:{node.key}" if several else node.key
    return key, node.op, node.colour, autocast, f"{node.reason_code}: {node.reason}", source(node)


def _instead(totals: Totals) -> str:
    """Describe how many bytes FP32 and autocast would save for backward, if that is known."""
    others = (("FP32", totals.saved_bytes_fp32), ("autocast", totals.saved_bytes_autocast))
    said = ", ".join(f"{name} {saved / 1e6:.3g}" for name, saved in others if saved is not None)
    return f" ({said})" if said else ""


def _narrow(lines: Sequence[tuple[str, ...]]) -> str:
    """Write each node over several lines, where a terminal has no room for a table."""
    out = []
    for key, _, colour, autocast, reason, place in lines:
        out += [f"{key}  {colour}" + f" (autocast: {autocast})" * bool(autocast), f"  {reason}"]
        out += [f"  {place}"] * bool(place)
    return "\n".join(out)


def _joined(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
