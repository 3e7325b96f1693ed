"""A copy of a model and of its inputs to run: tensors are copied when they are written, and not before.

Python state is copied, so what a call changes of it changes in the copy alone. Each storage is torch's copy on write:
what reads it shares the memory, and what writes it, through `.data` too, writes memory of the copy's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from passes._torch import pytree

from .._torch import copied_on_write, is_spread, storage_id
from ..capture.in_place import COPIES_A_MODEL
from ..capture.inputs import Inputs
from ..errors import in_short
from ..observe.snapshot import fresh
from ..observe.tensors import held

MODEL_OF_COPY = "_fxamp_model"  # the attribute in which such a copy has its model


class NoTwinError(Exception):
    """There is no copy of the model to run, or it does not run."""


def twin_of(model: nn.Module, inputs: Inputs = ((), {})) -> tuple[nn.Module, Inputs]:
    """Return a copy of a model, and of its inputs, that share storages as those do; NoTwinError if it has none."""
    if any(map(is_spread, model.parameters())):
        raise NoTwinError("its parameters are sharded")
    memo: dict[Any, Any] = {"torch": {}, COPIES_A_MODEL: True}  # torch notes in the first which storages are copied
    leaves = pytree.tree_leaves(inputs)
    try:
        for value in (*model.parameters(), *held(model).values(), *leaves):
            if isinstance(value, Tensor):
                memo[id(value)] = _on_write(value, memo["torch"])
        for module in model.modules():
            if isinstance(module, GraphModule):  # whose own copy has another class and code, which Dynamo guards
                like: Any = object.__new__(type(module))
                memo[id(module)], memo[id(module.graph)] = like, module.graph
                vars(like).update(copy.deepcopy(vars(module), memo))
        made: nn.Module = copy.deepcopy(model, memo)
    except Exception as e:  # whatever a class raises that does not let itself be copied
        raise NoTwinError(f"it cannot be copied ({in_short(e)})") from e
    memo |= {id(value): fresh(value) for value in leaves if isinstance(value, torch.Generator)}
    try:
        return made, copy.deepcopy(inputs, memo)
    except Exception:  # of an object in which a tensor is, for example
        return made, pytree.tree_map(lambda value: memo.get(id(value), value), inputs)


def _on_write(value: Tensor, storages: dict[int, Any]) -> Tensor:
    """Return a leaf for a tensor, in a storage that is copied on write; one of another kind as it is, or a clone."""
    kind = nn.Parameter if isinstance(value, nn.Parameter) else Tensor
    if type(value) is not kind or value.layout is not torch.strided or value.is_quantized:
        return value if kind is nn.Parameter else fresh(value)
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        plain = value.detach()
        if value.is_meta or value.is_conj() or value.is_neg():
            made = plain.clone()
        else:
            storage = storages.setdefault(storage_id(value), copied_on_write(plain).untyped_storage())
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            made.set_(storage, value.storage_offset(), value.shape, value.stride())
        made = nn.Parameter(made, value.requires_grad) if kind is nn.Parameter else made
    made.requires_grad_(value.requires_grad)
    made.__dict__.update(value.__dict__)
    return made
