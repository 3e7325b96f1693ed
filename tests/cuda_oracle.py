"""Dtypes that the real CUDA autocast kernels give, on fake tensors, without a GPU. Run in a process of its own.

    python -m tests.cuda_oracle MODEL...

prints one JSON line per model: {"name": ..., "rows": [[key, op, expected, autocast, got, code], ...], "unrun": [...]}.
A row has the dtype that a node gives under the real kernels, what the plan says of autocast, what the converted graph
gives, and the code of the reason for that.

The ops that fake CUDA tensors cannot run (they need a device guard) get the dtype of the rule table and are listed.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from passes import ops
from passes._torch import FakeTensorMode, pytree
from passes.rules import FP32, LOW, lookup
from passes.values import keys
from tests.harness import converted, subject

LOW_DTYPE = torch.float16


class Oracle(Interpreter):
    """Runs a graph on fake CUDA tensors under CUDA autocast."""

    def __init__(self, module: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode, self.dtypes, self.unrun = mode, dict[str, torch.dtype](), list[str]()

    def fake(self, value: Any) -> Any:
        """Return a fake CUDA tensor in a tensor's place."""
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return value

    def run_node(self, n: Node) -> Any:
        if n.op == "get_attr":
            return self.fake(super().run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        made = self.call(n, args, dict(kwargs)) if n.op == "call_function" else super().run_node(n)
        if isinstance(made, Tensor):
            self.dtypes[n.name] = made.dtype
        return made

    def call(self, n: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if ops.name(n) == "_assert_tensor_metadata":
            return None
        moved: Any = lambda a: torch.device("cuda", 0) if isinstance(a, torch.device) else a  # noqa: E731
        args, kwargs = pytree.tree_map(moved, (args, kwargs))
        try:
            return n.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # no device guard for this op in a build without CUDA, or no device: the table's dtype
            self.unrun.append(ops.name(n))
            kind = lookup(ops.name(n), "cuda")[1]
            first = next(a.dtype for a in args if isinstance(a, Tensor))
            dtype = {LOW: LOW_DTYPE, FP32: torch.float32}.get(kind, first)
            like: Any = lambda v: self.fake(torch.empty(_sizes(v.shape), dtype=dtype, device="meta"))  # noqa: E731
            return pytree.tree_map_only(Tensor, like, n.meta["val"])


def _sizes(shape: Any) -> list[int]:
    """Return concrete sizes for a symbolic shape: those of the example."""
    return [int(s) if isinstance(s, int) else int(s.node.hint) for s in shape]


def compare(name: str) -> dict[str, Any]:
    """Run the oracle over one model and put its dtypes beside the plan's."""
    found = subject(name)
    plain, module = converted(name, "O0"), converted(name, "O1,dtype=fp16,device=cuda")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", LOW_DTYPE)
        try:
            oracle = Oracle(plain, mode)
            inputs = [oracle.fake(t) for t in plain.call_spec.bind(found.args, found.kwargs)]
            oracle.run(*inputs, enable_io_processing=False)
        finally:
            torch.set_autocast_enabled("cuda", False)
    ours = {key: n for n, key in keys(module.graph.nodes).items() if n.meta.get("fxamp") != "cast"}
    decisions = {d.key: d for d in module.plan.decisions}
    rows = []
    for node, key in keys(plain.graph.nodes).items():
        expected = oracle.dtypes.get(node.name)
        if expected is not None and expected.is_floating_point:
            decision, got = decisions.get(key), str(ours[key].meta["val"].dtype)[6:]
            autocast, code = (decision.autocast_dtype, decision.code) if decision is not None else (got, "")
            rows.append([key, ops.name(node), str(expected)[6:], autocast, got, code])
    return {"name": name, "rows": rows, "unrun": sorted(set(oracle.unrun))}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for model in sys.argv[1:]:
        print(json.dumps(compare(model)))
