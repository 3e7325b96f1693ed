"""Pass 1: bring a captured graph into the form the rules speak of. Values do not change.

Before: wrap_with_set_grad_enabled(False, body, x)   After: a = is_grad_enabled(); set_grad(False); ...; set_grad(a)
Before: einsum("bi,ij->bj", x, w)                    After: the permutes, views and bmm that it runs for these shapes
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import FakeTensor, enter_autocast, exit_autocast, quiet_fakes
from ..graph.aliases import SET_GRAD
from ..notes import DECOMPOSE, move_to, note, note_of
from ..ops import ops
from ..ops.facts import rule_of
from ..ops.rules import COMPOSITE, row_of

logger = logging.getLogger("fxamp")

_CONSTANTS = "_fxamp."  # where the front ends put what a graph refers to beside the model


def inline_regions(graph: Graph, constants: dict[str, Any]) -> int:
    """Replace the exporter's grad-mode and autocast regions by their bodies; return how many.

    Either becomes a switch before and after it. What an autocast region says is also noted on its nodes,
    for the colours that take the switches' place.

    Args:
        graph: changed in place.
        constants: what get_attr targets of the form `_fxamp.NAME` refer to; bodies go, what they hold comes.
    """
    edits = 0
    regions = [n for n in graph.nodes if _is_region(n)]
    while regions:
        regions += _inline(graph, regions.pop(), constants)
        edits += 1
    return edits


def drop_autocast_switches(graph: Graph) -> int:
    """Erase the switches of inlined autocast regions, whose place the colours take; return how many."""
    switches = [n for n in graph.nodes if n.op == "call_function" and n.target in (enter_autocast, exit_autocast)]
    for node in reversed(switches):
        graph.erase_node(node)
    return len(switches)


def _is_region(node: Node) -> bool:
    return node.op == "call_function" and row_of(node).switches != ""


def _inline(graph: Graph, node: Node, constants: dict[str, Any]) -> list[Node]:
    """Replace one region by its body; return the regions inside it."""
    settings: list[Any] = list(node.args)
    at = next(i for i, a in enumerate(settings) if isinstance(a, Node))
    settings, holder, operands = settings[:at], settings[at], settings[at + 1 :]
    body: GraphModule = constants[str(holder.target).removeprefix(_CONSTANTS)]
    region = note_of(node).region
    leave: Callable[..., Any]
    with graph.inserting_before(node):
        if row_of(node).switches == "grad":
            leave, entered = SET_GRAD, graph.call_function(torch.is_grad_enabled)
            graph.call_function(SET_GRAD, tuple(settings))
        else:
            device, dtype, enabled, _ = settings
            region = (str(device), bool(enabled), dtype)
            leave, entered = exit_autocast, graph.call_function(enter_autocast, tuple(settings))
        copied, result = _copy_body(graph, body.graph, operands)
        graph.call_function(leave, (entered,))
    for new in copied:
        if region is not None and note_of(new).region is None:
            note(new, region=region)
        if new.op == "get_attr":
            held = functools.reduce(getattr, str(new.target).split("."), body)
            new.target = _lift(f"{holder.name}_{new.target}", held, constants)
    _replace(graph, node, result)
    if not holder.users:
        graph.erase_node(holder)
        if not any(n.op == "get_attr" and n.target == holder.target for n in graph.nodes):
            del constants[str(holder.target).removeprefix(_CONSTANTS)]
    return [new for new in copied if _is_region(new)]


def _lift(name: str, value: Any, constants: dict[str, Any]) -> str:
    """Keep what a body held under a name of its own; return the get_attr target."""
    name = name.replace(".", "_")
    while constants.setdefault(name, value) is not value:
        name += "_"
    return _CONSTANTS + name


def _copy_body(graph: Graph, body: Graph, operands: list[Any]) -> tuple[list[Node], Any]:
    """Copy a body to where the graph inserts, over these operands; return the new nodes and what it returns."""
    copied: dict[Node, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), operands, strict=True))
    new = []
    for inner in body.nodes:
        if inner.op not in ("placeholder", "output"):
            copied[inner] = graph.node_copy(inner, copied.__getitem__)
            new.append(copied[inner])
    return new, torch.fx.map_arg(body.output_node().args[0], copied.__getitem__)


def _replace(graph: Graph, node: Node, result: Any) -> None:
    """Let the readers of a node read what it is replaced by, item by item where that is several."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)


