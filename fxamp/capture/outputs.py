"""The dtypes that values have in the model itself: of what leaves a graph, and of what leaves the model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Container, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import pytree
from passes.graph.notes import note
from passes.graph.values import LOW_DTYPES, dtypes_of

_OWN: Any = WeakIdKeyDictionary()  # the dtypes that values which left a graph have in the model itself


def note_own(value: Tensor, dtype: torch.dtype) -> None:
    """Note which dtype a value that leaves a graph has in the model itself; under autocast it may have another."""
    _OWN[value] = dtype


def leaving(value: Any) -> Any:
    """Return an output of the model, which gets its original dtype; in a graph this marks it."""
    return value


def note_leaving(graph: Graph, own: Set[Node]) -> None:
    """Note which values leave the model, in the place of the calls that say so.

    A value that this graph was given, after a break, is cast here, unless the model itself makes it low (`own`).
    """
    for node in graph.find_nodes(op="call_function", target=leaving):
        value: Any = node.args[0]
        if value.op != "placeholder":
            note(value, leaves=True)
        elif value not in own and dtypes_of(value.meta["example_value"]) in LOW_DTYPES:
            node.op, node.target = "call_method", "float"
            node.meta["example_value"] = node.meta["example_value"].float()
            continue
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def is_low_of_its_own(value: object, made_of_low: bool) -> bool:
    """Say whether a value is low in the model itself. A note from its graph decides, or else `made_of_low`."""
    if not isinstance(value, Tensor):
        return False
    return _OWN.get(value, value.dtype if made_of_low else None) in LOW_DTYPES


def is_low_throughout(model: nn.Module, inputs: Any) -> bool:
    """Say whether all parameters, buffers and inputs are low; values made outside of graphs then are, too."""
    held = itertools.chain(model.parameters(), model.buffers(), pytree.tree_leaves(inputs))
    floats = (t.dtype in LOW_DTYPES for t in held if isinstance(t, Tensor) and t.is_floating_point())
    return next(floats, False) and all(floats)


def is_whole(value: object) -> bool:
    """Say whether a container is left as it is, with the low values in it: a cache is, as under autocast."""
    return not isinstance(value, (tuple, list, dict))


def restored(outputs: Any, low: torch.dtype, given: Container[int], made: dict[int, Any] | None = None) -> Any:
    """Return outputs with low values cast to FP32, unless the model itself makes or holds them, or was `given` them.

    Containers other than tuples, lists, dicts and dataclasses are left unchanged, so a cache keeps low values.
    An output that is returned twice stays one tensor: `made` maps the identity of each output to what was made of it.
    """
    made = {} if made is None else made
    leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_whole)
    for leaf in leaves:
        if id(leaf) in made or isinstance(leaf, nn.Parameter):
            continue
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            made[id(leaf)] = _restored_fields(leaf, low, given, made)
        elif isinstance(leaf, Tensor) and leaf in _OWN:
            made[id(leaf)] = leaf.to(_OWN[leaf])
        elif isinstance(leaf, Tensor) and leaf.dtype == low and id(leaf) not in given:
            made[id(leaf)] = leaf.float()
    changed = [made.get(id(leaf), leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return outputs if same else pytree.tree_unflatten(changed, spec)


def _restored_fields(value: Any, low: torch.dtype, given: Container[int], made: dict[int, Any]) -> Any:
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    changed = {name: new for name, old in held.items() if (new := restored(old, low, given, made)) is not old}
    if not changed:
        return value
    out = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(out, name, new)
    return out
