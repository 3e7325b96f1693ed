"""Where gradients flow: the grad mode of each call, and the values that a trainable parameter reaches.

And which ops may read one cast of a value, or one storage of several casts, as the policy shares casts. Readers of one
cast have their gradients summed in its dtype. Readers of casts that share a storage have them cast one by one, and
summed in the dtype of the value, as if each had a copy of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import INFERENCE, SET_GRAD, enter_autocast, exit_autocast
from ..contract.devices import DEVICES
from ..ops.rules import row_of
from ..runtime.casts import cast_weight
from ..runtime.regions import grad_mode
from .aliases import Aliases, may_write
from .notes import is_parameter, note_of
from .values import concrete_size

SWITCHES = (grad_mode, SET_GRAD, enter_autocast, exit_autocast)  # what switches a mode


def grad_modes(graph: Graph) -> dict[Node, tuple[bool | None, int]]:
    """Return, for each node, the grad mode (None: the caller's) and how many switches of other modes are before it."""
    mode: bool | None = None
    switches = 0
    before, out = dict[Any, bool | None](), dict[Node, tuple[bool | None, int]]()
    for node in graph.nodes:
        if node.target in (grad_mode, INFERENCE[0]):
            before[node] = mode
        if node.target in (SET_GRAD, *INFERENCE):
            given = before.get(node.args[0]) if isinstance(node.args[0], Node) else bool(node.args[0])
            mode = not given if node.target is INFERENCE[0] else given
        switches += node.target in INFERENCE or "functorch" in (getattr(node.target, "__module__", None) or "")
        out[node] = mode, switches
    return out


def requires_grad(graph: Graph) -> frozenset[Node]:
    """Return the values that gradients flow through: made from a trainable parameter outside no_grad regions.

    An attribute that is not known to be a buffer may be trainable, and so may anything inside an opaque module. What a
    value with gradients is written to has them too, and so has all that shares its storage.
    """
    out: set[Node] = set()
    modes = grad_modes(graph)
    while True:
        written: set[Node] = set()  # what a value with gradients is written to
        for node in graph.nodes:
            if not node.op.startswith("call"):
                unknown = node.op == "get_attr" and "val" not in node.meta and note_of(node).role != "buffer"
                if unknown or getattr(node.meta.get("val"), "requires_grad", False):
                    out.add(node)
            elif node.target is cast_weight and node.args[0] in out:
                out.add(node)
            elif modes[node][0] is not False and (node.op == "call_module" or not out.isdisjoint(node.all_input_nodes)):
                out.add(node)
                written.update(may_write(node))
        if written:
            find = Aliases(graph).find
            roots = {*map(find, written)}
            written = {n for n in graph.nodes if find(n) in roots}
        if written <= out:
            return frozenset(out)
        out |= written


def shares_cast(mode: str, value: Node, reader: Node, by_rule_low: bool, grad: frozenset[Node]) -> bool:
    """Say whether an op, or a cast before it, may read a cast of a value that another op reads, by `Policy.sharing`.

    With "storage" autocast does so, or no gradient flows: it keeps the low copies of leaves, if its cache is on.
    """
    if mode.endswith("storage"):
        region = note_of(reader).region
        return value not in grad or (by_rule_low and is_leaf(value) and (region is None or region[3]))
    return mode == "always" or (mode == "weights" and is_parameter(value))


def shares_storage(mode: str, value: Node, device: str) -> bool:
    """Say whether casts of a value that need a node of autograd each share one storage: in time large values gain."""
    least, tensor = 0 if mode == "storage" else DEVICES[device].shares_storage_from, value.meta.get("val")
    if not mode.endswith("storage") or least is None or not isinstance(tensor, torch.Tensor):
        return False
    return bool(concrete_size(tensor.numel()) >= least)


def sums_apart(reader: Node) -> bool:
    """Say whether a call is a reentrant checkpoint, whose inputs are leaves: the gradients of its reads are one sum."""
    return row_of(reader).recomputed and reader.kwargs.get("use_reentrant") is not False


def what_it_reads(value: Node) -> Any:
    """Return a key that is equal for two nodes of one value: a front end may read an attribute twice."""
    return value.target if value.op == "get_attr" or note_of(value).role == "parameter" else value


def is_leaf(value: Node) -> bool:
    """Say whether a value is a leaf of autograd, such as a parameter."""
    held, tensor = is_parameter(value) or note_of(value).role == "leaf", value.meta.get("val")
    return held or (value.op == "placeholder" and isinstance(tensor, torch.Tensor) and tensor.is_leaf)
