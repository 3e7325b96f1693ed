"""The first node at which an emitted graph differs from what `torch.autocast` gives the captured one."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import fxamp
from fxamp.capture.call import current
from fxamp.capture.graph import copied
from fxamp.capture.graphs import graphs_of
from fxamp.observe.snapshot import fresh, preserved, same_random_state
from fxamp.view.view import runner_of
from passes._torch import pytree
from passes.contract.plan import Decision
from passes.contract.policy import Policy
from passes.graph.notes import is_ours
from passes.graph.values import keys, source
from passes.ops import ops


class Stopped(Exception):  # noqa: N818 - a signal between the two below, not an error
    """A node of a recorded graph raised."""


class Record(Interpreter):
    """Keeps what every node of the author's gave, assertions apart; where one raises, the rest is left out.

    What holds nothing yet, as `new_empty` and parts of it do, is not kept.
    """

    def __init__(self, module: GraphModule, author: set[str] | None = None) -> None:
        super().__init__(module)
        self.made: dict[str, Any] = {}
        self.versions: dict[str, tuple[Tensor, int]] = {}  # values as they stand, and the count of writes when made
        self.returned: list[Any] = []
        self.stopped: Node | None = None
        mine = [n for n in module.graph.nodes if author is None or n.name in author]
        self.names = keys(mine)
        self._unwritten: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        """Run one node; raises Stopped where it raises."""
        if ops.name(n).startswith("_assert"):
            return None
        try:
            made = super().run_node(n)
        except Exception as e:
            self.stopped = n
            raise Stopped from e
        if "empty" in ops.name(n) or (ops.name(n) in _PARTS and n.args[0] in self._unwritten):
            self._unwritten.add(n)
        elif isinstance(made, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(made):
            self.made[n.name] = made.detach().clone()  # as it was before anything writes to it
            self.versions[n.name] = made.detach(), made._version
        if n.op == "output":
            self.returned = pytree.tree_leaves(made)
        return made

    def is_written(self, name: str) -> bool:
        """Say whether something has written to the value of a node since it was made."""
        value, version = self.versions[name]
        return value._version != version


_PARTS = ("getitem", "slice", "select", "narrow")


@dataclass(frozen=True)
class Pair:
    """One call of a graph: as it was captured, under autocast, and as it was emitted.

    Attributes:
        plan: what was decided on this graph.
        expected: what the captured graph gave.
        got: what the emitted graph gave.
    """

    plan: fxamp.Plan
    expected: Record
    got: Record


def beside(captured: Any, emitted: GraphModule, plan: fxamp.Plan, args: Iterable[Any], context: Any) -> Pair:
    """Run a captured graph under autocast on copies of the inputs, and prepare the run of its emitted graph."""
    pair = Pair(plan, Record(captured), Record(emitted, {n.name for n in captured.graph.nodes}))
    with same_random_state(), context, contextlib.suppress(Stopped):
        pair.expected.run(*map(fresh, args), enable_io_processing=False)
    return pair


def first_difference(pairs: Iterable[Pair]) -> tuple[str, str]:
    """Return the code and the key of the first node whose value differs; the code is "" where none is planned.

    Where no node differs, it is the first deviation of a node that the captured graph has not.
    """
    pairs = list(pairs)
    found = next((shown for pair in pairs if (shown := _unequal(pair)) is not None), None)
    if found is not None:
        return found
    known = {key for pair in pairs for key in _common(pair).values()}
    inside = next((d for pair in pairs for d in pair.plan.deviations if d.key not in known), None)
    return ("", NOWHERE) if inside is None else (inside.code, inside.key)


NOWHERE = "what no node shows"


def _common(pair: Pair) -> dict[str, str]:
    """Return the keys of the nodes that are in both graphs."""
    ours = {n.name for n in pair.got.names}
    return {n.name: key for n, key in pair.expected.names.items() if n.name in ours}


def _unequal(pair: Pair) -> tuple[str, str] | None:
    expected, got = pair.expected, pair.got
    ours = {n.name for n in got.names}
    differs: dict[Node, bool] = {}  # by node, whether more differs than how it is stored
    for node in expected.names:
        a, b = expected.made.get(node.name), got.made.get(node.name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a.double(), b.double()):
            # What is only stored low early is no difference as long as every reader rounds it.
            differs[node] = not torch.equal(a.to(b.dtype), b)
        elif isinstance(a, Tensor) and not a.is_complex() and node.name not in ours:
            differs[node] = False  # decomposed: what reads it shows whether it differs
        if differs.get(node) or node is expected.stopped:
            return _decided(pair, node, differs)
    returned = zip(pytree.tree_leaves(expected.graph.output_node().args), expected.returned, got.returned, strict=False)
    unlike = (n for n, a, b in returned if isinstance(a, Tensor) and not torch.equal(a.double(), b.double()))
    return next((_decided(pair, n, differs) for n in unlike), None)  # nothing rounds it, and it may have been written


def _decided(pair: Pair, first: Node, differs: Iterable[Node]) -> tuple[str, str]:
    """Return the code and the key of the decision behind a node that differs."""
    expected, got, plan = pair.expected, pair.got, pair.plan
    cause = _cause(pair, first.name)
    if cause is not None:
        return cause.code, cause.key
    names = {n.name: key for n, key in (expected.names | got.names).items()}  # where both have a node, ours
    while True:
        if ops.name(first) == "getitem" and isinstance(first.args[0], Node):
            first = first.args[0]  # what gave several values is what was decided on
        before = [n for n in first.all_input_nodes if n in differs and n is not first]
        if not before:
            break
        first = before[0]
    key, line = names[first.name], source(first)
    found = [d for d in plan.decisions if d.key == key and not d.graph]
    found = found or [d for d in plan.decisions if (d.op, d.source) == (ops.name(first), line)]
    found = found or [d for d in plan.deviations if d.source == line]  # a part of what was decomposed
    return (found[0].code if found else ""), key


def _cause(pair: Pair, name: str) -> Decision | None:
    """Return the nearest deviation in what a value is computed from, by way of what is not known to be as expected.

    A value that is held in another dtype is equal, and what reads it may not be.
    """
    graph: Any = pair.got.module.graph
    by_key = {d.key: d for d in pair.plan.deviations if not d.graph}
    named = {n: by_key.get(key) for n, key in keys(n for n in graph.nodes if not is_ours(n)).items()}
    start = [n for n in graph.nodes if n.name == name]
    waiting = collections.deque(start or graph.output_node().all_input_nodes)  # the body of a region is inlined
    seen = {*waiting}
    while waiting:
        node = waiting.popleft()
        if (found := named.get(node)) is not None:
            return found
        unlike = [n for n in node.all_input_nodes if n not in seen and not _is_as_expected(pair, n.name)]
        seen.update(unlike)
        waiting += unlike
    return None


def _is_as_expected(pair: Pair, name: str) -> bool:
    a, b = pair.expected.made.get(name), pair.got.made.get(name)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)):
        return False
    return not any(record.is_written(name) for record in (pair.expected, pair.got))


@dataclass
class Calls:
    """An inner backend that runs each graph that it is given node by node, and beside it the captured one.

    Attributes:
        context: makes what the captured graphs run in.
        module: what has it as its inner backend: a view, or what `torch.compile` returned.
        pairs: one for each call of a graph, in order.
    """

    context: Callable[[], Any]
    module: Any = None
    pairs: list[Pair] = field(default_factory=list)
    captured: list[GraphModule] = field(default_factory=list)  # by torch.compile, of which fxamp keeps none

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        return functools.partial(self._call, gm, len(self.captured) - 1)

    def _call(self, gm: GraphModule, index: int, *args: Any) -> Any:
        captured, plan = self._of_compiled(gm, index) if self.captured else self._of_view()
        if captured is None:
            return gm(*args)
        self.pairs.append(beside(captured, gm, plan, args, self.context()))
        return self.pairs[-1].got.run(*args, enable_io_processing=False)

    def _of_view(self) -> tuple[GraphModule | None, Any]:
        """Return the captured graph of the call that is under way, and its plan; None where it has no op."""
        call = current()
        if self.module is None or call is None or call.ran[-1] < 0:
            return None, None
        graph = runner_of(self.module).graphs[call.ran[-1]]
        return graph.captured, graph.plan

    def _of_compiled(self, gm: GraphModule, index: int) -> tuple[GraphModule, fxamp.Plan]:
        names = [n.name for n in gm.graph.nodes]
        found = [g.plan for g in graphs_of(self.module) if [n.name for n in g.emitted.graph.nodes] == names]
        return self.captured[index], found[-1]

    def of_view(self, model: torch.nn.Module, args: Any, kwargs: Any, policy: Policy | str) -> list[Pair]:
        """Call a new view of a model, and return a pair for each graph that ran."""
        self.module = fxamp.convert(model, args, kwargs, policy=policy, backend=self, check=False)
        return self._called(model, args, kwargs)

    def of_compiled(self, model: torch.nn.Module, args: Any, kwargs: Any, policy: Policy | str) -> list[Pair]:
        """Do the same with a model compiled by `torch.compile`, called in the context."""

        def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            self.captured.append(copied(gm))
            return fxamp.backend(policy, self)(gm, example_inputs)

        self.module = torch.compile(model, backend=backend)
        with self.context():
            return self._called(model, args, kwargs)

    def _called(self, model: torch.nn.Module, args: Any, kwargs: Any) -> list[Pair]:
        args, kwargs = pytree.tree_map(fresh, (args, kwargs))
        with preserved(model), contextlib.suppress(Stopped):
            torch.manual_seed(0)
            self.module(*args, **kwargs)
        return self.pairs
