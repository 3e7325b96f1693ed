"""The state of one forward simulation: its inputs, and what earlier nodes established (colours, pins, upcasts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Graph, Node

from ...contract.policy import Policy, Target
from ...contract.reasons import Reason
from ...form import Choice
from ...graph.aliases import Aliases
from ...graph.bodies import Border
from ...graph.values import Dtypes, Inference, ValueDtype, keys
from ...ops import ops
from ...ops.rules import Rule
from .extremes import Extremes

if TYPE_CHECKING:
    from .strategies import AutocastRules

# The modules that each call was made in, as `values.module_types` gives them.
Stacks = Mapping[Node, Sequence[tuple[str, tuple[str, ...]]]]


@dataclass(frozen=True)
class Site:
    """A call to decide on, the name of its op, and the row of that.

    Attributes:
        kind: the kind by which it is coloured: at first that of the row on the device.
        floats: its floating operands, and those of unknown dtype.
        low: the low dtype here; an autocast region in the model's code may choose another one.
    """

    node: Node
    name: str
    row: Rule
    kind: str
    floats: tuple[ops.Operand, ...]
    low: Any

    def of_kind(self, kind: str) -> Site:
        """Return the same call with another kind."""
        return replace(self, kind=kind)

    def says(self, why: Reason, *, final: bool = False) -> Reason:
        """Return a reason with the kind of the call, unless it is another decider's."""
        return replace(why, kind=why.kind or self.kind, final=final or why.final)


class State:
    """The state of one run over a graph, which deciders read and seldom change.

    Attributes:
        rules: the strategy that decides: autocast's, or the policy's.
        policy: what the user asks for; the default one for autocast.
        stacks: the modules that each node was made in.
        named: the key of each node, if the policy may name nodes by it.
        border: the dtypes at the edges of the graph.
        pinned: representatives of alias sets that must stay FP32; they are kept from one run to the next.
        colours: the decisions so far.
        dtypes: the dtype of every value; the original one for values that the run has not reached.
        reference: the run that did what autocast does, if there was one.
        bodies: the runs through the bodies of higher-order ops.
        upcast: values that the user has upcast, and results of ops that only move them.
        extremes: values that the low dtype cannot hold.
        elsewhere: values on another kind of device than the policy's, of which autocast casts none.
        lacking: whether calls of this graph lack a low kernel; not shared, so that no plan depends on another.
    """

    def __init__(
        self, rules: AutocastRules, policy: Policy, target: Target, graph: Graph, original: Dtypes, infer: Inference,
        aliases: Aliases, *, stacks: Stacks | None = None, border: Border | None = None, reference: State | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.graph, self.original, self.infer, self.aliases = policy, graph, original, infer, aliases
        self.rules, self.stacks, self.border, self.target = rules, stacks or {}, border or Border(), target
        self.device, self.low = target
        self.named = keys(graph.nodes) if policy.ops else {}
        devices = {n: v.device.type for n in graph.nodes if isinstance(v := n.meta.get("val"), Tensor)}
        here = any(device == self.device and not n.op.startswith("call") for n, device in devices.items())
        self.elsewhere = {n for n, device in devices.items() if here and device != self.device}  # none if planned ahead
        self.lacking: dict[Any, bool] = {}
        self.pinned: set[Node] = set()
        self.islands: frozenset[Node] = frozenset()
        self.reference = reference
        self.restart()

    def restart(self) -> None:
        """Reset everything except the pinned alias sets."""
        self.colours: dict[Node, Choice] = {}
        self.dtypes: Dtypes = {**self.original, **self.border.inputs}
        self.upcast: set[Node] = set()
        self.bodies: dict[Node, State] = {}
        self.extremes = Extremes(self.low)

    def under_autocast(self, node: Node) -> ValueDtype:
        """Return the dtypes that autocast gives a value; None if that is not known."""
        return None if self.reference is None else self.reference.dtypes.get(node)
