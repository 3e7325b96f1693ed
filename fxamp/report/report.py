"""Print a record: totals first, then the modules as a tree, then every node with its colour and the reason for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec
from tabulate import tabulate

from passes.contract.errors import FxampError
from passes.contract.plan import Plan
from passes.contract.reasons import DEVIATIONS

from ..train.describe import describe
from ..train.step import TrainStep
from ..trust.census.census import Census
from .forms.filters import chosen
from .forms.harmless import markdown, visible
from .forms.lines import HEADERS as COSTS
from .forms.lines import costliest, source
from .forms.model_explorer import to_model_explorer
from .forms.notebook import in_notebook
from .forms.tree import CASTS, SIZES, elsewhere, fits, grown, rows, table
from .reader.reader import Readable, model_name, plan_in, record_of
from .record.record import NodeRecord, Record, State, Totals

HEADERS = ("node", "op", "colour", "autocast", "reason", "source")


@dataclass(frozen=True)
class Report:
    """Show one plan: as a table, as a tree, as Markdown, JSON, a page, or a graph for other tools.

    Attributes:
        plan: The plan that is reported.
        training: Facts about the training step that runs the module, as (name, text) pairs.
        record: The decisions, with the costs of the nodes where a converted module was given.
        model: The name of the model's class.

    Example:
        >>> print(str(fxamp.report(converted)).splitlines()[4])
        policy                    O1,dtype=bf16,device=cpu
    """

    plan: Plan
    training: tuple[tuple[str, str], ...]
    record: Record
    model: str = "model"

    def __repr__(self) -> str:
        """Return the model and its plan, in short."""
        return f"<fxamp report of {self.model}: {self.plan!r}>"

    def __str__(self) -> str:
        """Return the report as text: totals, notes, the tree of modules, a summary per op, a row per node."""
        return self.to_tree(nodes=True)

    def to_tree(
        self, *, style: str = "simple", depth: int | None = None, nodes: bool = False, modules: Sequence[str] = (),
        ops: Sequence[str] = (), colours: Sequence[str] = (), reasons: Sequence[str] = (), width: int | None = None,
        lines: bool = False, edits: bool = False,
    ) -> str:  # fmt: skip
        """Return the totals, the notes and the modules as a tree. Sizes are in MB, 10^6 bytes.

        Args:
            style: The style of the tables, as tabulate names it: "simple", or "pipe" for Markdown.
            depth: How many levels of modules; None for all.
            nodes: List the ops and the nodes too.
            modules: Paths of modules; only nodes in one of them or below it are counted.
            ops: Names of ops; only nodes of these ops are counted.
            colours: Dtypes; only nodes that run in one of them are counted.
            reasons: Codes of reasons; only nodes with one of them are counted.
            width: The width of the terminal in characters, into which the tables have to fit; None for any width.
            lines: List the ten lines of your code that cost most, by the bytes of their casts, then by the bytes kept
                for backward.
            edits: List how often each rule of the passes fired, and the rules that never did.

        Raises:
            PolicyError: A filter matches no node; the message has the nearest name.

        Example:
            >>> print(fxamp.report(converted).to_tree(ops=["linear"]).splitlines()[-3])
            Sequential        2      2       0        ...
        """
        found = chosen(self.record, modules=modules, ops=ops, colours=colours, reasons=reasons)
        cell, heading = (markdown, "## ") if style == "pipe" else (visible, "")
        parts = [*self._head(style, heading, cell, width), *self._trees(found, style, heading, cell, depth, width)]
        if lines:
            parts += [f"{heading}Lines", self._lines(found, style, cell, width)]
        if nodes:
            parts += self._nodes(found, style, heading, cell, width)
        if edits:
            parts += self._edits(style, heading, cell)
        return "\n\n".join(parts) + "\n"

    def to_markdown(self) -> str:
        """Return the report as Markdown.

        Example:
            >>> fxamp.report(converted).to_markdown().splitlines()[0]
            '## Totals'
        """
        return self.to_tree(style="pipe", nodes=True)

    def to_json(self) -> str:
        """Return the totals, the whole plan and the record as JSON; equal reports give equal text.

        Example:
            >>> import json
            >>> json.loads(fxamp.report(converted).to_json())["totals"]["nodes"]
            3
        """
        first = self.record.states[0]
        data = {
            "totals": {**self._made(), **dict(_counts(self.record, first))},
            "ops": [{"op": op, "colour": colour, "count": count} for op, colour, count in _ops(self.record.nodes)],
            "deviations": [asdict(decision) for decision in self.plan.deviations],
            "plan": json.loads(self.plan.to_json()),
            "record": msgspec.to_builtins(self.record),
        }
        if self.training:
            data["training"] = dict(self.training)
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def to_html(self, census: Census | None = None, **only: Sequence[str]) -> str:
        """Return an HTML page that needs no network and no other file.

        Args:
            census: A census of the same model, which gets a tab.
            only: The filters `modules`, `ops`, `colours` and `reasons` of `to_tree`; without a filter every node is
                shown.

        Example:
            >>> fxamp.report(converted).to_html().splitlines()[0]
            '<!doctype html>'
        """
        from .page import page  # the templates cost time to load, and most reports are text

        shown = chosen(self.record, **only) if any(only.values()) else None
        ran = None if census is None else json.loads(census.to_json())
        return page(self.record, self.model, self.training, shown, ran)

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        return in_notebook(self.to_html())

    def to_model_explorer(self, **only: Sequence[str]) -> tuple[str, str]:
        """Return a graph for Google's Model Explorer and data that colours its nodes. Takes the filters of `to_html`.

        Example:
            >>> graph, colours = fxamp.report(converted).to_model_explorer()
        """
        return to_model_explorer(chosen(self.record, **only), self.model)

    def _made(self) -> dict[str, object]:
        """Return how the plan was made."""
        r = self.record
        return {"policy": r.policy, "capture": r.capture, "verified": r.verified, "torch": r.torch}

    def _head(self, style: str, heading: str, cell: Callable[[str], str], width: int | None) -> list[str]:
        """Write the part that every form begins with: the totals, the notes, and facts about training."""
        states = self.record.states
        made = [(cell(name), cell(str(value))) for name, value in self._made().items()]
        columns = [[*_counts(self.record, state), *_sizes(state.totals)] for state in states]
        rows = [(cell(name), *(cell(str(dict(c).get(name, ""))) for c in columns)) for name, _ in columns[0]]
        parts = [f"{heading}Totals"]
        if len(states) == 1:
            parts.append(tabulate([*made, *rows], ("", ""), style, disable_numparse=True))
        else:
            parts.append(tabulate(made, ("", ""), style, disable_numparse=True))
            names = ("one call in state", *(cell(state.name) for state in states))
            text = tabulate(rows, names, style, disable_numparse=True)
            if width is not None and not fits(text, width):
                text = "\n\n".join(tabulate([(r[0], r[i]) for r in rows], ("one call in state", names[i]), style,
                                            disable_numparse=True) for i in range(1, len(names)))  # fmt: skip
            parts.append(text)
        if self.record.notes:
            # Notes come second, because they say what is unusual.
            parts += [f"{heading}Notes", "\n".join(f"- {cell(note)}" for note in self.record.notes)]
        if self.training:
            training = [(cell(name), cell(text)) for name, text in self.training]
            parts += [f"{heading}Training", tabulate(training, ("", ""), style, disable_numparse=True)]
        return parts

    def _trees(
        self, found: Sequence[NodeRecord], style: str, heading: str, cell: Callable[[str], str], depth: int | None,
        width: int | None,
    ) -> list[str]:  # fmt: skip
        """Write the tree of the modules for each state; one that equals an earlier one is named and not repeated."""
        record, parts, told = self.record, list[str](), dict[str, str]()
        totals = record.totals
        unknown = () if totals.bytes is not None else SIZES if record.has_casts else (CASTS, *SIZES)
        kept = {id(node) for node in found}
        for state in record.states:
            own = [node for node in record.of(state) if id(node) in kept]
            body = [(cell(name), *rest) for name, *rest in rows(grown(own, self.model), record.has_casts, depth)]
            if len(found) == len(record.nodes):
                body += [(name, "", "", "", str(n), *("",) * 4) for name, n in elsewhere(record, state)]
            text = table(body, style, width, unknown)
            named = f": {cell(state.name)}" if state.name else ""
            if text in told:
                parts.append(f"Modules{named}: as in {told[text]}")
                continue
            told[text] = cell(state.name)
            parts += [f"{heading}Modules{named}", text]
        return parts

    def _nodes(
        self, found: Sequence[NodeRecord], style: str, heading: str, cell: Callable[[str], str], width: int | None
    ) -> list[str]:
        """Write how many nodes of each op run in which dtype, and a row for every node."""
        several = any(node.graph for node in found)
        listed = [tuple(cell(v) for v in _line(node, several)) for node in found]
        text = tabulate(listed, HEADERS, style, disable_numparse=True)
        counts = [(cell(op), cell(colour), str(count)) for op, colour, count in _ops(found)]
        ops = tabulate(counts, ("op", "colour", "nodes"), style, disable_numparse=True)
        fitting = text if width is None or fits(text, width) else _narrow(listed)
        return [f"{heading}Ops", ops, f"{heading}Nodes", fitting]

    def _lines(self, nodes: Sequence[NodeRecord], style: str, cell: Callable[[str], str], width: int | None) -> str:
        """Write the lines that cost most, without their code if it does not fit; or say why there are none."""
        body = [tuple(map(cell, row)) for row in costliest(self.record, nodes)]
        if not body:
            return "Costs of lines are known only for a module that fxamp.convert returned with example inputs."
        align = ("left",) * 2 + ("right",) * 5
        text = tabulate(body, COSTS, style, disable_numparse=True, colalign=align)
        if width is None or fits(text, width):
            return text
        bare = [(line.partition(": ")[0], *rest) for line, *rest in body]
        return tabulate(bare, COSTS, style, disable_numparse=True, colalign=align)

    def _edits(self, style: str, heading: str, cell: Callable[[str], str]) -> list[str]:
        """Write how often each rule of the passes fired, and which never did; nothing if the plan has no counts."""
        if not self.plan.edits:
            return []
        fired = [(cell(rule), count) for rule, count in self.plan.edits.items() if count]
        never = ", ".join(map(cell, self.plan.never_fired)) or "none"
        return [f"{heading}Edits", tabulate(fired, ("pass/rule", "fired"), style), f"Rules that never fired: {never}"]


def report(converted_or_plan: Readable | TrainStep) -> Report:
    """Report on a plan, a saved plan, a converted or compiled module, or a TrainStep of such a module.

    Args:
        converted_or_plan: A Plan, the path of a saved one, a module that `fxamp.convert` or `fxamp.compile` returned,
            or a TrainStep of such a module. For a module the report also gives costs, at the shapes of the example
            inputs, of the graphs as planned: a compiler behind them may recompute what they save for backward.

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
    training = describe(step) if step is not None else ()
    return Report(plan, training, record_of(given, plan), model_name(given))


