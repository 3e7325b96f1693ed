"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Two simulations run forwards over the graph (`simulate.py`). The first does what `torch.autocast` would do on this
device: every node gets its `autocast` dtype. The second obeys the policy: its pins, what the author's own casts say,
and the level's reading of each rule.

Before: linear(x, w); softmax(linear)          no dtype decided
After:  linear: bfloat16, "low: matrix product"; softmax: bfloat16, "follow: its operand's dtype"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .bodies import Border
from .place import place
from .plan import Plan
from .policy import Policy
from .simulate import Colouring, Simulation
from .values import ANY, Aliases, Inference, SymbolicInference, module_types


@dataclass
class Assignment:
    """What was decided for one graph.

    Attributes:
        colours: the decision of every node that touches a floating value.
        dtypes: the dtype every value will have.
        original: the dtype every value had as captured.
        autocast: the dtype that autocast gives each node of `colours`.
        returned: the dtype that each output of the graph must have.
        infer: gives a node's output dtypes from those of its operands.
        symbolic: dtypes were inferred without shapes.
    """

    colours: dict[Node, Colouring]
    dtypes: dict[Node, Any]
    original: dict[Node, Any]
    autocast: dict[Node, torch.dtype]
    returned: dict[Node, Any]
    infer: Callable[[Node, Callable[[Node], Any]], Any]
    symbolic: bool


def assign_precision(
    graph: Graph, policy: Policy, original: dict[Node, Any], plan: Plan | None = None, border: Border | None = None
) -> Assignment:
    """Colour every node that touches a floating value.

    Args:
        graph: legalized, not changed.
        policy: with dtype and device filled in.
        original: the dtype of every value as captured.
        plan: colours of free values to take instead of choosing them.
        border: what the graph is given, and the graphs in it.

    Raises:
        PlanError: the plan stores a value low that a reader needs in FP32.
        PolicyError: two overrides contradict each other; an op is banned or, with unknown_ops="error", unknown.
    """
    symbolic = any(n.op == "placeholder" and original[n] is ANY for n in graph.nodes)
    infer: Any = SymbolicInference() if symbolic else Inference()
    aliases = Aliases(graph)
    plain = Policy("O0" if policy.level == "O0" else "O1", dtype=policy.dtype, device=policy.device)
    reference = Simulation(plain, graph, original, infer, aliases, autocast=True, border=border)
    reference.run()
    simulation = Simulation(policy, graph, original, infer, aliases, stacks=module_types(graph), border=border)
    simulation.run()
    while simulation.pin_conflicts():
        simulation.run()
    returned = simulation.returned()
    if not symbolic and policy.level != "O0":
        place(graph, policy, simulation, plan)
    autocast = {n: c.dtype for n, c in reference.colours.items()}
    return Assignment(simulation.colours, simulation.dtypes, original, autocast, returned, infer, symbolic)
