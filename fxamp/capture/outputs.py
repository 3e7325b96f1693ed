"""The dtypes that values have in the model itself: of what leaves a graph, and of what leaves the model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import pytree
from passes.graph.notes import Origins
from passes.graph.values import LOW_DTYPES

from ..observe.tensors import held

logger = logging.getLogger(__name__)

_OWN: Any = WeakIdKeyDictionary()  # the dtypes that values which left a graph have in the model itself


def noted(outputs: Sequence[Any], own: Mapping[int, torch.dtype]) -> list[Any]:
    """Note which dtypes outputs of a graph have in the model itself; under autocast they may have others.

    The same tensor with another dtype becomes a view of it.
    """
    made = list(outputs)
    for i, dtype in own.items():
        if _OWN.setdefault(made[i], dtype) != dtype:
            made[i] = made[i].view_as(made[i])
            _OWN[made[i]] = dtype
    return made


def leaving(value: Any) -> Any:
    """Return an output of the model, which gets its original dtype; in a graph this marks it."""
    return value


def note_leaving(graph: Graph, origins: Origins) -> bool:
    """Note which values that a graph makes leave the model, in the place of the calls that say so; say if any does.

    A value that it was given, after a break, is left to `restored`: the graph may be called with another one.
    """
    calls = graph.find_nodes(op="call_function", target=leaving)
    for node in calls:
        value: Any = node.args[0]
        if value.op != "placeholder":
            origins.add(value, leaves=True)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return bool(calls)


def low_of_its_own(model: nn.Module, inputs: Any, low: torch.dtype, *, warns: bool = True) -> Callable[..., bool]:
    """Return what says whether a value is low in the model itself, where autocast's dtype is `low`.

    A note from its graph decides. Others are if the model holds them or was called with them, has nothing but low
    values, or makes them of another low dtype. The model is searched for the first value that needs it. If `warns`, it
    is said where that is a guess, since the model has low tensors beside others. A noted value is a guess as well if a
    call between graphs `returned` it: a cast to the dtype that it has under autocast returns the same tensor.
    """

    @functools.cache
    def known() -> Mapping[int, torch.dtype]:
        own = (t for t in held(model).values() if t.grad_fn is None)  # others it has kept in a call
        return {id(t): t.dtype for t in (*pytree.tree_leaves(inputs), *own) if isinstance(t, Tensor)}

    def is_own(value: Tensor, *, returned: bool = False) -> bool:
        noted = value in _OWN or value.dtype not in LOW_DTYPES
        if noted and (not returned or value.dtype != low or _OWN.get(value) in LOW_DTYPES):
            return _OWN.get(value) in LOW_DTYPES
        if not noted and (value.dtype != low or is_low_throughout(model, inputs) or id(value) in known()):
            return True
        if warns and low in known().values():
            _say_doubtful(type(model).__name__, low)
        return False

    return is_own


@functools.cache
def _say_doubtful(name: str, low: torch.dtype) -> None:
    logger.warning(
        "fxamp: %s holds or is given %s tensors, and makes %s values between its graphs: they are taken to be FP32 in "
        "the model itself, and what it returns of them is FP32. output_dtype='autocast' leaves them as they are.",
        name, low, low,
    )  # fmt: skip


def is_low_throughout(model: nn.Module, inputs: Any) -> bool:
    """Say whether all parameters, buffers and inputs are low; values made outside of graphs then are, too."""
    held = itertools.chain(model.parameters(), model.buffers(), pytree.tree_leaves(inputs))
    floats = (t.dtype in LOW_DTYPES for t in held if isinstance(t, Tensor) and t.is_floating_point())
    return next(floats, False) and all(floats)


def is_whole(value: object) -> bool:
    """Say whether a container is left as it is, with the low values in it: a cache is, as under autocast."""
    return not isinstance(value, (tuple, list, dict))


def restored(
    outputs: Any, is_own: Callable[[Tensor], bool], made: dict[int, Any] | None = None,
    read: Container[int] = (),
) -> Any:  # fmt: skip
    """Return outputs with low values cast to FP32, unless `is_own` says that they are low in the model itself.

    Of those in `read`, by identity, another output was computed in another graph: they are returned as they were read,
    or a gradient by them would not reach them.

    Containers other than tuples, lists, dicts and dataclasses are left unchanged, so a cache keeps low values.
    An output that is returned twice stays one tensor: `made` maps the identity of each output to what was made of it,
    and of one in `read` to itself.
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
        elif isinstance(leaf, Tensor) and leaf in _OWN:
            made[id(leaf)] = leaf.to(_OWN[leaf])
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
