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

from passes.contract.policy import dtype_name
from passes.graph.notes import is_inserted
from passes.ops.rules import row_named

from ..observe.watch import LOW_NAMES, Place, Seen, Sum, Watch, dtypes_in
from .rows import Ledger, is_cast, planned_dtypes

_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Difference:
    """Something that did not run as planned; without a plan, a product that did not run as the others.

    Attributes:
        kind: "dtype", "missing", "unplanned", "outside", "uncaptured" or "scaling".
        where: The key of a node, a line, or the path of a module.
        planned: What was planned, "" for nothing.
        ran: What ran, "" for nothing.
        why: The cause, if it is known.
        graph: Which of the graphs that ran, -1 outside of all.
        flops: Floating-point operations that ran so.
    """

    kind: str
    where: str
    planned: str
    ran: str
    why: str = ""
    graph: int = -1
    flops: int = 0

    def __str__(self) -> str:
        planned = f"planned {self.planned}, " if self.planned else ""
        ran = f"ran {self.ran}" if self.ran else "did not run"
        return f"{self.where}: {planned}{ran}{f' ({self.why})' if self.why else ''}"


def differences_of(watch: Watch, ledgers: Sequence[Ledger], views: Mapping[str, Any], whole: bool) -> list[Difference]:
    """Return all that did not run as planned, of the views in a model, or of the whole model, compiled in place."""
    found = [d for ledger in ledgers for d in _of_graph(ledger)]
    found += of_products(watch, ledgers)[0]
    found += _outside(watch, ledgers, views, whole)
    found += _uncaptured(watch, views)
    return list(dict.fromkeys(found))


def _of_graph(ledger: Ledger) -> Iterator[Difference]:
    """Yield the nodes of a graph that did not run as they were emitted, or not at all."""
    if ledger.ran.by:
        return
    at, lifted = ledger.number, _lifted(ledger)
    for name, node in ledger.emitted.items():
        if not node.op.startswith("call") or name in lifted:
            continue
        key, planned = ledger.key(name), planned_dtypes(node)
        ran = ledger.ran.nodes.get(name)
        what = f"the cast to {' '.join(planned[1])}" if is_inserted(node) else ""
        if ran is None:
            yield Difference("missing", key, what or _text(*planned), "", graph=at)
        elif "val" in node.meta and _differ(node, planned, ran):
            yield Difference("dtype", key, what or _text(*planned), _text(*ran), graph=at)
    for name, ran in ledger.ran.nodes.items():
        if name not in ledger.emitted:
            yield Difference("unplanned", name, "", _text(*ran), "a node that is not in the plan", at)
    modules = [m for m in ledger.ran.known.emitted.modules() if isinstance(m, GraphModule)]
    casts, planned_casts = sum(is_cast(n) for m in modules for n in m.graph.nodes), ledger.ran.known.plan.casts
    if casts != planned_casts:
        yield Difference("missing", f"graph {at}", f"{planned_casts} casts", f"{casts} casts", graph=at)
    for key in ledger.decisions.keys() - set(ledger.keys.values()):
        yield Difference("missing", key, ledger.decisions[key].colour, "", graph=at)


def _differ(node: Node, planned: Any, ran: Any) -> bool:
    """Say whether dtypes differ; an operand about which nothing is known is not compared."""
    known = all("val" in n.meta or "example_value" in n.meta for n in node.all_input_nodes)
    return planned[1] != ran[1] or (known and planned[0] != ran[0])


def _lifted(ledger: Ledger) -> Set[str]:
    """Return the casts of parameters that a window keeps, and which are inputs of the graph."""
    part = ledger.ran.part
    given = len(ledger.ran.graph.graph.find_nodes(op="placeholder"))
    inputs = [n for n in ledger.emitted.values() if n.op == "placeholder"]
    if part.names is not None or given == len(inputs):
        return part.lifted
    here = {n.name for n in ledger.ran.graph.graph.nodes}
    own = set(inputs)
    return {name for name, n in ledger.emitted.items() if is_inserted(n) and n.args[0] in own and name not in here}


def _text(operands: Sequence[str], results: Sequence[str]) -> str:
    """Return the dtypes of a node in short: what it reads, and what it gives."""
    reads, gives = (" ".join(dict.fromkeys(dtypes)) for dtypes in (operands, results))
    return gives if reads == gives or not reads else f"{reads} to {gives or 'no float'}"


