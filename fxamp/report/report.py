"""Print a record: totals first, then the modules as a tree, then every node with its colour and the reason for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec

from passes.contract.errors import FxampError, public
from passes.contract.plan import Plan

from ..census.census import Census
from ..error.report import Errors
from ..harmless import in_notebook
from ..train.describe import describe
from ..train.step import TrainStep
from .forms.model_explorer import to_model_explorer
from .forms.text import Text, counts_of, ops_of
from .reader import Readable, model_name, plan_in, record_of
from .record.record import Record


@public
@dataclass(frozen=True)
class Report:
    """Show one plan: as a table, as a tree, as Markdown, JSON, a page, or a graph for other tools.

    Attributes:
        plan: The plan that is reported.
        training: Facts about the training step that runs the module, as (name, text) pairs.
        record: The decisions, with the costs of the nodes where a converted module was given.
        model: The name of the model's class.

    Example:
        >>> print(str(fxamp.report(converted)).splitlines()[3])
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
        found = self.record.chosen(modules=modules, ops=ops, colours=colours, reasons=reasons)
        text = Text(self.record, style, width)
        parts = [*text.totals(self._made()), *text.notes()]
        if self.training:
            parts += text.facts("Training", dict(self.training))
        parts += text.modules(found, self.model, depth)
        if lines:
            parts += text.lines(found)
        if nodes:
            parts += text.nodes(found)
            parts += text.stored([s for s in self.plan.stored if not modules or _is_in(s.module, modules)])
        if edits:
            parts += text.edits(self.plan)
        return text.joined(parts)

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
        counts = counts_of(self.record, self.record.states[0])
        data = {
            "totals": {**self._made(), **counts},
            "ops": [{"op": op, "colour": colour, "count": count} for op, colour, count in ops_of(self.record.nodes)],
            "deviations": [asdict(decision) for decision in self.plan.deviations],
            "plan": json.loads(self.plan.to_json()),
            "record": msgspec.to_builtins(self.record),
        }
        if self.training:
            data["training"] = dict(self.training)
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def to_html(self, census: Census | None = None, errors: Errors | None = None, **only: Sequence[str]) -> str:
        """Return an HTML page that needs no network and no other file.

        Args:
            census: A census of the same model, which gets a tab.
            errors: The predicted errors of this policy, `fxamp.estimate_error(model, x, y)["O2"]`, by which nodes can
                be coloured: each by its share of the variance of the loss, that of its casts with it.
            only: The filters `modules`, `ops`, `colours` and `reasons` of `to_tree`; without a filter every node is
                shown.

        Example:
            >>> fxamp.report(converted).to_html().splitlines()[0]
            '<!doctype html>'
        """
        from .page import page  # the templates cost time to load, and most reports are text

        shown = self.record.chosen(**only) if any(only.values()) else None
        ran = None if census is None else json.loads(census.to_json())
        moved = None if errors is None else errors.by("key")
        facts = (*self.training, *(("stored in 16 bits", str(each)) for each in self.plan.stored))
        return page(self.record, self.model, facts, shown, ran, moved)

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        return in_notebook(self.to_html())

    def to_model_explorer(self, **only: Sequence[str]) -> tuple[str, str]:
        """Return a graph for Google's Model Explorer and data that colours its nodes. Takes the filters of `to_html`.

        Example:
            >>> graph, colours = fxamp.report(converted).to_model_explorer()
        """
        return to_model_explorer(self.record.chosen(**only), self.model)

    def _made(self) -> dict[str, object]:
        """Return how the plan was made, and what the figures are."""
        r, stored = self.record, Counter(each.part for each in self.plan.stored)
        dtypes = {"fake": "recomputed by torch, without values", "symbolic": "by the rules alone"}[r.verified]
        beside = {"stored in 16 bits": ", ".join(f"{n} {part}" for part, n in stored.items())} if stored else {}
        made = {"policy": r.policy, "capture": r.capture, "dtypes": dtypes, "torch": r.torch, "figures": r.stage}
        return {**made, **beside}


def _is_in(path: str, modules: Sequence[str]) -> bool:
    """Say whether a path is that of a module among some, or of one below it."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def report(converted_or_plan: Readable) -> Report:
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
    given = converted_or_plan
    step, plan = given if isinstance(given, TrainStep) else None, plan_in(given)
    if plan is None and step is not None:
        raise FxampError(
            f"report: {type(step.converted_model).__name__} is not converted, so this TrainStep trains it in FP32, and "
            "there is no plan; give TrainStep what fxamp.convert or fxamp.compile returned"
        )
    if plan is None:
        raise FxampError(
            f"report: a {type(given).__name__} has no plan; give a Plan, the path of a saved one, "
            "or a module that fxamp.convert returned"
        )
    training = describe(step) if step is not None else ()
    return Report(plan, training, record_of(given, plan), model_name(given))
