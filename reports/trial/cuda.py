"""Dtypes that the real CUDA autocast kernels give, on fake tensors, without a GPU.

Fake CUDA tensors change torch's state for good: run this in a process of its own.

The ops that fake CUDA tensors cannot run (they need a device guard) get the dtype of the rule table and are listed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from passes._torch import FakeTensorMode, pytree
from passes.contract.plan import Decision
from passes.graph.notes import SETTLE, is_inserted, note_of
from passes.graph.values import keys
from passes.ops import ops
from passes.ops.rules import FP32, LOW, lookup

LOW_DTYPE = torch.float16
POLICY = "O1,dtype=fp16,device=cuda"


class Oracle(Interpreter):
    """Runs a graph on fake CUDA tensors under CUDA autocast."""

    def __init__(self, module: torch.fx.GraphModule, mode: FakeTensorMode, read: dict[str, torch.dtype]) -> None:
        super().__init__(module)
        self.mode, self.dtypes, self.unrun = mode, dict[str, torch.dtype](), list[str]()
        self.read = read  # dtype arguments by node: what the author's code read of another value under autocast

    def fake(self, value: Any) -> Any:
        """Return a fake CUDA tensor in a tensor's place."""
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return value

    def run_node(self, n: Node) -> Any:
        """Run one node, and note the dtype that it gives."""
        if n.op == "get_attr":
            return self.fake(super().run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        made = self._called(n, args, dict(kwargs)) if n.op == "call_function" else super().run_node(n)
        if isinstance(made, Tensor):
            self.dtypes[n.name] = made.dtype
        return made

    def _called(self, n: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if ops.name(n) == "_assert_tensor_metadata":
            return None
        if n.name in self.read and "dtype" in kwargs:
            kwargs["dtype"] = self.read[n.name]  # the plain graph has what it read in FP32
        moved: Any = lambda a: torch.device("cuda", 0) if isinstance(a, torch.device) else a  # noqa: E731
        args, kwargs = pytree.tree_map(moved, (args, kwargs))
        try:
            return n.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # no device guard for this op in a build without CUDA, or no device: the table's dtype
            self.unrun.append(ops.name(n))
            kind = lookup(ops.name(n), "cuda")[1]
            first = next(a.dtype for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor))
            dtype = {LOW: LOW_DTYPE, FP32: torch.float32}.get(kind, first)
            like: Any = lambda v: self.fake(torch.empty(_sizes(v.shape), dtype=dtype, device="meta"))  # noqa: E731
            return pytree.tree_map_only(Tensor, like, n.meta["val"])


def _sizes(shape: Any) -> list[int]:
    """Return concrete sizes for a symbolic shape: those of the example."""
    return [int(s) if isinstance(s, int) else int(s.node.hint) for s in shape]


def dtypes_under_cuda(plain: Any, module: Any, args: Any, kwargs: Any) -> tuple[list[list[str]], list[str]]:
    """Return a row for each node, and the ops that fake tensors cannot run.

    A row is [key, op, the dtype under the real kernels, what the plan says of autocast, what the converted graph gives,
    the code of the reason].

    Args:
        plain: the model converted at O0.
        module: the same converted under POLICY.
        args: its example inputs.
        kwargs: its example inputs by keyword.
    """
    decided = decisions(module).values()
    read = {
        n.name: getattr(torch, d.autocast_dtype) for n, d in decided if d is not None and d.code == "dtype_argument"
    }
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", LOW_DTYPE)
        try:
            oracle = Oracle(plain, mode, read)
            inputs = [oracle.fake(t) for t in plain.call_spec.bind(args, kwargs)]
            oracle.run(*inputs, enable_io_processing=False)
        finally:
            torch.set_autocast_enabled("cuda", False)
    return beside(plain, module, oracle.dtypes), sorted(set(oracle.unrun))


def beside(plain: Any, module: Any, dtypes: dict[str, torch.dtype]) -> list[list[str]]:
    """Return a row for each node of floating dtype, as `dtypes_under_cuda` does.

    Args:
        plain: the model converted at O0.
        module: the same converted at O1.
        dtypes: what autocast gives the values of the first graph of `plain`, by the name of the node.
    """
    # By key: the graph of another capture has other names.
    decided, rows = decisions(module), []
    ours = {key: decided.get(node.name) for node, key in _keys(module).items()}
    for node, key in _keys(plain).items():
        expected, found = dtypes.get(node.name), ours.get(key)
        if expected is None or not expected.is_floating_point or found is None:
            continue
        got = str(found[0].meta["val"].dtype)[6:]
        autocast, code = (found[1].autocast_dtype, found[1].code) if found[1] is not None else (got, "")
        rows.append([key, ops.name(node), str(expected)[6:], autocast, got, code])
    return rows


def _keys(module: Any) -> dict[Node, str]:
    """Return keys that count the author's calls alone: decomposition makes calls of ops that the author calls too."""
    return keys(n for n in module.graph.nodes if note_of(n).made_by in ("", SETTLE))


def decisions(module: Any) -> dict[str, tuple[Node, Decision | None]]:
    """Return the author's nodes of a converted graph, by name, and what was decided on each.

    A name is the same in all graphs of one capture; a key counts the calls of an op, and more where one is decomposed.
    """
    decided = {d.key: d for d in module.plan.decisions}
    return {n.name: (n, decided.get(key)) for n, key in keys(module.graph.nodes).items() if not is_inserted(n)}
