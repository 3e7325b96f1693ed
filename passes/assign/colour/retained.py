"""From O2 on: which values keep the FP32 that autocast gives them, since rounding them costs more than it saves.

- What a choice is made by: `argmin`, `topk`, `round`, a comparison. Rounded, another one is chosen.
- A small value: losses end in a few numbers, whose bytes are nothing and whose rounding is the loss's. So do the terms
  of its sum: that of their roundings is no mean of zero where they are alike.
- An accumulator: a value to which a loop adds, or whose logarithm of a sum of exponentials it takes, step by step. Each
  step rounds it anew, and rounds off what is added. A residual stream is none: each of its terms is another layer's.

All of that is found on the graph, of which only values count that are FP32 under autocast.

Before: d = sub(add(a, b: f32), c: bf16); argmin(d)         the difference and the sum run low
After:  the same; the difference and the sum are FP32
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...contract.reasons import Code, Reason
from ...graph.values import counted_size, module_path, own_frame
from ...ops import ops
from ...ops.rules import LOW, row_of
from .simulate import Simulation

SMALL = 1_024  # elements; a dynamic dimension counts as that many, and any where none is known to be dynamic
STEPS = 8  # a chain of more additions in one place of the program is a loop


def retained(run: Simulation) -> Mapping[Node, Reason]:
    """Return the calls that stay FP32 as under autocast, and why."""
    calls = (n for n in run.graph.nodes if n.op.startswith("call"))
    fp32 = dict.fromkeys(n for n in calls if run.under_autocast(n) == torch.float32)
    choosing = (n for n in run.graph.nodes if _chooses(n))
    return {
        **dict.fromkeys(_small(fp32), Code.SMALL("it has at most about a thousand elements")),
        **dict.fromkeys(_before(choosing, fp32), Code.CHOICE("another value would be chosen by it if it were rounded")),
        **dict.fromkeys(_accumulators(run, fp32), Code.ACCUMULATOR("a loop adds to it, step by step")),
    }


def _chooses(node: Node) -> bool:
    """Say whether a call gives a result that changes by steps, and that something reads."""
    row = row_of(node)
    if not row.chooses or not node.op.startswith("call"):
        return False
    if len(row.out) < 2 or not isinstance(node.meta.get("val"), (tuple, list)):
        return True
    return any(reader.op == "output" or reader.args[1] != 0 for reader in node.users)  # the indices, not the values


def _before(nodes: Iterator[Node], fp32: Mapping[Node, None]) -> set[Node]:
    """Return the FP32 values that a choice is computed from, back to what is low under autocast."""
    front = [n for node in nodes for n in node.all_input_nodes]
    out: set[Node] = set()
    while front:
        node = front.pop()
        if node in fp32 and node not in out:
            out.add(node)
            front += node.all_input_nodes
    return out


def _small(fp32: dict[Node, None]) -> set[Node]:
    """Return small values that are computed, not moved, and the terms of their sums, which nothing else reads."""
    inputs = next(iter(fp32)).graph.find_nodes(op="placeholder") if fp32 else []
    values = (n.meta.get("val", n.meta.get("example_value")) for n in inputs)
    sizes = (size for v in values for size in (v.shape if isinstance(v, Tensor) else [v]))
    # Without a dynamic dimension any may be the batch's, as in a step that is compiled for its sizes.
    most = SMALL if any(isinstance(size, torch.SymInt) for size in sizes) else 1
    out = {n for n in fp32 if row_of(n).commutes == "" and _size(n) <= most}
    for node in reversed(fp32):
        if node.users and all(reader in out and not row_of(reader).loss for reader in node.users):
            out.add(node)
    return out


def _size(node: Node) -> float:
    value = node.meta.get("val")
    return math.prod(map(counted_size, value.shape)) if isinstance(value, Tensor) else math.inf


def _accumulators(run: Simulation, fp32: Mapping[Node, None]) -> set[Node]:
    """Return the values on a path from one step of a loop to the next, of more than a few steps.

    The steps are calls of one op at one place of the program. A product with a weight, and what brings values of any
    size back into range, as a norm does, end a path: what was rounded before is not what is added to. The body of a
    `scan` or of a `while_loop` gives its state in FP32 anyway.
    """
    path = [n for n in fp32 if not row_of(n).bounded and row_of(n).kind(run.device) != LOW]
    place = {n: (ops.name(n), module_path(n), own_frame(n)) for n in path}
    often = {k for k, times in Counter(place.values()).items() if times > STEPS and k[2] is not None}
    steps: dict[Node, dict[Any, int]] = {}
    for node in path:
        longest: dict[Any, int] = {}
        for operand in node.all_input_nodes:
            for key, times in steps.get(operand, {}).items():
                longest[key] = max(times, longest.get(key, 0))
        if place[node] in often:
            longest[place[node]] = longest.get(place[node], 0) + 1
        steps[node] = longest
    loops = {key for longest in steps.values() for key, times in longest.items() if times > STEPS}
    return {n for n in path if place[n] in loops}
