"""One way to run an emitted graph node by node, and one to see each op that is dispatched.

Before: an interpreter and a dispatch mode for each diagnostic
After:  Run(graph, call).start(*inputs): `call(run, node)` runs each call, and may look at it, or run it otherwise
        with Ops(op): `op(func, args, kwargs)` runs each op, forward, backward and outside of graphs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from passes._torch import pytree
from passes.graph.notes import is_inserted

from .._torch import TorchDispatchMode, storage_id


class Run(Interpreter):
    """Runs an emitted graph.

    Args:
        graph: as emitted.
        call: runs each call; None runs it as it is.
        keeps: values stay for as long as the run takes, for those who ask for them again.
    """

    def __init__(
        self, graph: GraphModule, call: Callable[[Any, Node], Any] | None = None, *, keeps: bool = False
    ) -> None:
        super().__init__(graph, garbage_collect_values=not keeps)
        self._call = call

    def start(self, *inputs: Any) -> Any:
        """Run the graph, and return what it returns."""
        return self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        return self.value_of(n) if self._call is None or not n.op.startswith("call") else self._call(self, n)

    def value_of(self, n: Node) -> Any:
        """Run a node as it is, and return its value."""
        return super().run_node(n)

    def call(self, n: Node, args: Any, kwargs: Any) -> Any:
        """Run a call on other operands."""
        return getattr(self, n.op)(n.target, args, kwargs)

    def before_casts(self, n: Node) -> Any:
        """Return a value that has been computed, as it was before casts of fxamp."""
        while is_inserted(n):
            n = n.all_input_nodes[0]
        return self.env[n]


class Ops(TorchDispatchMode):
    """Lets somebody run each op that is dispatched while it is on."""

    def __init__(self, op: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op = op

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._op(func, args, kwargs or {})


class StorageReads(Ops):
    """Notes, in `storages`, the ids of the storages that ops inside read; an op that only makes a view reads none."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.storages: set[int] = set()

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = func(*args, **kwargs)
        read, made = ({storage_id(t) for t in pytree.tree_leaves(values) if isinstance(t, Tensor)}
                      for values in ((args, kwargs), outputs))  # fmt: skip
        if not read <= made:
            self.storages |= read
        return outputs