def of_products(watch: Watch, ledgers: Sequence[Ledger]) -> tuple[list[Difference], list[Difference]]:
    """Return the products of nodes and of compiled graphs that ran in another dtype than the plan's.

    Returns:
        Those that differ; and those inside an op of torch's that casts its operands itself, as attention with dropout
        does on a CPU: what it reads and gives is as planned. In a compiled graph these are its batched products.
    """
    differ: list[Difference] = []
    inside: list[Difference] = []
    casting = {seen.place for seen, total in watch.sums.items() if total.casts}
    for seen, total in watch.sums.items():
        place = seen.place
        if not seen.product or place.kind not in ("node", "region"):
            continue
        ledger = ledgers[place.graph]
        planned = _planned_colours(place, ledgers)
        if planned and seen.dtype not in planned:
            attends = seen.op.endswith("bmm") and any(d.op == _ATTENTION for d in ledger.decisions.values())
            graph = f"attention of graph {place.graph}" if attends else f"graph {place.graph}"
            where = ledger.key(place.where) if place.kind == "node" else graph
            how = "backward" if place.backward else "forward"
            found = Difference(
                "dtype", where, " or ".join(sorted(planned)), seen.dtype,
                f"{seen.op} in {how}", place.graph, total.flops,
            )  # fmt: skip
            casts = place in casting if place.kind == "node" else attends
            (inside if casts else differ).append(found)
    return differ, inside


def _planned_colours(place: Place, ledgers: Sequence[Ledger]) -> set[str]:
    """Return the dtypes that products may have at a place, by the plan; none where it leaves that open."""
    ledger = ledgers[place.graph]
    decisions = [d for one in ledgers if one.ran.graph is ledger.ran.graph for d in one.decisions.values()]
    if place.kind == "node":
        decision = ledger.decisions.get(ledger.key(place.where))
        decisions = [] if decision is None else [decision]
    colours = {d.colour for d in decisions if not row_named(d.op).higher_order}
    known = all(isinstance(getattr(torch, c, None), torch.dtype) for c in colours)
    return (colours | _beside(place, ledgers)) if known and colours else set()


def _beside(place: Place, ledgers: Sequence[Ledger]) -> set[str]:
    """Return the dtypes of what is in a compiled graph and in no plan, as a loss that was traced with the model."""
    graph = ledgers[place.graph].ran.graph
    names = [one.ran.part.names for one in ledgers if one.ran.graph is graph and one.ran.part.names is not None]
    if place.kind == "node" or not names:
        return set()
    loose = (n for n in graph.graph.nodes if n.op.startswith("call") and not any(n.name in known for known in names))
    return {dtype for n in loose for dtype in dtypes_in(n.meta.get("val", n.meta.get("example_value")))}


def _outside(watch: Watch, ledgers: Sequence[Ledger], views: Mapping[str, Any], whole: bool) -> Iterator[Difference]:
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
        why = f"outside of all graphs: {_why(seen, counted, watch, ledgers)}"
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


def _why(seen: Seen, ops: Iterable[tuple[Seen, Sum]], watch: Watch, ledgers: Sequence[Ledger]) -> str:
    place = seen.place
    if place.by:
        return place.by
    if not place.inside:
        return "called by hand, not by the view"
    wide = any(s.product and s.dtype not in LOW_NAMES for s, _ in ops)
    low = any(runner.graphs.policy.level.rounds for runner in watch.entered)
    off = ", where torch.autocast is off" if wide and low else ""
    breaks = [ledger.ran.known.broke for ledger in ledgers if ledger.ran.known.broke]
    missed = [text for _, text in watch.missed] or [text for runner in watch.entered for text in runner.refused]
    cause = next(iter((*missed, *(f"graph break at {text}" for text in breaks))), "left to Python by Dynamo")
    return f"{cause}{off}"


