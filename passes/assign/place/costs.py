"""Cost models: what the ops and casts among which the cut chooses cost, behind one interface (`contract/costs.py`).

ByteCosts    bytes moved, forward and backward, and a launch as so many bytes, by kind of device; the default
Penalties    other costs, and the errors of roundings
Frequencies  other costs, where a graph runs several times for each cast of a parameter
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from ...contract.costs import Candidate, CostModel, Net, PricedNet, Prices, Run
from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...graph.aliases import makes_view
from ...graph.notes import is_parameter
from ...graph.values import concrete_size, keys
from ...ops import ops
from ...ops.rules import row_of

PARTS = 1024  # of a unit, in which penalties are added: most are smaller than a byte


@dataclass(frozen=True)
class ByteCosts:
    """Bytes moved by casts and by ops of one graph, forward and backward.

    A cast reads and writes, as it does in eager. Inductor fuses most casts into the kernels on either side, where they
    cost nothing. With casts at no cost, O2 of one layer of BERT, GPT-2 and Llama moved 0.4, 0.3 and 2.1 % fewer bytes
    in Inductor's graphs, but they summed the residual stream in low. So casts cost the same for eager and Inductor.

    An op whose result leaves the graph in FP32 costs the same on both sides. Running it low would move fewer bytes, but
    it would only round a result that is then cast back to FP32.
    """

    device: str
    objective = "moves the fewest bytes"

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Price ops and casts by the bytes that they read and write."""
        both = [tuple(self.run(run, n.grad) for run in (n.low, n.fp32)) for n in nodes]
        kept = [(max(low, fp32) if n.returned else low, fp32) for n, (low, fp32) in zip(nodes, both, strict=True)]
        casts = [self.cast(net.value) for net in nets]
        return Prices(kept, [net.at(cast, cast) for net, cast in zip(nets, casts, strict=True)])

    def cast(self, value: Node) -> int:
        """Return the bytes of one cast of a value, or of its gradient: it reads and writes."""
        return DEVICES[self.device].launch + 6 * numel(value.meta.get("val"))

    def run(self, run: Run, grad: frozenset[Node]) -> int:
        """Return the bytes of an op; a view moves nothing, a cast is no op."""
        node, row = run.node, row_of(run.node)
        if row.view or makes_view(node) or row.is_cast:
            return 0
        moved = numel(node.meta.get("val")) + sum(numel(o.node.meta.get("val")) for o in ops.operands(node))
        backward = 2 if node in grad and not row.free_backward else 0
        return run.dtype.itemsize * moved * (1 + backward)


@dataclass(frozen=True)
class Penalties:
    """Adds to other costs what each rounding costs, in their unit.

    Attributes:
        costs: the others.
        values: by key of a node: rounding its result.
        casts: by key of a reader and of what it reads: the cast down of an FP32 value, for this reader alone. An input
            of a graph has its name for a key.
    """

    costs: CostModel
    values: Mapping[str, float]
    casts: Mapping[tuple[str, str], float]

    @property
    def objective(self) -> str:
        """That of the other costs."""
        return self.costs.objective

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Return the other prices and the penalties, all of them in parts of a unit."""
        prices = priced(self.costs, nodes, nets).times(PARTS)
        names = keys(nodes[0].node.graph.nodes)
        of_nodes = [
            (low + n.rounds * round(self.values.get(names[n.node], 0.0) * PARTS), fp32)
            for n, (low, fp32) in zip(nodes, prices.nodes, strict=True)
        ]
        reads = {(net.value, reader): read.times for net in nets for reader, read in net.reads.items()}
        of_reads = [
            PricedNet(value, (reader,), 0, charge)
            for (value, reader), n in reads.items()
            if (charge := n * round(self.casts.get((names.get(reader, ""), names.get(value, value.name)), 0.0) * PARTS))
        ]
        return replace(prices, nodes=of_nodes, nets=[*prices.nets, *of_reads])


@dataclass(frozen=True)
class Frequencies:
    """Multiplies other costs by how often a graph runs, and those of casts of parameters by how often these are made.

    A parameter whose cast is kept while a graph runs n times is `Frequencies(costs, runs=n)`.
    """

    costs: CostModel
    runs: int
    parameters: int = 1

    @property
    def objective(self) -> str:
        """That of the other costs."""
        return self.costs.objective

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Return the other prices, multiplied; the gradient of a parameter is cast in every run."""
        times = [self.parameters if is_parameter(net.value) else self.runs for net in nets]
        often = [
            replace(net, runs=(n * net.runs[0], self.runs * net.runs[1])) for n, net in zip(times, nets, strict=True)
        ]
        prices = priced(self.costs, nodes, often)
        return replace(prices, nodes=[(low * self.runs, fp32 * self.runs) for low, fp32 in prices.nodes])


def priced(costs: CostModel, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
    """Return the prices of a cost model.

    Raises:
        PolicyError: they are not one pair of integers of at least 0 for each node, and one for each net of these reads.
    """
    prices, name = costs.price(nodes, nets), type(costs).__name__
    if len(prices.nodes) != len(nodes):
        raise PolicyError(f"{name} prices {len(prices.nodes)} of {len(nodes)} nodes: each has a pair, low and FP32.")
    reads = {(net.value, reader) for net in nets for reader in net.reads}
    numbers: list[tuple[Any, Sequence[Any]]] = [(n.node, p) for n, p in zip(nodes, prices.nodes, strict=True)]
    for net in prices.nets:
        if strange := [r for r in net.readers if (net.value, r) not in reads]:
            raise PolicyError(f"{name} prices a read of {net.value} by {strange[0]}, which it was not asked for.")
        numbers.append((net.value, (net.up, net.down, *(n for n in net.alone if n is not None))))
    for node, of in numbers:
        for number in of:
            if type(number) is not int or number < 0:
                raise PolicyError(f"{name} prices {node} at {number!r}: a price is an integer of at least 0.")
    return prices


def numel(value: Any) -> int:
    """Return the number of floating elements of a value; symbolic sizes count as in the example inputs."""
    if isinstance(value, (tuple, list)):
        return sum(numel(v) for v in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0
    return math.prod(concrete_size(size) for size in value.shape)
