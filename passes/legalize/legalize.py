"""Pass 1: bring a captured graph into the form that the rules are written for. Values do not change.

Before: einsum("bi,ij->bj", x, w)                    After: the permutes, views and bmm that it runs for these shapes
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import FakeTensor, OpOverload, enter_autocast, exit_autocast, is_composite, quiet_fakes
from ..contract.policy import Policy
from ..form import Ensures, Unit
from ..graph.notes import DECOMPOSE, move_to, note, note_buffers
from ..graph.splice import copy_body, put_in_place
from ..ops import ops
from ..ops.facts import rule_of
from ..ops.rules import COMPOSITE, row_of
from .cast_norms import cast_before_norms
from .split_loss import split_losses

logger = logging.getLogger("fxamp")


@dataclass(frozen=True)
class Legalize:
    """Bring one graph into the form that the rules are written for.

    Attributes:
        policy: with dtype and device filled in.
    """

    name: ClassVar = "legalize"
    ensures: ClassVar = Ensures.STRUCTURE
    policy: Policy

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Drop switches, index fields, cast before norms, split losses, decompose; note buffers."""
        level, graph = self.policy.level, unit.graph
        splits = level.keeps_sums_fp32 and "cross_entropy_loss" not in dict(self.policy.ops)
        edits = {
            "switch": drop_autocast_switches(graph),
            "field": index_fields(graph),
            "norm": cast_before_norms(graph),
            "loss": split_losses(graph) if splits else 0,
        }
        edits["composite"] = decompose_composites(graph, self.policy.device or "cpu", self.policy.dtype)
        note_buffers(graph, unit.attribute)
        return edits


def drop_autocast_switches(graph: Graph) -> int:
    """Erase the mode switches of inlined autocast regions, which colours replace; return how many."""
    switches = [n for n in graph.nodes if n.op == "call_function" and n.target in (enter_autocast, exit_autocast)]
    for node in reversed(switches):
        graph.erase_node(node)
    return len(switches)


def index_fields(graph: Graph) -> int:
    """Replace reads of named fields of an op's result by reads by index, in place; return how many were replaced.

    Before: getattr(max(x, 1), "values")    After: getitem(max(x, 1), 0)
    """
    edits = 0
    for node in graph.nodes:
        made = node.args[0] if node.op == "call_function" and node.target is getattr else None
        schema = ops.schema_of(made) if isinstance(made, Node) and made.op.startswith("call") else None
        fields = [r.name for r in schema.returns] if schema is not None else []
        if len(fields) > 1 and node.args[1] in fields:
            node.target, node.args = operator.getitem, (made, fields.index(node.args[1]))
            edits += 1
    return edits


def decompose_composites(graph: Graph, device: str, low: torch.dtype | None = None) -> int:
    """Replace each op that has no colour of its own by the ops it calls for the shapes at hand, in place.

    The ops that it calls, and their gradients, are those that eager runs: the op's own kernel is traced above autograd,
    one level deep, and composites among its ops are decomposed in turn.

    Args:
        graph: changed in place.
        device: decides which ops are composites.
        low: the dtype of the autocast that operands of several dtypes were captured under; None for the device's own.

    Returns the number of ops decomposed. Those that cannot be stay whole.
    """
    edits = 0
    memo: dict[Any, Graph | None] = {}
    found = [n for n in reversed(graph.nodes) if _is_composite(n, device)]
    while found:
        node = found.pop()
        body = _body_of(node, memo, functools.partial(torch.autocast, device, low))
        if body is None:
            continue
        with graph.inserting_before(node):
            new, result = copy_body(graph, body, node.all_input_nodes)
        for made in new:
            move_to(made, node)
            note(made, made_by=DECOMPOSE)
        put_in_place(graph, node, result)
        found += [n for n in reversed(new) if _is_composite(n, device)]
        edits += 1
    return edits


def _is_composite(node: Node, device: str) -> bool:
    return node.op in ("call_function", "call_method") and rule_of(node, device)[1] == COMPOSITE


def _body_of(node: Node, memo: dict[Any, Graph | None], region: Callable[[], Any]) -> Graph | None:
    """Return what a composite calls, as a graph over its operands; None if there is none.

    A capture under autocast may give it operands of several dtypes, which its ops take together in such a region alone.
    """
    target: Any = node.target
    inputs = node.all_input_nodes
    values = [n.meta.get("val") for n in inputs]
    known = [v for v in values if isinstance(v, (FakeTensor, torch.SymInt))]
    tensors = [v for v in known if isinstance(v, FakeTensor)]
    if row_of(node).recurrent or not tensors or len(known) != len(values):
        return None  # a recurrence would be unrolled over all time steps
    if isinstance(target, OpOverload) and not is_composite(target):
        return None
    place = {n: i for i, n in enumerate(inputs)}
    key = (target, str(torch.fx.map_arg((node.args, dict(node.kwargs)), place.__getitem__)), *map(_shape, known))
    if key not in memo:
        mode, several = tensors[0].fake_mode, len({t.dtype for t in tensors if t.is_floating_point()}) > 1
        memo[key] = _trace(node, inputs, known, mode)
        if memo[key] is None and several:
            memo[key] = _trace(node, inputs, known, mode, region())
    return memo[key]


def _shape(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return str(value)
    return value.dtype, str(value.shape), str(value.stride()), value.device


def _trace(node: Node, inputs: list[Node], values: list[Any], *modes: Any) -> Graph | None:
    target: Any = node.target

    def run(*operands: Any) -> Any:
        given = dict(zip(inputs, operands, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    # A function of torch's becomes the operators that it calls; if that is one composite, it is decomposed next.
    table = {target: target.decompose} if isinstance(target, OpOverload) else {}
    tracer = make_fx(run, table, pre_dispatch=True, _allow_non_fake_inputs=True)
    with quiet_fakes(), contextlib.ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        try:
            body: GraphModule = tracer(*(v.detach() if isinstance(v, FakeTensor) else v for v in values))
        except Exception as e:  # whatever a fake kernel raises: the op stays whole, and the report says so
            logger.debug("%s stays whole: %s", node.name, e)
            return None
    return None if any(n.op == "get_attr" for n in body.graph.nodes) else body.graph
