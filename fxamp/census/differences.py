"""Compare what ran with what was planned, node by node.

Of a graph that Inductor compiled there is its own record: the buffers that it stores, and the products that it calls.
What a kernel computes between its loads and its stores lies in registers, in FP32 by Inductor's design: a node whose
value is not stored was fused away, and there is nothing to compare. All others are compared with the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.contract.plan import Decision
from passes.contract.policy import dtype_name
from passes.graph.bodies import Body, all_graphs
from passes.graph.notes import is_inserted
from passes.ops.rules import row_named, row_of
from passes.runtime.casts import again

from ..observe.watch import LOW_NAMES, Dtypes, Place, Ran, Seen, Sum, Watch, dtypes_in

_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Difference:
    """Something that did not run as planned; without a plan, a product that did not run as the others."""

    kind: str  # "dtype", "missing", "unplanned", "outside", "uncaptured" or "scaling"
    where: str  # the key of a node, a line, or the path of a module
    planned: str  # what was planned, "" for nothing
    ran: str  # what ran, "" for nothing
    why: str = ""  # the cause, if it is known
    graph: int = -1  # which of the graphs that ran, -1 outside of all
    flops: int = 0  # floating-point operations that ran so

    def __str__(self) -> str:
        planned = f"planned {self.planned}, " if self.planned else ""
        ran = f"ran {self.ran}" if self.ran else "did not run"
        return f"{self.where}: {planned}{ran}{f' ({self.why})' if self.why else ''}"


def differences_of(watch: Watch, views: Mapping[str, Any], whole: bool) -> list[Difference]:
    """Return all that did not run as planned, of the views in a model, or of the whole model, compiled in place."""
    found = [d for ran in watch.graphs for d in _of_graph(ran)]
    found += of_products(watch)[0]
    found += _outside(watch, views, whole)
    found += _uncaptured(watch, views)
    return [*dict.fromkeys(found), *(d for ran in watch.graphs for d in _compiled_otherwise(ran))]


def is_cast(node: Node) -> bool:
    """Say whether a node is a cast that the plan counts: one of a storage of its own."""
    return is_inserted(node) and node.target is not again


def planned_dtypes(node: Node) -> tuple[Dtypes, Dtypes]:
    """Return the dtypes of operands and results that a node of an emitted graph has by its plan."""
    values = [n.meta.get("val", n.meta.get("example_value")) for n in node.all_input_nodes]
    return dtypes_in(values), dtypes_in(node.meta.get("val"))


def _of_graph(ran: Ran) -> Iterator[Difference]:
    """Yield the nodes of a graph that did not run as they were emitted, or not at all."""
    if ran.by:
        return
    at, lifted = ran.number, _lifted(ran)
    for name, node in ran.emitted.items():
        if not node.op.startswith("call") or name in lifted:
            continue
        key, planned, dtypes = ran.key(name), planned_dtypes(node), ran.nodes.get(name)
        what = f"the cast to {' '.join(planned[1])}" if is_inserted(node) else ""
        if dtypes is None:
            yield Difference("missing", key, what or _text(*planned), "", graph=at)
        elif "val" in node.meta and _differ(node, planned, dtypes):
            yield Difference("dtype", key, what or _text(*planned), _text(*dtypes), graph=at)
    for name, dtypes in ran.nodes.items():
        if name not in ran.emitted:
            yield Difference("unplanned", name, "", _text(*dtypes), "a node that is not in the plan", at)
    modules = [m for m in ran.known.emitted.modules() if isinstance(m, GraphModule)]
    casts, planned_casts = sum(is_cast(n) for m in modules for n in m.graph.nodes), ran.known.plan.casts
    if casts != planned_casts:
        yield Difference("missing", f"graph {at}", f"{planned_casts} casts", f"{casts} casts", graph=at)
    for key in ran.decisions.keys() - set(ran.keys.values()):
        yield Difference("missing", key, ran.decisions[key].colour, "", graph=at)


def _differ(node: Node, planned: Any, ran: Any) -> bool:
    """Say whether dtypes differ; an operand about which nothing is known is not compared."""
    known = all("val" in n.meta or "example_value" in n.meta for n in node.all_input_nodes)
    return planned[1] != ran[1] or (known and planned[0] != ran[0])


def _lifted(ran: Ran) -> Set[str]:
    """Return the casts of parameters that a window keeps, and which are inputs of the graph."""
    inputs = {n for n in ran.emitted.values() if n.op == "placeholder"}
    if ran.part.names is not None or len(ran.graph.graph.find_nodes(op="placeholder")) == len(inputs):
        return ran.part.lifted
    here = {n.name for n in ran.graph.graph.nodes}
    return {name for name, n in ran.emitted.items() if is_inserted(n) and n.args[0] in inputs and name not in here}


def _text(operands: Sequence[str], results: Sequence[str]) -> str:
    """Return the dtypes of a node in short: what it reads, and what it gives."""
    reads, gives = (" ".join(dict.fromkeys(dtypes)) for dtypes in (operands, results))
    return gives if reads == gives or not reads else f"{reads} to {gives or 'no float'}"


def of_products(watch: Watch) -> tuple[list[Difference], list[Difference]]:
    """Return the products of nodes and of compiled graphs that ran in another dtype than the plan's.

    Returns:
        Those that differ; and those inside an op of torch's that casts its operands itself, as attention with dropout
        does on a CPU: what it reads and gives is as planned. In a compiled graph these are its batched products.
    """
    differ, inside = list[Difference](), list[Difference]()
    casting = {seen.place for seen, total in watch.sums.items() if total.casts}
    for seen, total in watch.sums.items():
        place = seen.place
        if not seen.product or place.kind not in ("node", "region"):
            continue
        ran, planned = watch.graphs[place.graph], _planned_colours(place, watch)
        inside += [
            Difference("dtype", d.key, d.colour, seen.dtype, "in a body", place.graph, total.flops)
            for d in _attention_inside(ran, place) if seen.op.endswith("bmm") and d.colour != seen.dtype
        ]  # fmt: skip
        if planned and seen.dtype not in planned:
            attends = seen.op.endswith("bmm") and any(d.op == _ATTENTION for d in ran.decisions.values())
            graph = f"attention of graph {place.graph}" if attends else f"graph {place.graph}"
            where = ran.key(place.where) if place.kind == "node" else graph
            why = f"{seen.op} in {'backward' if place.backward else 'forward'}"
            colours = " or ".join(sorted(planned))
            found = Difference("dtype", where, colours, seen.dtype, why, place.graph, total.flops)
            casts = place in casting if place.kind == "node" else attends
            (inside if casts else differ).append(found)
    return differ, inside


def _attention_inside(ran: Ran, place: Place) -> list[Decision]:
    """Return the decisions on attention inside a node with graphs, as a checkpoint: what they run is the node's."""
    if place.kind != "node" or (node := ran.emitted.get(place.where)) is None or not row_of(node).bodies:
        return []
    whole = Body(ran.known.emitted, None)
    every = all_graphs(whole.graph, whole.bodies())
    here = [every.index(g) for b in whole.bodies().get(node, ()) for g in all_graphs(b.graph, b.bodies())]
    return [d for d in ran.known.plan.decisions if d.graph in here and d.op == _ATTENTION]


