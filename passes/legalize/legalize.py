"""Pass 1: bring a captured graph into the form that the rules are written for. Values do not change.

Before: einsum("bi,ij->bj", x, w)                    After: the permutes, views and bmm that it runs for these shapes
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import FakeTensor, OpOverload, enter_autocast, exit_autocast, is_composite, quiet_fakes
from ..contract.policy import Policy, op_override
from ..form import Ensures, Unit
from ..graph.notes import CAST_NORM, DECOMPOSE, SPLIT_LOSS, move_to, note, provenance
from ..graph.values import LOW_DTYPES, dtypes_of, keys, retyped, run
from ..ops import ops
from ..ops.facts import REDUCTIONS, rule_of
from ..ops.numbers import constant_of, equals
from ..ops.rules import COMPOSITE, row_of
from .inline import copy_body, put_in_place
from .layers import open_layers

logger = logging.getLogger("fxamp")
aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # as torch::Reduction has them


@dataclass(frozen=True)
class Legalize:
    """Bring one graph into the form that the rules are written for."""

    name: ClassVar = "legalize"
    ensures: ClassVar = Ensures.STRUCTURE
    policy: Policy

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Make the rewrites in this order, since one prepares for the next."""
        graph, policy = unit.graph, self.policy
        named = keys(graph.nodes) if policy.ops else {}  # what the policy overrides by name stays whole
        whole = {n for n in named if op_override(policy, ops.name(n)) or op_override(policy, named[n])}
        return {
            "number": fold_numbers(graph),
            "switch": drop_autocast_switches(graph),
            "field": index_fields(graph),
            "layer": open_layers(graph, unit.attribute, whole),
            "norm": cast_before_norms(graph),
            "loss": split_losses(graph, whole) if policy.level.keeps_sums_fp32 else 0,
            "composite": decompose_composites(graph, *unit.target, whole),
        }


def drop_autocast_switches(graph: Graph) -> int:
    """Erase the mode switches of inlined autocast regions, which colours replace; return how many."""
    switches = [n for n in graph.nodes if n.op == "call_function" and n.target in (enter_autocast, exit_autocast)]
    for node in reversed(switches):
        graph.erase_node(node)
    return len(switches)


def fold_numbers(graph: Graph) -> int:
    """Replace the nodes that carry what torch has made a constant of, by a guard, in place; return how many there were.

    Before: layer_norm(x, [8], eps=item), item: 1e-6        After: layer_norm(x, [8], eps=1e-6)
    """
    edits = 0
    for node in reversed([n for n in graph.nodes if n.op.startswith("call")]):
        number = constant_of(node)
        if number is None:
            continue
        put = functools.partial(_put, node, number)
        readers = [n for n in node.users if n.op != "output" and not row_of(n).higher_order]
        for reader in readers:
            reader.args, reader.kwargs = map_arg(reader.args, put), map_arg(reader.kwargs, put)
        if not node.users:
            graph.erase_node(node)
        edits += bool(readers)
    return edits


def _put(node: Node, number: Any, argument: Node) -> Any:
    return number if argument is node else argument


def index_fields(graph: Graph) -> int:
    """Replace reads of named fields of an op's result by reads by index, in place; return how many were replaced.

    Before: getattr(max(x, 1), "values")    After: getitem(max(x, 1), 0)
    """
    edits = 0
    for node in graph.nodes:
        results = node.args[0] if node.target is getattr else None
        schema = ops.schema_of(results) if isinstance(results, Node) and results.op.startswith("call") else None
        fields = [r.name for r in schema.returns] if schema is not None else []
        if len(fields) > 1 and node.args[1] in fields:
            node.target, node.args = operator.getitem, (results, fields.index(node.args[1]))
            edits += 1
    return edits


def cast_before_norms(graph: Graph) -> int:
    """Cast the operand of a norm to the low `dtype=` that user code passes to it, in place; return how many edits.

    A norm takes nothing wider than its `dtype=`, so in the user's program the cast does nothing; here its operand may
    be FP32. The same holds for a dtype that is read when the graph runs.

    Before: linalg_vector_norm(x, dtype=bfloat16)        After: linalg_vector_norm(to(x, bfloat16))
    """
    edits = 0
    for node in list(graph.nodes):
        dtype = ops.argument(node, "dtype") if row_of(node).never_narrows else None
        if not isinstance(dtype, Node) and dtype not in LOW_DTYPES:
            continue
        value: Any = node.args[0] if node.args else next(ops.operands(node)).node
        with graph.inserting_before(node):
            cast = graph.call_method("to", (value, dtype))
        cast.meta = provenance(node, CAST_NORM)
        if isinstance(gives := dtypes_of(node.meta.get("val")), torch.dtype):
            cast.meta["val"] = retyped(value.meta.get("val"), gives)
        names = ops.names_of(node)
        node.args = tuple(None if names[i : i + 1] == ("dtype",) else a for i, a in enumerate(node.args))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
        node.replace_input_with(value, cast)
        note(node, dtype_argument=None if isinstance(dtype, Node) else dtype)
        edits += 1
    return edits


def split_losses(graph: Graph, whole: Container[Node] = ()) -> int:
    """From O2 on: split every cross-entropy of FP32 over class indices without weights or smoothing; return how many.

    The logarithms are rounded where the errors of that kernel scatter on the device; the sum over examples is FP32, and
    the cast that it then needs is of the N picked numbers instead of the N x V logits.

    Before: cross_entropy_loss(logits: [N, V], target)
    After:  picked = nll_loss(log_softmax(logits), target, reduction none); to(picked: [N], f32).sum() / count
    """
    losses = [n for n in graph.nodes if row_of(n).splits and n not in whole]
    return sum(_split(graph, node) for node in losses)


