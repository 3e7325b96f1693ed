"""All that a model holds, as plain values that can be compared: what a call, or a conversion, changes of it."""

from __future__ import annotations

import hashlib
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor


def facts(value: Any, versions: bool = True) -> dict[str, Any]:
    """Return what an object holds, however deep, by where: of a tensor identity, dtype, version and bits.

    A version counts what is put back too, so it is left out on request.
    """
    found: dict[str, Any] = {}
    _note(value, "", found, {})
    return found if versions else {at: _without_version(fact) for at, fact in found.items()}


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the places at which two such differ."""
    return [at for at in {**before, **now} if before.get(at, at) != now.get(at, at)]


def _note(value: Any, at: str, found: dict[str, Any], seen: dict[int, Any]) -> None:
    inside: dict[Any, Any] = {}
    if isinstance(value, Tensor):
        found[at] = id(value), type(value), value.dtype, value.shape, value.requires_grad, _version(value), _bits(value)
    elif isinstance(value, dict):
        inside = {f"{at}[{key!r}]": item for key, item in value.items()}
        found[at] = id(value), list(inside)
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = {f"{at}[{i}]": item for i, item in enumerate(value)}
        found[at] = id(value), len(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, MethodType, ModuleType)):
        inside = {f"{at}.{name}": item for name, item in vars(value).items()}
        found[at] = id(value), list(inside)
    else:
        found[at] = value if isinstance(value, (str, bytes, int, float, bool, torch.dtype)) else id(value)
    if id(value) not in seen:
        seen[id(value)] = value
        for place, item in inside.items():
            _note(item, place, found, seen)


def _without_version(fact: Any) -> Any:
    return (*fact[:5], *fact[6:]) if isinstance(fact, tuple) and len(fact) == 7 else fact


def _version(value: Tensor) -> int | None:
    return None if value.is_inference() else value._version


def _bits(value: Tensor) -> str:
    if value.layout is not torch.strided or value.device.type != "cpu":
        return str(value)
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
