"""The dtypes that values have in the model itself: of what leaves a graph, and of what leaves the model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from passes._torch import pytree
from passes.graph.notes import Origins
from passes.graph.values import LOW_DTYPES

from ..observe.tensors import held
from .scope import gathers


def leaving(value: Any) -> Any:
    """Return an output of the model, which gets its original dtype; in a graph this marks it."""
    return value


def note_leaving(graph: Graph, origins: Origins) -> bool:
    """Note which values that a graph makes leave the model, in the place of the calls that say so; say if any does."""
    calls = graph.find_nodes(op="call_function", target=leaving)
    for node in calls:
        value: Any = node.args[0]
        if value.op != "placeholder":
            origins.add(value, leaves=True)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return bool(calls)


def holds_low(model: nn.Module) -> bool:
    """Say whether a model has weights in 16 bits, but for those that FSDP2 gathers: what is low stays low then."""
    low = any(p.dtype in LOW_DTYPES for p in model.parameters())
    return low and not any(map(gathers, model.modules()))


def meets_low(model: nn.Module, inputs: Any) -> bool:
    """Say whether a model holds 16-bit tensors or is given any: whether one is low without autocast is to be asked."""
    tensors = (*model.parameters(), *held(model).values(), *pytree.tree_leaves(inputs))
    return any(isinstance(t, Tensor) and t.dtype in LOW_DTYPES for t in tensors)


def own_values(
    model: nn.Module, inputs: Any, low: torch.dtype, known: Mapping[int, tuple[Tensor, bool]]
) -> Callable[[Tensor], bool]:
    """Return what says whether a low value is low without autocast too, whose dtype is `low`.

    Graphs have said so of those `known`, by identity. Others are if the model has low weights, holds the value or was
    called with it, or if it has the other low dtype.
    """

    @functools.cache
    def stays() -> bool:
        return holds_low(model)

    @functools.cache
    def passed() -> set[int]:
        kept = (t for t in held(model).values() if t.grad_fn is None)  # others are of a call
        return {id(t) for t in (*pytree.tree_leaves(inputs), *kept)}

    def is_own(value: Tensor) -> bool:
        if id(value) in known:
            return known[id(value)][1]
        return value.dtype != low or stays() or id(value) in passed()

    return is_own


def is_whole(value: object) -> bool:
    """Say whether a container is left as it is, with the low values in it: a cache is, as under autocast."""
    return not isinstance(value, (tuple, list, dict))


def restored(
    outputs: Any, is_own: Callable[[Tensor], bool], made: dict[int, Any] | None = None,
    read: Container[int] = (),
) -> Any:  # fmt: skip
    """Return outputs with low values cast to FP32, unless `is_own` says that they are low in the model itself.

    Of those in `read`, by identity, another output was computed in another graph: they are returned as they were read,
    or a gradient by them would not reach them. Containers other than tuples, lists, dicts and dataclasses are left
    unchanged. An output that is returned twice stays one tensor, as `made` of it, by identity.
    """
    made = {} if made is None else made
    leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_whole)
    for leaf in leaves:
        if id(leaf) in made or isinstance(leaf, nn.Parameter):
            continue
        if id(leaf) in read:
            made[id(leaf)] = leaf
            continue
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            made[id(leaf)] = _restored_fields(leaf, is_own, made, read)
        elif isinstance(leaf, Tensor) and leaf.dtype in LOW_DTYPES and not is_own(leaf):
            made[id(leaf)] = leaf.float()
    changed = [made.get(id(leaf), leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return outputs if same else pytree.tree_unflatten(changed, spec)


def _restored_fields(
    value: Any, is_own: Callable[[Tensor], bool], made: dict[int, Any], read: Container[int]
) -> Any:  # fmt: skip
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    changed = {name: new for name, old in fields.items() if (new := restored(old, is_own, made, read)) is not old}
    if not changed:
        return value
    out = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(out, name, new)
    return out