def _uncaptured(watch: Watch, views: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the views that did not run their plan, or were not called."""
    for model, why in watch.missed:
        yield Difference("uncaptured", type(model).__name__, "a captured graph", "a call without it", why)
    for path, runner in views.items():
        if not any(entered is runner for entered in watch.entered):
            where = path or type(runner.model).__name__
            yield Difference("uncaptured", where, "a call of the view", "", "it was not called")


def odd_products(watch: Watch, where: Mapping[Seen, str]) -> list[Difference]:
    """Return, for a model without a plan, the products that ran in another dtype than most FLOPs did."""
    products = {seen: total for seen, total in watch.sums.items() if seen.product and seen.operands}
    flops: dict[str, int] = {}
    for seen, total in products.items():
        flops[seen.dtype] = flops.get(seen.dtype, 0) + total.flops
    if len(flops) < 2:
        return []
    most = next((dtype for dtype in flops if dtype in LOW_NAMES), max(flops, key=lambda dtype: flops[dtype]))
    found = []
    for seen, total in products.items():
        if seen.dtype != most:
            how = "backward" if seen.place.backward else "forward"
            why = f"{how}, where other products ran in {most}{f'; {seen.place.where}' if seen.place.where else ''}"
            found.append(Difference("dtype", where[seen], "", f"{seen.op} in {seen.dtype}", why, flops=total.flops))
    return found


@dataclass(frozen=True)
class Compiled:
    """What Inductor's record says of one graph.

    Attributes:
        graph: Which of the graphs that ran.
        nodes: Nodes of the emitted graph, casts among them, with one floating result.
        stored: How many of them are stored, each compared with its dtype in the plan.
        products: How many of these are kernels of a library, whose operands are compared too.
        fused: How many were fused away.
        loads: How often buffers of a dtype are loaded, in forward and backward.
        stores: How often buffers of a dtype are stored, in forward and backward.
    """

    graph: int
    nodes: int
    stored: int
    products: int
    fused: int
    loads: dict[str, int]
    stores: dict[str, int]

    def __str__(self) -> str:
        loads, stores = (", ".join(f"{n} {dtype}" for dtype, n in d.items()) for d in (self.loads, self.stores))
        return (
            f"graph {self.graph} was compiled by Inductor; by its record {self.stored} of {self.nodes} nodes and casts "
            f"are stored, {self.products} of them by kernels of a library, and compared; {self.fused} were fused away; "
            f"kernels load {loads or 'nothing'} and store {stores or 'nothing'}"
        )


def compiled_of(ledger: Ledger) -> Compiled | None:
    """Return what Inductor's record says of a graph that ran; None where there is no record."""
    if ledger.ran.kernels is None:
        return None
    both = [*ledger.ran.kernels[0], *ledger.ran.kernels[1]]
    nodes = [n for n in ledger.emitted.values() if n.op.startswith("call") and len(planned_dtypes(n)[1]) == 1]
    stored = {k.made_from: k for k in ledger.ran.kernels[0] if k.made_from in {n.name for n in nodes}}
    return Compiled(
        ledger.number, len(nodes), len(stored), sum(k.extern for k in stored.values()), len(nodes) - len(stored),
        _counted(d for k in both for d in k.loaded), _counted(k.stored for k in both),
    )  # fmt: skip


def compiled_otherwise(ledger: Ledger) -> Iterator[Difference]:
    """Yield the nodes that Inductor stores in another dtype than the plan's, or whose library kernel reads another."""
    for kernel in ledger.ran.kernels[0] if ledger.ran.kernels is not None else ():
        node = ledger.emitted.get(kernel.made_from)
        planned = planned_dtypes(node) if node is not None else ((), ())
        if len(planned[1]) != 1:
            continue
        key, stored = ledger.key(kernel.made_from), dtype_name(kernel.stored)
        if stored != planned[1][0]:
            yield Difference("dtype", key, planned[1][0], stored, "Inductor stores it so", ledger.number)
        loaded = {dtype_name(dtype) for dtype in kernel.loaded if dtype.is_floating_point}
        if kernel.extern and loaded - set(planned[0]):
            reads, ran = " ".join(sorted(set(planned[0]))), " ".join(sorted(loaded))
            yield Difference("dtype", key, reads, ran, f"{kernel.op}, as Inductor calls it", ledger.number)


def _counted(dtypes: Iterable[torch.dtype]) -> dict[str, int]:
    return dict(sorted(Counter(map(dtype_name, dtypes)).items()))
