"""What Inductor compiled of a graph, by its own record: the buffers that it stores, and the products that it calls.

What a kernel computes between its loads and its stores lies in registers, in FP32 by Inductor's design: a node whose
value is not stored was fused away, and there is nothing to compare. All others are compared with the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from passes.contract.policy import dtype_name

from .differences import Difference
from .rows import Ledger, planned_dtypes


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
