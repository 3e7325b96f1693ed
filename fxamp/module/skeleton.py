"""The tree of a converted module: empty modules over the model's own parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from passes.contract.errors import CaptureError

from ..capture.model.preflight import overridden

CONSTANTS = "_fxamp"  # child module for lifted constants and sub-graphs; never in the state_dict
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training", *STATE_HOOKS)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_COUNTS = ("_size", "_keys")  # attributes of ParameterList and ParameterDict that are no parameters


def skeleton(model: nn.Module, opaque: Mapping[str, nn.Module], constants: Mapping[str, Any]) -> nn.Module:
    """Return a tree of empty modules that shares the model's parameter and buffer dictionaries.

    Opaque leaves keep their class, since they run. Layers and containers of torch.nn keep theirs, so that isinstance()
    and indices work, and so do modules that override how they are saved or switched (`train`, `state_dict`). Each has a
    training flag, hooks and children of its own. Constants go under a child that is never saved in a state_dict.
    """
    new: dict[int, nn.Module] = {}

    def copy_structure(module: nn.Module, keep: bool) -> nn.Module:
        if id(module) in new:
            return new[id(module)]
        empty = new[id(module)] = _empty(module, keep)
        for name, child in module._modules.items():
            runs = keep and id(module) in running
            if runs and child is not None:
                running.add(id(child))
            empty._modules[name] = None if child is None else copy_structure(child, runs or _is_library_leaf(child))
        return empty

    running = {id(m) for m in opaque.values()}
    for leaf in opaque.values():
        copy_structure(leaf, True)
    root = copy_structure(model, False)
    if constants:
        root._modules[CONSTANTS] = _holder(constants)
    return root


def _empty(module: nn.Module, keep: bool) -> nn.Module:
    """Return a module without children that shares another's parameters and buffers, and its class if that is kept."""
    empty = nn.Module()
    if keep or overridden(type(module)):
        empty.__class__ = type(module)
        empty.__dict__.update({k: v for k, v in module.__dict__.items() if k not in empty.__dict__})
    elif isinstance(module, _CONTAINERS):
        _as_container(empty, module)
    for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", *STATE_HOOKS):
        empty.__dict__[key] = module.__dict__[key]
    empty.training = module.training
    return empty


def _holder(constants: Mapping[str, Any]) -> nn.Module:
    """Return a module of constants: tensors as buffers that no state_dict holds, the others as attributes."""
    child = nn.Module()
    for name, value in constants.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            child.register_buffer(name, value, persistent=False)
        else:
            setattr(child, name, value)
    return child


def container_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the container class of torch.nn that a module is an instance of, None if there is none."""
    return next((kind for kind in _CONTAINERS if isinstance(module, kind)), None)


def _as_container(empty: nn.Module, module: nn.Module) -> None:
    """Turn an empty module into a container of torch.nn; if the user's class has a forward, calls raise an error."""
    kind: Any = container_of(module)
    empty.__class__ = kind
    own = {k: v for k, v in module.__dict__.items() if k not in empty.__dict__}
    empty.__dict__.update({k: v for k, v in own.items() if type(module) is kind or k in _COUNTS or k.isdigit()})
    if type(module).forward is not kind.forward:
        empty.__dict__["forward"] = _not_callable


def _not_callable(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "a submodule of a converted module is not called by itself: call the submodule of the original model, or "
        "convert that submodule."
    )


def _is_library_leaf(module: nn.Module) -> bool:
    """Say whether this is a layer of torch.nn, whose class is needed for isinstance() and to load old checkpoints."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def constant_target(name: str) -> str:
    """Return the get_attr target of a lifted constant."""
    return f"{CONSTANTS}.{name}"