def _planned_colours(place: Place, watch: Watch) -> set[str]:
    """Return the dtypes that products may have at a place, by the plan; none where it leaves that open.

    Those of what is in a compiled graph and in no plan, as a loss that was traced with the model, are among them.
    """
    ran = watch.graphs[place.graph]
    alike = [one for one in watch.graphs if one.graph is ran.graph]
    here = ran.decisions.get(ran.key(place.where))
    decisions = [here] if place.kind == "node" else [d for one in alike for d in one.decisions.values()]
    colours = {d.colour for d in decisions if d is not None and not row_named(d.op).higher_order}
    if not colours or not all(isinstance(getattr(torch, c, None), torch.dtype) for c in colours):
        return set()
    graph, names = ran.graph, [one.part.names for one in alike if one.part.names is not None]
    if place.kind == "node" or not names:
        return colours
    loose = (n for n in graph.graph.nodes if n.op.startswith("call") and not any(n.name in known for known in names))
    return colours | {d for n in loose for d in dtypes_in(n.meta.get("val", n.meta.get("example_value")))}


def _outside(watch: Watch, views: Mapping[str, Any], whole: bool) -> Iterator[Difference]:
    """Yield code outside of all graphs that computes what the plan was made for, a line at a time."""
    lines: dict[tuple[str, bool], list[tuple[Seen, Sum]]] = {}
    for seen, total in watch.sums.items():
        if seen.place.kind == "outside":
            lines.setdefault((seen.place.where, seen.place.backward), []).append((seen, total))
    for (line, backward), ops in lines.items():
        inside = [(s, t) for s, t in ops if s.place.inside]
        reads = any(s.reads_parameter for s, _ in ops)
        by_hand = [(s, t) for s, t in ops if not s.place.inside and _is_planned(s, reads, views, whole)]
        counted = [(s, t) for s, t in (*inside, *by_hand) if s.computes]
        if not counted or (not views and not whole):
            continue
        seen = counted[0][0]
        module = next((s.place.module for s, _ in counted if s.place.module), "")
        ran = ", ".join(
            dict.fromkeys(f"{s.op} in {' '.join(dict.fromkeys(s.operands or s.results))}" for s, _ in counted)
        )
        where = f"{line}{f', module {module}' if module else ''}"
        why = f"outside of all graphs: {_why(seen, counted, watch)}"
        ran += " in backward" * backward
        yield Difference("outside", where, "", ran, why, flops=sum(t.flops for _, t in counted))


