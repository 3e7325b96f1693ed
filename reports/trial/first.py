"""The first node at which a converted graph differs from what `torch.autocast` gives the unrounded one."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import fxamp
from fxamp.trust.preserved import preserved
from passes.contract.policy import Policy
from passes.graph.notes import is_inserted
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
        return made


_PARTS = ("getitem", "slice", "select", "narrow")


def unequal(runs: Iterable[tuple[int, Record, Record]], plan: fxamp.Plan) -> tuple[str, str] | None:
    """Return the code and the key of the first node whose value differs, for the numbers of graphs and their records.

    The code is "" where the plan has no decision on it; None where no node of a graph differs.
    """
    for index, expected, got in runs:
        names = {n.name: key for n, key in (expected.names | got.names).items()}  # where both have a node, ours
        ours = {n.name for n in got.names}
        differs: dict[Node, bool] = {}  # by node, whether more differs than how it is stored
        for node in expected.names:
            a, b = expected.made.get(node.name), got.made.get(node.name)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a.double(), b.double()):
                # What is only stored low early is no difference as long as every reader rounds it.
                differs[node] = not torch.equal(a.to(b.dtype), b)
            elif isinstance(a, Tensor) and not a.is_complex() and node.name not in ours:
                differs[node] = False  # decomposed: what reads it shows whether it differs
            if not differs.get(node) and node is not expected.stopped:
                continue
            first = node
            while before := [n for n in first.all_input_nodes if n in differs and n is not first]:
                first = before[0]
            # A value that is held in another dtype is equal, and what reads it is not: that one was decided on.
            held = [n for n in first.all_input_nodes if _dtype(expected, n) != _dtype(got, n)]
            named = {d.key for d in plan.deviations if d.graph == index}
            first = next((n for n in held if names.get(n.name) in named), first)
            while ops.name(first) == "getitem" and isinstance(first.args[0], Node):
                first = first.args[0]  # what gave several values is what was decided on
            key, line = names[first.name], source(first)
            found = [d for d in plan.decisions if d.key == key and d.graph == index]
            found = found or [d for d in plan.decisions if (d.op, d.source) == (ops.name(first), line)]
            found = found or [d for d in plan.deviations if d.source == line]  # a part of what was decomposed
            return (found[0].code if found else ""), key
    return None


def _dtype(record: Record, node: Node) -> torch.dtype | None:
    made = record.made.get(node.name)
    return made.dtype if isinstance(made, Tensor) else None


class Compared(Protocol):
    """A model with its inputs, and the autocast that it is compared with."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def ambient(self) -> torch.autocast:
        """Return that autocast."""


def first_difference(found: Compared, plain: Any, module: Any, *, grad: bool = True) -> tuple[str, str]:
    """Return the code and the key of the first node at which a converted module differs from autocast.

    `plain` is the same model converted at O0. The code is "" where there is none.
    """
    with preserved(found.model), torch.set_grad_enabled(grad):
        # An inserted cast has no key: it is not in the plan.
        expected, got = Record(plain), Record(module, {n.name for n in module.graph.nodes if not is_inserted(n)})
        torch.manual_seed(0)
        with found.ambient(), contextlib.suppress(Stopped):
            expected.run(*_flat(plain, found), enable_io_processing=False)
    with preserved(found.model), torch.set_grad_enabled(grad), contextlib.suppress(Stopped):
        torch.manual_seed(0)
        got.run(*_flat(module, found), enable_io_processing=False)
    shown = unequal([(0, expected, got)], module.plan)
    if shown is not None:
        return shown
    return _inside([(0, expected, got)], module.plan)


def _inside(runs: Iterable[tuple[int, Record, Record]], plan: fxamp.Plan) -> tuple[str, str]:
    """Return the code and the key of the first deviation that is of a node which is not in both, where none differs."""
    known = {key for _, a, b in runs for n, key in a.names.items() if n.name in {m.name for m in b.names}}
    inside = next((d for d in plan.deviations if d.key not in known), None)
    return ("", "what no node shows") if inside is None else (inside.code, inside.key)


class Recorded:
    """A `torch.compile` backend that records each call of a graph: as Dynamo captured it, or converted to a policy."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy, self.graphs = policy, 0
        self.calls: list[tuple[int, Record]] = []  # with the number of the graph

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph."""
        index, author = self.graphs, {node.name for node in gm.graph.nodes}
        self.graphs += 1

        def inner(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
            return functools.partial(self._call, graph, index, author)

        if self.policy is None:
            return inner(gm, example_inputs)
        return fxamp.backend(self.policy, inner)(gm, example_inputs)

    def _call(self, graph: GraphModule, index: int, author: set[str], *args: Any) -> Any:
        record = Record(graph, author)
        self.calls.append((index, record))
        return record.run(*args, enable_io_processing=False)


def first_difference_at_calls(found: Compared, policy: Policy, *, grad: bool = True) -> tuple[str, str]:
    """Return the code and the key of the first node at which a model compiled under autocast differs from autocast.

    The code is "" where there is none.
    """
    expected, got = Recorded(), Recorded(policy)
    for backend in (expected, got):
        torch._dynamo.reset()
        compiled: Any = torch.compile(found.model, backend=backend)
        args, kwargs = copy.deepcopy((found.args, found.kwargs))
        with preserved(found.model), torch.set_grad_enabled(grad), found.ambient(), contextlib.suppress(Stopped):
            torch.manual_seed(0)
            compiled(*args, **kwargs)
    runs = [(index, theirs, ours) for (_, theirs), (index, ours) in zip(expected.calls, got.calls, strict=False)]
    plan = fxamp.plan_of(compiled)
    return unequal(runs, plan) or _inside(runs, plan)


def _flat(module: Any, found: Compared) -> list[Any]:
    args, kwargs = copy.deepcopy((found.args, found.kwargs))
    return module.call_spec.bind(args, kwargs)
