"""The differences between two plans, two converted modules, or two graphs.

Nodes are matched by structure (`match`), so that moving a line, renaming a node or inserting a layer changes
nothing at the other nodes.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.fx import GraphModule

from passes.contract.errors import FxampError
from passes.contract.plan import Plan

from ...capture.parameters import noted_low
from ...observe.places import unique_keys
from ..reader import Readable, captured_and_emitted, emitted, plan_in
from .changes import PLAN_KEY as PLAN_KEY
from .changes import STORED, another_model, by_rule, compared, renamed
from .changes import Change as Change
from .items import arguments, of_graph, of_plan, of_stored
from .listing import GraphDiff as GraphDiff
from .marked import marked
from .match import match

PLAN_FIELDS = ("capture", "inserted_casts", "casts")  # the policy is not among them: both titles show it


def diff(before: Readable, after: Readable | None = None) -> GraphDiff:
    """Compare two plans, two converted modules, two graphs, or a graph with the module that it was converted to.

    Args:
        before: A plan, the path of a saved one, a converted module, a TrainStep of one, or any
            `torch.fx.GraphModule`. A view alone is compared with itself: each graph as captured, beside the graph as
            emitted.
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
        code, changes = marked(old_graph, new_graph)
        return GraphDiff(*titles, tuple(changes), code=tuple(code))
    return _of_graphs(titles, old_graph, new_graph)


def _of_view(view: object) -> GraphDiff:
    """Put each captured graph of a view beside the emitted one."""
    code: list[str] = []
    changes: list[Change] = []
    pairs = captured_and_emitted(view)
    for state, captured, made in pairs:
        lines, found = marked(captured, made)
        code += [f"{state}:" if len(pairs) > 1 else "", *lines]
        changes += found
    nodes = [sum(len(graph.graph.nodes) for graph in side) for side in list(zip(*pairs, strict=True))[1:]]
    titles = f"as captured  {nodes[0]} nodes", f"as emitted  {nodes[1]} nodes"
    return GraphDiff(*titles, tuple(changes), code=tuple(code))


def _of_plans(before: Readable, after: Readable, old: Plan, new: Plan) -> GraphDiff:
    sides = (before, old), (after, new)
    left, right = (of_plan(p, emitted(given)) for given, p in sides)
    named = bool(old.fxamp_version and new.fxamp_version) and old.fxamp_version != new.fxamp_version
    titles = _plan_title(old, named), _plan_title(new, named)
    pairs, alike = match(left, right)
    if not alike:
        return GraphDiff(*titles, (another_model(left, right, pairs),))
    ops = {item.key: item.label for item in right}
    changes = by_rule(old, new, compared(left, right, pairs, "colour"), ops)
    fields = ((field, str(getattr(old, field)), str(getattr(new, field))) for field in PLAN_FIELDS)
    of_plans = [Change("changed", PLAN_KEY, field, a, b) for field, a, b in fields if a != b]
    changes += _stored_otherwise(old, new)
    found = GraphDiff(*titles, (*of_plans, *changes), tuple(renamed(left, right, pairs)))
    return with_cause(found, old, new)


def _stored_otherwise(before: Plan, after: Plan) -> list[Change]:
    """Return a change for each value that one of the plans alone stores in 16 bits beside, or in another dtype."""
    left, right = of_stored(before), of_stored(after)
    found = compared(left, right, match(left, right)[0], STORED)
    return [c for c in found if c.kind != "changed" or c.field == "dtype"]  # others may be lines, which move


def with_cause(found: GraphDiff, old: Plan, new: Plan) -> GraphDiff:
    """Have the changes begin with the dtypes of parameters, if there are changes, and these differ."""
    low = [noted_low(plan.notes) or "none" for plan in (old, new)]
    if low[0] == low[1] or not found:
        return found
    cause = Change("changed", PLAN_KEY, "trainable parameters in 16 bits", low[0], low[1])
    return replace(found, changes=(cause, *(c for c in found.changes if c != cause)))


def _of_graphs(titles: tuple[str, str], before: GraphModule, after: GraphModule) -> GraphDiff:
    left, right = of_graph(before.graph), of_graph(after.graph)
    pairs, alike = match(left, right)
    if not alike:
        return GraphDiff(*titles, (another_model(left, right, pairs),))
    olds, news = list(before.graph.nodes), list(after.graph.nodes)
    own, names = unique_keys(before.graph), unique_keys(after.graph)
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