def index_fields(graph: Graph) -> int:
    """Read the fields of what an op returns by index, as unpacking does, in place; return how many were named.

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


def decompose_composites(graph: Graph, device: str) -> tuple[int, list[str]]:
    """Replace each op that has no colour of its own by the ops it calls for the shapes at hand, in place.

    What it calls, and the gradient of that, is what eager runs: the op's own kernel is traced above autograd, one level
    deep, and what is a composite again is decomposed in turn.

    Returns the number of ops decomposed and, by name, those that cannot be and stay whole.
    """
    edits, kept = 0, []
    memo: dict[Any, Graph | None] = {}
    found = [n for n in reversed(graph.nodes) if _is_composite(n, device)]
    while found:
        node = found.pop()
        body = _body_of(node, memo)
        if body is None:
            kept.append(ops.name(node))
            continue
        with graph.inserting_before(node):
            new, result = _copy_body(graph, body, node.all_input_nodes)
        for made in new:
            move_to(made, node)
            note(made, made_by=DECOMPOSE)
        _replace(graph, node, result)
        found += [n for n in reversed(new) if _is_composite(n, device)]
        edits += 1
    logger.debug("decompose_composites: %d edits, %d kept whole", edits, len(kept))
    return edits, kept


def _is_composite(node: Node, device: str) -> bool:
    return node.op in ("call_function", "call_method") and rule_of(node, device)[1] == COMPOSITE


def _body_of(node: Node, memo: dict[Any, Graph | None]) -> Graph | None:
    """Return what a composite calls, as a graph over its operands; None where that cannot be had."""
    target: Any = node.target
    inputs = node.all_input_nodes
    values = [n.meta.get("val") for n in inputs]
    known = [v for v in values if isinstance(v, (FakeTensor, torch.SymInt))]
    tensors = [v for v in known if isinstance(v, FakeTensor)]
    if row_of(node).recurrent or not tensors or len(known) != len(values):
        return None  # of a recurrence the graph would have each step of time
    if isinstance(target, torch._ops.OpOverload) and not torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return None
    place = {n: i for i, n in enumerate(inputs)}
    key = (target, str(torch.fx.map_arg((node.args, dict(node.kwargs)), place.__getitem__)), *map(_shape, known))
    if key not in memo:
        memo[key] = _trace(node, inputs, known, tensors[0].fake_mode)
    return memo[key]


def _shape(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return str(value)
    return value.dtype, str(value.shape), str(value.stride()), value.device


def _trace(node: Node, inputs: list[Node], values: list[Any], mode: Any) -> Graph | None:
    target: Any = node.target

    def run(*operands: Any) -> Any:
        given = dict(zip(inputs, operands, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    # A function of torch's becomes the operators that it calls; if that is one composite, it is decomposed next.
    table = {target: target.decompose} if isinstance(target, torch._ops.OpOverload) else {}
    tracer = make_fx(run, table, pre_dispatch=True, _allow_non_fake_inputs=True)
    with quiet_fakes(), mode:
        try:
            body: GraphModule = tracer(*(v.detach() if isinstance(v, FakeTensor) else v for v in values))
        except Exception as e:  # whatever a fake kernel raises: the op stays whole, and the report says so
            logger.debug("%s stays whole: %s", node.name, e)
            return None
    return None if any(n.op == "get_attr" for n in body.graph.nodes) else body.graph


def loosen_assertions(graph: Graph, recoloured: Callable[[Node], bool]) -> int:
    """Drop the device from the exporter's assertions, for a module can be moved, and the dtype where it has changed.

    Before: _assert_tensor_metadata(x, None, None, float32, device=cpu)
    After:  _assert_tensor_metadata(x, None, None)
    """
    edits = 0
    for node in graph.nodes:
        if ops.name(node) != "_assert_tensor_metadata" or not isinstance(node.args[0], Node):
            continue
        before = (node.args, node.kwargs)
        dropped = {"device"} | ({"dtype"} if recoloured(node.args[0]) else set())
        node.args = node.args[:3] if "dtype" in dropped else node.args
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in dropped}
        edits += (node.args, node.kwargs) != before
    return edits
