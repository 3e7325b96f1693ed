"""A graph as plain data: what `copy.deepcopy` and `torch.save` of a converted module keep.

fx's own pickling traces the generated code again, which would freeze the training flag and drop the plan.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from passes._torch import HigherOrderOperator, OpOverload, overload_name, own_schema
from passes.contract.errors import PlanError
from passes.graph.notes import loaded, saved


class Ref(NamedTuple):
    """A reference to an earlier node, by name."""

    name: str


class Op(NamedTuple):
    """An operator of a torch library, by its qualified name and overload ("" for a higher-order operator)."""

    name: str
    overload: str


def graph_to_data(graph: Graph) -> list[Any]:
    """Return one tuple (op, name, target, args, kwargs, meta) per node."""
    return [
        (
            n.op,
            n.name,
            _target_to_data(n.target),
            _dump(n.args),
            _dump(n.kwargs),
            saved(n),
        )
        for n in graph.nodes
    ]


def graph_from_data(data: list[Any]) -> Graph:
    """Rebuild the graph, or raise PlanError if one of its operators does not exist in this process."""
    graph = Graph()
    nodes: dict[str, Node] = {}

    def load(value: Any) -> Any:
        if isinstance(value, Ref):
            return nodes[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(load(v) for v in value) if type(value) in (list, tuple) else _target_from_data(value)
        if isinstance(value, dict):
            return {k: load(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(load(value.start), load(value.stop), load(value.step))
        return value

    for op, name, target, args, kwargs, meta in data:
        node = graph.create_node(op, _target_from_data(target), load(args), load(kwargs), name=name)
        node.meta.update(loaded(meta))
        nodes[name] = node
    return graph


def _dump(value: Any) -> Any:
    """Return an argument with nodes replaced by references, and fx's immutable containers by plain ones."""
    if isinstance(value, Node):
        return Ref(value.name)
    if isinstance(value, slice):
        return slice(_dump(value.start), _dump(value.stop), _dump(value.step))
    if isinstance(value, dict):
        return {k: _dump(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_dump(v) for v in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields") and not isinstance(value, torch.Size):
        return tuple(_dump(v) for v in value)
    return _target_to_data(value)  # a call under autocast has its operator as an argument


def _target_to_data(target: Any) -> Any:
    if isinstance(target, OpOverload):
        return Op(own_schema(target).name, overload_name(target))
    if isinstance(target, HigherOrderOperator):
        return Op(target.name(), "")
    return target


def _target_from_data(target: Any) -> Any:
    if not isinstance(target, Op):
        return target
    space, _, name = target.name.rpartition("::")
    where = getattr(torch.ops, space) if space else torch.ops.higher_order
    try:
        return operator.attrgetter(f"{name}.{target.overload}" if target.overload else name)(where)
    except AttributeError as e:
        raise PlanError(
            f"the saved module calls {target.name}, which is not registered in this process. Import the library that "
            "defines it before loading."
        ) from e
