"""Find, compare and restore the tensors that a model holds besides its parameters, wherever it holds them."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from passes._torch import pytree

from .._torch import is_spread

_OWN = frozenset(nn.Module().__dict__)  # torch's tables of parameters, buffers, children and hooks
_TABLES = _OWN - {"_parameters"}
_CODE = (type, FunctionType, MethodType, ModuleType)
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_NOT_THE_AUTHORS = (sys.stdlib_module_names | {"torch", "fxamp", "passes"}) - {"__main__", "types"}


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return, by name, buffers and the tensors in plain attributes, also in lists, tuples and dicts there."""
    out = dict(model.named_buffers())
    parameters = {id(p) for p in model.parameters()}
    seen = parameters | {id(t) for t in out.values()}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            leaves = () if name in _OWN else pytree.tree_flatten_with_path(value)[0]
            for keys, leaf in leaves:
                if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    out[f"{path}.{name}".lstrip(".") + pytree.keystr(keys)] = leaf
    return out


def tables(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a module, and torch's tables of its buffers, children and hooks.

    That of parameters is left out: FSDP2 exchanges gathered and sharded ones there, and has its own note of which.
    """
    own = vars(module)
    return [own, *(v for name, v in own.items() if name in _TABLES and isinstance(v, dict))]


def reached(*roots: Any) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Return the containers and, by id, the tensors that are reached from some objects, of a model from its modules.

    Containers are lists, dicts, sets and queues, and the attributes of modules and of the author's objects; those of
    Python, torch and fxamp are not looked into, but for optimizers, schedulers and scalers. Parameters that are spread
    over ranks are left out.
    """
    containers: list[Any] = []
    tensors = dict[int, torch.Tensor]()
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    seen, left = dict[int, Any](), [getattr(r, "__dict__", ()) for r in roots if not isinstance(r, nn.Module)]
    for module in modules:
        left += tables(module)
        if any(is_spread(p) for p in module._parameters.values() if p is not None):
            seen[id(module._parameters)] = module._parameters
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (nn.Module, *_CODE)):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if type(value).__module__ in ("builtins", "collections") and not isinstance(value, tuple):
                containers.append(value)
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, _TRAINING) or (
            hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _NOT_THE_AUTHORS
        ):
            left.append(vars(value))
    return containers, tensors


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that are plain attributes of modules: neither parameters nor buffers."""
    named = ((path, name, value) for path, m in model.named_modules() for name, value in m.__dict__.items())
    return {f"{path}.{name}".lstrip("."): value for path, name, value in named if isinstance(value, torch.Tensor)}


@contextlib.contextmanager
def kept(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Restore tensors, whatever happens inside: their contents, and their storage if `set_` replaced it.

    They leave no graph of autograd behind that they were not in before. A tensor that was not written inside is not
    written here. Yields a list, which afterwards holds those restored.
    """
    restored: list[torch.Tensor] = []
    saved = [(t, t.detach(), t.detach().clone(), t.is_leaf, _count_of_writes(t)) for t in tensors if not t.is_meta]
    try:
        yield restored
    finally:
        with torch.no_grad():
            for tensor, alias, value, leaf, count in saved:
                if leaf and not tensor.is_leaf:
                    with contextlib.suppress(RuntimeError):  # a view of another tensor cannot be
                        tensor.detach_()
                replaced = tensor.shape != alias.shape or not _share(tensor, alias)
                if replaced:
                    tensor.data = alias
                written = not same(tensor, value)
                if written:  # uncounted where that was, as a batch norm's: what autograd has saved stays valid
                    (tensor.data if count == _count_of_writes(tensor) else tensor).copy_(value)
                if replaced or written:
                    restored.append(tensor)


def strided(tree: Any) -> list[torch.Tensor]:
    """Return the strided tensors in containers of Python."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same numbers with strides."""
    return tensor.values() if tensor.is_nested else tensor if tensor.layout is torch.strided else tensor.to_dense()


def _count_of_writes(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written, as torch counts; None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is not torch.strided or a.data_ptr() == b.data_ptr()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors are the same bit for bit, NaN where NaN is; on the meta device there are no bits."""
    if a.is_nested and b.is_nested:  # a jagged dimension has another size with each tensor of offsets
        return same(a.values(), b.values()) and same(a.offsets(), b.offsets())  # type: ignore[attr-defined]
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout or a.is_meta != b.is_meta:
        return False
    if a.is_meta:
        return True
    a, b = dense(a), dense(b)
    if a.is_complex():  # a CPU cannot compare complex32, for example
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.equal(a, b) or bool(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
    )