def _split(graph: Graph, node: Node) -> bool:
    """Split a loss, if it is of the kind that can be split, and say whether it was."""
    logits = ops.argument(node, "self", ops.argument(node, "input"))  # as torch.nn.functional calls them
    target, ignored = ops.argument(node, "target"), ops.argument(node, "ignore_index", -100)
    scores, classes = (v.meta.get("val") if isinstance(v, Node) else None for v in (logits, target))
    if not isinstance(scores, FakeTensor) or not isinstance(classes, FakeTensor):
        return False
    reduction = ops.argument(node, "reduction", _MEAN)
    reduction = REDUCTIONS.index(reduction) if reduction in REDUCTIONS else reduction  # torch.nn.functional has names
    plain = ops.argument(node, "weight") is None and equals(ops.argument(node, "label_smoothing", 0.0), 0)
    plain = plain and isinstance(reduction, int) and not {"size_average", "reduce"} & node.kwargs.keys()
    # The loss of other logits has another dtype than FP32, and the program may read that dtype.
    if not plain or scores.dtype != torch.float32 or scores.dim() != 2 or classes.is_floating_point():
        return False

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(node):
            part = graph.call_function(op, args, kwargs)
        part.meta = provenance(node, SPLIT_LOSS)
        values, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with scores.fake_mode, torch.no_grad():
            part.meta["val"] = op(*values, **named)
        return part

    picked = call(aten.nll_loss.default, call(aten.log_softmax.int, logits, 1), target, None, _NONE, ignored)
    result = picked if reduction == _NONE else call(aten.sum.default, picked, dtype=torch.float32)
    if reduction == _MEAN:
        result = call(aten.div.Tensor, result, call(aten.sum.default, call(aten.ne.Scalar, target, ignored)))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


def decompose_composites(graph: Graph, device: str, low: torch.dtype | None = None, whole: Container[Node] = ()) -> int:
    """Replace ops without a colour of their own, but for `whole`, by what they call for the shapes at hand; count them.

    Those and their gradients are eager's: the op's own kernel is traced above autograd, one level deep, and composites
    among its ops in turn; what cannot be stays whole. Operands of several dtypes were captured under autocast to `low`.
    """
    edits = 0
    memo: dict[Any, Graph | None] = {}
    composites = [n for n in reversed(graph.nodes) if _is_composite(n, device) and n not in whole]
    while composites:
        node = composites.pop()
        body = _body_of(node, memo, functools.partial(torch.autocast, device, low))
        if body is None:
            continue
        with graph.inserting_before(node):
            new, result = copy_body(graph, body, node.all_input_nodes)
        for inner in new:
            move_to(inner, node, DECOMPOSE)
        if result in new:  # in a region of the author's its dtype is another one than the trace gave
            result.meta["val"] = node.meta["val"]
        put_in_place(graph, node, result)
        composites += [n for n in reversed(new) if _is_composite(n, device)]
        edits += 1
    return edits


def _is_composite(node: Node, device: str) -> bool:
    return node.op in ("call_function", "call_method") and rule_of(node, device)[1] == COMPOSITE


def _body_of(node: Node, memo: dict[Any, Graph | None], region: Callable[[], Any]) -> Graph | None:
    """Return what a composite calls, as a graph over its operands; None if there is none."""
    target: Any = node.target
    inputs = node.all_input_nodes
    values = [n.meta.get("val") for n in inputs]
    known = [v for v in values if isinstance(v, (FakeTensor, torch.SymInt, torch.SymFloat))]
    tensors = [v for v in known if isinstance(v, FakeTensor)]
    plain = isinstance(target, OpOverload) and not is_composite(target)
    if plain or row_of(node).recurrent or not tensors or len(known) != len(values):
        return None  # a recurrence would be unrolled over all time steps
    place = {n: i for i, n in enumerate(inputs)}
    key = (target, str(torch.fx.map_arg((node.args, dict(node.kwargs)), place.__getitem__)), *map(_shape, known))
    if key not in memo:
        mode, several = tensors[0].fake_mode, len({t.dtype for t in tensors if t.is_floating_point()}) > 1
        memo[key] = _trace(node, inputs, known, mode)
        if memo[key] is None and several:
            memo[key] = _trace(node, inputs, known, mode, region())
    return memo[key]


def _shape(value: Any) -> Any:
    fake = isinstance(value, FakeTensor)
    return (value.dtype, str(value.shape), str(value.stride()), value.device) if fake else str(value)


def _trace(node: Node, inputs: list[Node], examples: list[Any], *modes: Any) -> Graph | None:
    def call(*operands: Any) -> Any:
        return run(node, dict(zip(inputs, operands, strict=True)).__getitem__)

    # A function of torch's becomes the operators that it calls; if that is one composite, it is decomposed next.
    table: dict[Any, Any] = {node.target: node.target.decompose} if isinstance(node.target, OpOverload) else {}
    if table and row_of(node).splits:  # it names the dtype of its logits, which autocast then leaves
        table[aten.log_softmax.int] = lambda x, dim, dtype: aten._log_softmax.default(x, dim, False)
    tracer = make_fx(call, table, pre_dispatch=True, _allow_non_fake_inputs=True)
    with quiet_fakes(), contextlib.ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        try:
            body: GraphModule = tracer(*(v.detach() if isinstance(v, FakeTensor) else v for v in examples))
        except Exception as e:  # whatever a fake kernel raises: the op stays whole, and the report says so
            logger.debug("%s stays whole: %s", node.name, e)
            return None
    return None if any(n.op == "get_attr" for n in body.graph.nodes) else body.graph