def _counts(record: Record, state: State) -> list[tuple[str, object]]:
    """Return what is counted in one state; casts before elimination are known of all states together."""
    nodes = record.of(state)
    casts = state.totals.casts
    codes = Counter(n.reason_code for n in nodes if n.reason_code in DEVIATIONS)
    before = "casts inserted" if len(record.states) == 1 else "casts inserted in all states"
    return [
        ("nodes", len(nodes)),
        ("colours", _joined(Counter(node.colour for node in nodes))),
        (before, record.inserted_casts),
        ("casts after elimination", "not known of a state" if casts is None else casts),
        ("deviations from autocast", _joined(codes)),
    ]


def _sizes(t: Totals) -> list[tuple[str, str]]:
    """Return the totals of what nodes cost, where they are known."""
    if t.bytes is None:
        return []
    return [
        ("low, % of FLOPs", "none has any" if t.low_flops is None else f"{t.low_flops:g}"),
        ("low, % of bytes", "none" if t.low_bytes is None else f"{t.low_bytes:g}"),
        ("MB cast", f"{(t.cast_bytes or 0) / 1e6:.3g}"),
        ("MB saved for backward", f"{(t.saved_bytes or 0) / 1e6:.3g}" + _instead(t)),
    ]


def _ops(nodes: Sequence[NodeRecord]) -> list[tuple[str, str, int]]:
    counts = Counter((node.op, node.colour) for node in nodes)
    return [(op, colour, count) for (op, colour), count in sorted(counts.items())]


def _line(node: NodeRecord, several: bool) -> tuple[str, ...]:
    autocast = node.autocast if node.autocast != node.colour else ""
    key = f"{node.graph}:{node.key}" if several else node.key
    said = f"{node.reason_code}: {node.reason}" if node.reason and node.reason != node.reason_code else node.reason_code
    return key, node.op, node.colour, autocast, said, source(node)


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
