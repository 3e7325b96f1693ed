"""What ran, as rows of plain data: where, in which dtypes, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from passes.contract.plan import Decision
from passes.graph.notes import is_inserted
from passes.runtime.casts import again

from ..observe.places import node_keys
from ..observe.watch import Dtypes, Place, Ran, Seen, Sum, Watch, dtype_of, dtypes_in


@dataclass(frozen=True)
class Row:
    """Ops of one kind at one place.

    Attributes:
        where: The key of a node in the plan; for code outside of all graphs the line, or the path of the module.
        phase: "forward", "backward", or "optimizer and scaling".
        op: What was dispatched; in a row that is planned, the op of the decision.
        operands: Dtypes of its floating operands.
        results: Dtypes of its floating results.
        count: How often it ran.
        flops: Floating-point operations, by torch's formulas.
        bytes: Bytes that it read and wrote.
        casts: How many of them were casts.
        cast_bytes: Bytes that these read and wrote.
        graph: Which graph of the plan it is in, -1 outside of all.
        product: It is a matrix product, a convolution or an attention.
        module: The path of the module, where it is known.
        line: The user's line, for code outside of all graphs.
    """

    where: str
    phase: str
    op: str
    operands: Dtypes
    results: Dtypes
    count: int = 1
    flops: int = 0
    bytes: int = 0
    casts: int = 0
    cast_bytes: int = 0
    graph: int = -1
    product: bool = False
    module: str = ""
    line: str = ""

    @property
    def dtype(self) -> str:
        """The dtype that it ran in: that of its operands, and of a product that of the first."""
        return dtype_of(self.operands or self.results, self.product)


@dataclass(frozen=True)
class Ledger:
    """One graph that ran, beside its decisions.

    Attributes:
        number: its number among the graphs that ran.
        ran: what ran.
        emitted: the nodes of the graph as it was emitted, by name.
        keys: the key of each node, by name; that of the first reader for a cast.
        decisions: what was decided, by key.
    """

    number: int
    ran: Ran
    emitted: Mapping[str, Node]
    keys: Mapping[str, str]
    decisions: Mapping[str, Decision] = field(repr=False)

    def key(self, name: str) -> str:
        """Return the key of a node."""
        return self.keys.get(name, name)


def ledgers_of(watch: Watch) -> tuple[Ledger, ...]:
    """Return the graphs that ran, each beside its decisions."""
    return tuple(_ledger(number, ran) for number, ran in enumerate(watch.graphs))


def _ledger(number: int, ran: Ran) -> Ledger:
    emitted = ran.known.emitted.graph
    keys = {n.name: key for n, key in node_keys(emitted).items()}
    decisions = {d.key: d for d in ran.known.plan.decisions if not d.graph}
    return Ledger(number, ran, {n.name: n for n in emitted.nodes}, keys, decisions)


def rows_of(watch: Watch, ledgers: tuple[Ledger, ...]) -> tuple[Row, ...]:
    """Return what was seen; ops that one place runs alike are one row."""
    merged: dict[Row, Sum] = {}
    for seen, s in watch.sums.items():
        found = merged.setdefault(_row(seen, ledgers), Sum())
        found.count, found.flops, found.bytes = found.count + s.count, found.flops + s.flops, found.bytes + s.bytes
        found.casts, found.cast_bytes = found.casts + s.casts, found.cast_bytes + s.cast_bytes
    return tuple(replace(row, **vars(s)) for row, s in merged.items())


def _row(seen: Seen, ledgers: tuple[Ledger, ...]) -> Row:
    place = seen.place
    return Row(
        where_of(place, ledgers), _phase(place), seen.op, seen.operands, seen.results, graph=place.graph,
        product=seen.product, module=place.module, line=place.where if place.kind == "outside" else "",
    )  # fmt: skip


def _phase(place: Place) -> str:
    if place.backward:
        return "backward"
    return "forward" if place.kind != "own" else "loss, scaling and optimizer"


def where_of(place: Place, ledgers: tuple[Ledger, ...]) -> str:
    """Return how a place is called."""
    if place.kind == "node":
        return ledgers[place.graph].key(place.where)
    if place.kind == "region":
        return f"(graph {place.graph}, compiled by {ledgers[place.graph].ran.by})"
    if place.kind == "outside":
        return place.module or place.where
    return {"gradients": "(gradients)", "own": "(loss, scaling and optimizer)"}[place.kind]


def planned_rows(ledgers: Iterable[Ledger]) -> tuple[Row, ...]:
    """Return what was planned for the graphs that ran: a row for each decision, and for each cast."""
    made: list[Row] = []
    for ledger in ledgers:
        at, calls = ledger.number, ledger.ran.calls
        for name, node in ledger.emitted.items():
            key, dtypes = ledger.key(name), planned_dtypes(node)
            decision = ledger.decisions.get(key)
            if is_inserted(node):
                casts = calls if is_cast(node) else 0
                made.append(Row(key, "forward", "cast", *dtypes, calls, casts=casts, graph=at))
            elif decision is not None:
                module = decision.module_path
                made.append(Row(key, "forward", decision.op, *dtypes, calls, graph=at, module=module))
    return tuple(made)


def is_cast(node: Node) -> bool:
    """Say whether a node is a cast that the plan counts: one of a storage of its own."""
    return is_inserted(node) and node.target is not again


def planned_dtypes(node: Node) -> tuple[Dtypes, Dtypes]:
    """Return the dtypes of operands and results that a node of an emitted graph has by its plan."""
    values = [n.meta.get("val", n.meta.get("example_value")) for n in node.all_input_nodes]
    return dtypes_in(values), dtypes_in(node.meta.get("val"))