def _is_planned(seen: Seen, reads: bool, views: Mapping[str, Any], whole: bool) -> bool:
    """Say whether code that runs in no call of a view does what a view was made for: its modules, or its weights."""
    module = seen.place.module
    held = whole or any(module == path or module.startswith(f"{path}.") for path in views if path)
    if seen.place.backward and not module:
        return seen.product
    of_model = bool(module) and (held or "" in views)
    return of_model or (seen.product and reads and (whole or "" in views))


def _why(seen: Seen, ops: Iterable[tuple[Seen, Sum]], watch: Watch) -> str:
    place = seen.place
    if place.by:
        return place.by
    if not place.inside:
        return "called by hand, not by the view"
    wide = any(s.product and s.dtype not in LOW_NAMES for s, _ in ops)
    low = any(runner.graphs.policy.level.rounds for runner in watch.entered)
    off = ", where torch.autocast is off" if wide and low else ""
    breaks = [ran.known.broke for ran in watch.graphs if ran.known.broke]
    missed = [text for _, text, _ in watch.missed] or [text for runner in watch.entered for text in runner.refused]
    cause = next(iter((*missed, *(f"graph break at {text}" for text in breaks))), "left to Python by Dynamo")
    return f"{cause}{off}"


def _uncaptured(watch: Watch, views: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the views that did not run their plan, or were not called.

    Code that is left to Python may compute nothing itself: where graphs ran, and no op outside of them, all is planned.
    """
    computed = any(s.place.inside and s.place.kind in ("outside", "own") and s.computes for s in watch.sums)
    for model, why, planned in watch.missed:
        if computed or not planned:
            yield Difference("uncaptured", type(model).__name__, "a captured graph", "a call without it", why)
    for path, runner in views.items():
        if not any(entered is runner for entered in watch.entered):
            where = path or type(runner.model).__name__
            yield Difference("uncaptured", where, "a call of the view", "", "it was not called")


def odd_products(watch: Watch) -> list[Difference]:
    """Return, for a model without a plan, the products that ran in another dtype than most FLOPs did."""
    products = {seen: total for seen, total in watch.sums.items() if seen.product and seen.operands}
    flops = Counter[str]()
    for seen, total in products.items():
        flops[seen.dtype] += total.flops
    if len(flops) < 2:
        return []
    most = next((dtype for dtype in flops if dtype in LOW_NAMES), max(flops, key=lambda dtype: flops[dtype]))
    found = []
    for seen, total in products.items():
        if seen.dtype != most:
            how = "backward" if seen.place.backward else "forward"
            why = f"{how}, where other products ran in {most}{seen.place.where and f'; {seen.place.where}'}"
            found.append(
                Difference("dtype", watch.where(seen.place), "", f"{seen.op} in {seen.dtype}", why, flops=total.flops)
            )
    return found


@dataclass(frozen=True)
class Compiled:
    """What Inductor's record says of one graph."""

    graph: int  # which of the graphs that ran
    nodes: int  # nodes of the emitted graph, casts among them, with one floating result
    stored: int  # how many of them are stored, each compared with its dtype in the plan
    products: int  # how many of these are kernels of a library, whose operands are compared too
    fused: int  # how many were fused away
    loads: dict[str, int]  # how often buffers of a dtype are loaded, in forward and backward
    stores: dict[str, int]  # how often buffers of a dtype are stored, in forward and backward

    def __str__(self) -> str:
        loads, stores = (", ".join(f"{n} {dtype}" for dtype, n in d.items()) for d in (self.loads, self.stores))
        return (
            f"graph {self.graph} was compiled by Inductor; by its record {self.stored} of {self.nodes} nodes and casts "
            f"are stored, {self.products} of them by kernels of a library, and compared; {self.fused} were fused away; "
            f"kernels load {loads or 'nothing'} and store {stores or 'nothing'}"
        )


def compiled_of(ran: Ran) -> Compiled | None:
    """Return what Inductor's record says of a graph that ran; None where there is no record."""
    if ran.kernels is None:
        return None
    both = [*ran.kernels[0], *ran.kernels[1]]
    nodes = {n.name for n in ran.emitted.values() if n.op.startswith("call") and len(planned_dtypes(n)[1]) == 1}
    stored = {k.made_from: k for k in ran.kernels[0] if k.made_from in nodes}
    return Compiled(
        ran.number, len(nodes), len(stored), sum(k.extern for k in stored.values()), len(nodes) - len(stored),
        _counted(d for k in both for d in k.loaded), _counted(k.stored for k in both),
    )  # fmt: skip


def _compiled_otherwise(ran: Ran) -> Iterator[Difference]:
    """Yield the nodes that Inductor stores in another dtype than the plan's, or whose library kernel reads another."""
    for kernel in ran.kernels[0] if ran.kernels is not None else ():
        node = ran.emitted.get(kernel.made_from)
        planned = planned_dtypes(node) if node is not None else ((), ())
        if len(planned[1]) != 1:
            continue
        key, stored = ran.key(kernel.made_from), dtype_name(kernel.stored)
        if stored != planned[1][0]:
            yield Difference("dtype", key, planned[1][0], stored, "Inductor stores it so", ran.number)
        loaded = {dtype_name(dtype) for dtype in kernel.loaded if dtype.is_floating_point}
        if kernel.extern and loaded - set(planned[0]):
            reads, read = " ".join(sorted(set(planned[0]))), " ".join(sorted(loaded))
            yield Difference("dtype", key, reads, read, f"{kernel.op}, as Inductor calls it", ran.number)


def _counted(dtypes: Iterable[torch.dtype]) -> dict[str, int]:
    return dict(sorted(Counter(map(dtype_name, dtypes)).items()))
