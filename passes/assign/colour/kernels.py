"""Find out whether a device has a low kernel for an op, if that is not known beforehand: try it once.

Recurrent layers in FP16 need a CPU with FP16 arithmetic; a kernel may lack one of the two low dtypes for some
arguments; and nothing says which dtypes a custom op accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch import pytree
from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...graph.aliases import may_write
from ...graph.values import ELIGIBLE, concrete, described, run_first_step
from ...ops import ops
from ...ops.facts import lacks_low
from ...ops.rules import Rule, is_registered
from .simulate import Simulation


def lacks_low_kernel(run: Simulation, node: Node, row: Rule, low: torch.dtype) -> bool:
    """Say whether the device has no low kernel for an op: its row says so, or the op fails where it is tried.

    The op runs on zeros of the sizes in the graph, and the random state is restored. If the op fails in the original
    dtypes too, nothing is known about the low one.
    """
    name = ops.name(node)
    if lacks_low(node, row, run.device):
        return True
    if not (row.tries_low or "::" in name) or not DEVICES[run.device].is_here():
        return False
    key = (name, low, repr(torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None)))
    if key not in run.lacking:
        runs = _runs(node, lambda n: low if run.dtypes.get(n) in ELIGIBLE else None)
        run.lacking[key] = not runs and _runs(node, lambda n: None)
    return run.lacking[key]


def refuse_untold_writes(graph: Graph, device: str) -> None:
    """Run each op that has a registered rule once, in the original dtypes, and see whether it writes to its operands.

    A cast of an operand would be written instead, and the model would not see it.
    """
    tried: set[Any] = set()
    for node in graph.nodes:
        name = ops.name(node)
        key = name, repr(torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None))
        if not is_registered(name) or key in tried or not DEVICES[device].is_here():
            continue
        tried.add(key)
        written = next((n for n in _written(node) if n not in may_write(node)), None)
        if written is not None:
            raise PolicyError(
                f"register_rule({name!r}): the op writes to its operand {written.name}, and its schema does not say "
                f"so: {described(node)}. Declare it, as with "
                "custom_op(..., mutates_args=...), so that what it writes to is not a cast."
            )


def _written(node: Node) -> list[Node]:
    """Return the operands that a call on numbers other than zero is seen to write to."""
    try:
        values = _values(node, lambda n: None, 0.5)
        before = {n: copy.deepcopy(value) for n, value in values.items()}
        _call(node, values)
    except Exception:  # whatever a kernel raises that does not take these numbers
        return []
    leaves = [(n, *p) for n in values for p in zip(*map(pytree.tree_leaves, (values[n], before[n])), strict=True)]
    return [n for n, a, b in leaves if isinstance(a, torch.Tensor) and not torch.equal(a, b)]


def _runs(node: Node, dtype_of: Callable[[Node], torch.dtype | None]) -> bool:
    try:
        _call(node, _values(node, dtype_of, 0))
    except Exception:  # whatever a kernel raises that does not take the dtype
        return False
    return True


def _values(node: Node, dtype_of: Callable[[Node], torch.dtype | None], number: float) -> dict[Node, object]:
    """Return operands for a call, of the sizes in the graph: floats hold this number, integers zeros."""

    def filled(value: Any, dtype: torch.dtype | None) -> Any:
        tensor = concrete(value, dtype)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return tensor.fill_(number) if tensor.is_floating_point() else tensor.zero_()

    return {n: pytree.tree_map(partial(filled, dtype=dtype_of(n)), n.meta["val"]) for n in node.all_input_nodes}


def _call(node: Node, values: dict[Node, object]) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        run_first_step(node, values.__getitem__)
