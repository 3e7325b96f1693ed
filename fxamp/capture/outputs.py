"""The dtypes that values have in the model itself: of what leaves a graph, and of what leaves the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import pytree
from passes.contract.devices import DEVICES
from passes.contract.policy import Policy
from passes.graph.notes import note
from passes.graph.values import LOW_DTYPES, dtypes_of

_OWN: Any = WeakIdKeyDictionary()  # the dtypes that values which left a graph have in the model itself
_CONTEXTS: dict[tuple[str, torch.dtype, bool], list[torch.autocast]] = {}  # for reuse; none is entered now


def note_own(value: Tensor, dtype: torch.dtype) -> None:
    """Note which dtype a value that leaves a graph has in the model itself; under autocast it may have another."""
    _OWN[value] = dtype


def leaving(value: Any) -> Any:
    """Return an output of the model, which gets its original dtype; in a graph this marks it."""
    return value


def note_leaving(graph: Graph, own: Sequence[bool]) -> None:
    """Note which values leave the model, in the place of the calls that say so.

    A value that this graph was given, after a break, is cast here, unless the model itself makes it low (`own`).
    """
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for node in graph.find_nodes(op="call_function", target=leaving):
        value: Any = node.args[0]
        if value not in places:
            note(value, leaves=True)
        elif not own[places.index(value)] and dtypes_of(value.meta["example_value"]) in LOW_DTYPES:
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


@contextlib.contextmanager
def under_autocast(policy: Policy, model: nn.Module, args: Any, kwargs: Any) -> Iterator[torch.dtype | None]:
    """Run with the autocast of a policy: on, except at O0. Yields the low dtype, or None if nothing is low.

    Ambient autocast gives the dtype that the policy leaves open.
    """
    device = policy.device or _device(model, args, kwargs)
    if device not in DEVICES or not DEVICES[device].is_here():
        yield None
        return
    on, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    low, wanted = policy.dtype or before, policy.level.rounds
    if on == wanted and (not on or low == before):
        yield low if wanted else None
        return
    free = _CONTEXTS.setdefault((device, low, wanted), [])
    context = free.pop() if free else torch.autocast(device, dtype=low, enabled=wanted)
    try:
        with context:
            yield low if wanted else None
    finally:
        free.append(context)


def _device(model: nn.Module, args: Any, kwargs: Any) -> str:
    """Return the kind of device of the parameters, else of the inputs, else the CPU."""
    found: Tensor | None = next(model.parameters(), None)
    if found is None:
        found = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
    return found.device.type if found is not None and found.device.type != "meta" else "cpu"


def restored(
    outputs: Any, low: torch.dtype, is_given: Callable[[Tensor], bool], made: dict[int, Any] | None = None
) -> Any:
    """Return outputs with low values cast to FP32, unless the model itself makes them low or was given them.

    Containers that pytree does not know, except dataclasses, are left unchanged, so a cache keeps low values.
    An output that is returned twice stays one tensor: `made` maps the identity of each output to what was made of it.
    """
    made = {} if made is None else made
    leaves, spec = pytree.tree_flatten(outputs)
    for leaf in leaves:
        if id(leaf) in made:
            continue
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            made[id(leaf)] = _restored_fields(leaf, low, is_given, made)
        elif isinstance(leaf, Tensor) and leaf in _OWN:
            made[id(leaf)] = leaf.to(_OWN[leaf])
        elif isinstance(leaf, Tensor) and leaf.dtype == low and not is_given(leaf):
            made[id(leaf)] = leaf.float()
    changed = [made.get(id(leaf), leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return outputs if same else pytree.tree_unflatten(changed, spec)


def _restored_fields(value: Any, low: torch.dtype, is_given: Callable[[Tensor], bool], made: dict[int, Any]) -> Any:
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    changed = {name: new for name, old in held.items() if (new := restored(old, low, is_given, made)) is not old}
    if not changed:
        return value
    out = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(out, name, new)
    return out
