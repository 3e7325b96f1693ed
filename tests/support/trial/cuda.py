"""Dtypes that the real CUDA autocast kernels give, on fake tensors, without a GPU.

Fake CUDA tensors change torch's state for good: run this in a process of its own.

The ops that fake CUDA tensors cannot run (they need a device guard) get the dtype of the rule table and are listed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import fxamp
from passes._torch import FakeTensorMode, pytree
from passes.contract.reasons import DEVIATIONS
from passes.graph.notes import is_ours, note_of
from passes.graph.values import keys
from passes.ops import ops
from passes.ops.rules import FP32, LOW, lookup

LOW_DTYPE = torch.float16
POLICY = "O1,dtype=fp16,device=cuda"


class Oracle(Interpreter):
    """Runs a graph on fake CUDA tensors under CUDA autocast."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.dtypes, self.unrun = dict[str, torch.dtype](), list[str]()

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
        if (first := first_tensor(made)) is not None:
            self.dtypes[n.name] = first.dtype
        return made

    def _called(self, n: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if ops.name(n) == "_assert_tensor_metadata":
            return None
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


def first_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or the first one that an op with several results gives."""
    return next((v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)), None)


def _sizes(shape: Any) -> list[int]:
    """Return concrete sizes for a symbolic shape: those of the example."""
    return [int(s) if isinstance(s, int) else int(s.node.hint) for s in shape]


def dtypes_under_cuda(
    plain: GraphModule, module: GraphModule, args: Any, kwargs: Any
) -> tuple[list[list[str]], list[str]]:
    """Return a row for each node, and the ops that fake tensors cannot run.

    A row is [key, op, the dtype under the real kernels, what the plan says of autocast, what the converted graph gives,
    the code of the reason].

    Args:
        plain: an exported model converted at O0.
        module: the same converted under POLICY.
        args: example inputs.
        kwargs: example inputs by keyword.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", LOW_DTYPE)
        try:
            oracle = Oracle(plain)
            inputs = [oracle.fake(t) for t in pytree.tree_leaves((args, kwargs))]
            oracle.run(*inputs, enable_io_processing=False)
        finally:
            torch.set_autocast_enabled("cuda", False)
    return rows_of(module, fxamp.plan_of(module), oracle.dtypes), sorted(set(oracle.unrun))


def rows_of(module: torch.nn.Module, plan: fxamp.Plan, dtypes: dict[str, torch.dtype]) -> list[list[str]]:
    """Return a row for each node of floating dtype, and for deviations with several results; as `dtypes_under_cuda`.

    Args:
        module: a converted graph.
        plan: what was decided on it.
        dtypes: what autocast gives the values of the graph that it was made of, by the name of the node.
    """
    graph: Any = module.graph
    decided, rows = {d.key: d for d in plan.decisions if not d.graph}, []
    for node, key in keys(n for n in graph.nodes if not is_ours(n)).items():
        expected = dtypes.get(node.name)
        if expected is None or not expected.is_floating_point or note_of(node).made_by:
            continue
        val: Any = first_tensor(node.meta["val"])
        got, decision = str(val.dtype)[6:], decided.get(key)
        autocast, code = (got, "") if decision is None else (decision.autocast_dtype, decision.code)
        if not isinstance(node.meta["val"], Tensor) and code not in DEVIATIONS:
            continue
        rows.append([key, ops.name(node), str(expected)[6:], autocast, got, code])
    return rows
