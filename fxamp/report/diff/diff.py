"""The differences between two plans, two converted modules, or two graphs.

Nodes are matched by structure (`match`), so that moving a line, renaming a node or inserting a layer changes
nothing at the other nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch import nn
from torch.fx import GraphModule

from passes.contract.errors import FxampError
from passes.contract.plan import Plan

from ..forms.notebook import as_text
from ..reader.reader import Readable, captured_and_emitted, emitted, plan_in
from . import listing
from .changes import PLAN_KEY as PLAN_KEY
from .changes import Change as Change
from .changes import another_model, by_rule, compared
from .items import arguments, node_keys, of_graph, of_plan
from .marked import Marked, marked
from .match import match
from .renamed import renamed

PLAN_FIELDS = ("capture", "inserted_casts", "casts")  # the policy is not among them: both titles show it


@dataclass(frozen=True)
class GraphDiff:
    """The changes between two sides, in graph order. Its truth value is True if the two differ.

    Attributes:
        before: A line that describes the first side.
        after: A line that describes the second side.
        changes: The changes of nodes and of totals.
        renamed: Modules whose path has changed; their nodes do not count as changes.
        code: When a graph was compared with its converted module, the code of the graph, with marks at the lines that
            conversion changed.

    Example:
        >>> found = fxamp.diff(converted, fxamp.plan(model, (x,), policy="O1,dtype=bf16,modules.2=fp32"))
        >>> found.totals, found.another_model
        ('0 added, 0 removed, 2 changed', False)
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    renamed: tuple[Change, ...] = ()
    code: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Say whether the two differ."""
        return bool(self.changes or self.renamed)

    def __repr__(self) -> str:
        """Return the totals."""
        return f"<fxamp diff: {self.totals}>"

    def _repr_html_(self) -> str:
        """Show the text in a notebook."""
        return as_text(str(self))

    def __str__(self) -> str:
        """Return the listing: what each side is, the totals, then module by module one line per change."""
        if self.code:
            head = listing.to_text((self.before, self.after), self.totals, self.renamed, ())
            return "\n".join([head, *self.code])
        return listing.to_text((self.before, self.after), self.totals, self.renamed, self.changes)

    @property
    def another_model(self) -> bool:
        """Whether the two have so little in common that one cannot be a version of the other."""
        return any(c.field == "model" and c.key == PLAN_KEY for c in self.changes)

    def to_markdown(self) -> str:
        """Return the changes as a Markdown table, and `code`, if there is any, as a block.

        Example:
            >>> text = fxamp.diff(converted, fxamp.plan_of(converted)).to_markdown()
        """
        return listing.to_markdown((self.before, self.after), self.totals, self.renamed, self.changes, self.code)

    def to_html(self) -> str:
        """Return the changes as an HTML page with a table; the page needs no other file.

        Example:
            >>> fxamp.diff(converted, fxamp.plan_of(converted)).to_html().splitlines()[0]
            '<!doctype html>'
        """
        return listing.to_html((self.before, self.after), self.totals, self.renamed, self.changes, self.code)

    def to_json(self) -> str:
        """Return the changes as JSON; equal changes give equal text.

        Example:
            >>> import json
            >>> json.loads(fxamp.diff(converted, fxamp.plan_of(converted)).to_json())["differ"]
            False
        """
        changes, moved = ([_data(c) for c in found] for found in (self.changes, self.renamed))
        data = {"before": self.before, "after": self.after, "changes": changes, "renamed": moved, "differ": bool(self)}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def totals(self) -> str:
        """How many nodes were added, removed and changed, as one line.

        A node counts once, however many of its fields changed.
        """
        if not self:
            return "no difference"
        nodes = {(c.kind, key) for c in self.changes for key in c.counted}
        return ", ".join(f"{sum(k == kind for k, _ in nodes)} {kind}" for kind in ("added", "removed", "changed"))


def diff(before: Readable, after: Readable | None = None) -> GraphDiff:
    """Compare two plans, two converted modules, two graphs, or a graph with the module that it was converted to.

    Args:
        before: A plan, the path of a saved one, a converted module, or any `torch.fx.GraphModule`. A view alone is
            compared with itself: each graph as captured, beside the graph as emitted.
        after: Likewise.

    Returns:
        The changes from `before` to `after`; the truth value is True if there are any. Casts are compared only between
        two converted modules. If `before` is a graph without a plan and `after` was converted, the listing is the code
        of the graph with casts marked.

    Raises:
        CaptureError: A view alone has no graph yet.
        PlanError: A file cannot be read, or holds no plan.
        FxampError: The two cannot be compared.

    Example:
        >>> print(fxamp.diff(torch.fx.symbolic_trace(model), converted))
        --- ...
    """
    if after is None:
        return _of_view(before)
    old, new = plan_in(before), plan_in(after)
    if old and new:
        return _of_plans(before, after, old, new)
    old_graph, new_graph = _graph_in("before", before), _graph_in("after", after)
    titles = _graph_title(old_graph), _graph_title(new_graph)
    if new:
        found: Marked = marked(old_graph, new_graph)
        return GraphDiff(*titles, found.changes, code=found.code)
    return _of_graphs(titles, old_graph, new_graph)


def _of_view(view: object) -> GraphDiff:
    """Put each captured graph of a view beside the emitted one."""
    code: list[str] = []
    changes: list[Change] = []
    pairs = captured_and_emitted(view)
    for state, captured, made in pairs:
        found: Marked = marked(captured, made)
        code += [f"{state}:" if len(pairs) > 1 else "", *found.code]
        changes += found.changes
    nodes = [sum(len(graph.graph.nodes) for graph in side) for side in list(zip(*pairs, strict=True))[1:]]
    titles = f"as captured  {nodes[0]} nodes", f"as emitted  {nodes[1]} nodes"
    return GraphDiff(*titles, tuple(changes), code=tuple(code))


def _of_plans(before: Readable, after: Readable, old: Plan, new: Plan) -> GraphDiff:
    sides = (before, old), (after, new)
    left, right = (of_plan(p, emitted(given) if isinstance(given, nn.Module) else ()) for given, p in sides)
    named = bool(old.fxamp_version and new.fxamp_version) and old.fxamp_version != new.fxamp_version
    titles = _plan_title(old, named), _plan_title(new, named)
    found = match(left, right)
    if not found.alike:
        return GraphDiff(*titles, (another_model(left, right, found),))
    ops = {item.key: item.label for item in right}
    changes = by_rule(old, new, compared(left, right, found.pairs, "colour"), ops)
    moved = renamed(left, right, found.pairs)
    return GraphDiff(*titles, (*_plan_changes(old, new), *changes), tuple(moved))


def _of_graphs(titles: tuple[str, str], before: GraphModule, after: GraphModule) -> GraphDiff:
    left, right = of_graph(before.graph), of_graph(after.graph)
    found = match(left, right)
    if not found.alike:
        return GraphDiff(*titles, (another_model(left, right, found),))
    pairs = found.pairs
    olds, news = list(before.graph.nodes), list(after.graph.nodes)
    own, names = node_keys(before.graph), node_keys(after.graph)
    shared = own | {olds[o]: names[news[n]] for n, o in pairs.items()}  # one node has one name on both sides
    written = {n: (arguments(olds[o], shared), arguments(news[n], names)) for n, o in pairs.items()}
    for new, (theirs, ours) in written.items():
        if theirs != ours:
            left[pairs[new]].fields["operands"] = arguments(olds[pairs[new]], own)
            right[new].fields["operands"] = ours
    return GraphDiff(*titles, tuple(compared(left, right, pairs, "target")), tuple(renamed(left, right, pairs)))


def _graph_in(name: str, value: object) -> GraphModule:
    if isinstance(value, GraphModule):
        return value
    if isinstance(value, nn.Module) and (found := emitted(value)):
        if len(found) == 1:
            return found[0].module
        raise FxampError(
            f"diff: {name} is a view of {len(found)} graphs; give fxamp.graphs(view)[i], one of them, or two views"
        )
    raise FxampError(
        f"diff: {name} is a {type(value).__name__}, which cannot be compared here; give two plans (or converted "
        "modules, or paths of saved plans), or two GraphModules"
    )


def _plan_title(plan: Plan, with_version: bool) -> str:
    made_by = f"fxamp {plan.fxamp_version}, " if with_version else ""
    return f"{plan.policy}  {plan.capture}, {made_by}torch {plan.torch_version}, {len(plan.decisions)} nodes"


def _graph_title(module: GraphModule) -> str:
    return f"{type(module).__name__}  {len(module.graph.nodes)} nodes"


def _plan_changes(before: Plan, after: Plan) -> Iterable[Change]:
    for field in PLAN_FIELDS:
        old, new = str(getattr(before, field)), str(getattr(after, field))
        if old != new:
            yield Change("changed", PLAN_KEY, field, old, new)


def _data(change: Change) -> dict[str, object]:
    """Return a change as data, with the keys of its nodes if it stands for several."""
    data = asdict(change)
    if not change.nodes:
        del data["nodes"]
    return data
