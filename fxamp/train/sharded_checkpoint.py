"""Checkpoints of which each rank writes a part, by `torch.distributed.checkpoint`; any number of ranks can read them.

Tensors are stored under the names of parameters in the original model, so that the model that is loaded may be sharded,
replicated or neither. The rest of the state is small, equal on all ranks, and written once.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from passes._torch import original_of
from passes.contract.errors import PolicyError

from ..trust.preserved import random_state, set_random_state
from .checkpoint import allowed, beside, course_of, load_course, refuse_other_settings
from .state import TrainState
from .window import parameters


def save_checkpoint(step: TrainState, folder: str | os.PathLike[str], *, group: Any = None) -> None:
    """Save everything that a run needs to continue on any number of ranks. All ranks call this, between two windows.

    The file that marks a checkpoint as complete is written last. Use a new folder for each checkpoint: the folder then
    holds a complete one or none.

    Args:
        step: The TrainStep to save.
        folder: A folder that all ranks can write to.
        group: The process group of the ranks that train; None for all ranks.

    Raises:
        PolicyError: The step is within a window, whose gradients belong to this rank only; its last window was left by
            an error; or the folder holds a checkpoint already.

    Example:
        >>> fxamp.save_checkpoint(step, "checkpoints/1")
    """
    if step.aborted:
        raise PolicyError(
            f"the last window of this step did not come to its end: {step.aborted}. Finish another window, or load a "
            "checkpoint, before you save one"
        )
    if os.path.exists(os.path.join(os.fspath(folder), ".metadata")):
        raise PolicyError(f"'{os.fspath(folder)}' holds a checkpoint already: give each checkpoint a folder of its own")
    if step.position:
        raise PolicyError(
            "within a window each rank has its own gradients, and another number of ranks could not continue with "
            "them: save at the end of a window, or call flush() first"
        )
    tensors, rest = _tensors(step), {}
    for index, _, prefix, p in _slots(step):
        state = step.optimizers[index].state.get(p, {})
        tensors.update((f"{prefix}.{key}", value) for key, value in state.items() if isinstance(value, Tensor))
        rest[prefix] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    groups = [[{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] for o in step.optimizers]
    random: list[Any] = [random_state()] * _count(group)
    if len(random) > 1:
        dist.all_gather_object(random, random[0], group=group)
    course = {**course_of(step), "states": rest, "groups": groups, "random": random}
    with _quiet():
        save({"course": (course,), **tensors}, checkpoint_id=folder, process_group=group)


def load_checkpoint(
    step: TrainState, folder: str | os.PathLike[str], *, group: Any = None, allow: Sequence[str] = ()
) -> None:
    """Load a checkpoint that `save_checkpoint` wrote into a TrainStep made in the same way. All ranks call this.

    The number of ranks and `accumulate_steps` may differ from those that were saved. With the same number of ranks the
    random number generators are restored; otherwise they stay as they are.

    Args:
        step: The TrainStep to load into.
        folder: A folder that all ranks can read.
        group: The process group of the ranks that train; None for all ranks.
        allow: Settings that may differ from those of the checkpoint: "policy", "max_grad_norm".

    Raises:
        PolicyError: The folder holds no checkpoint of a TrainStep, or one of another model, optimizer or scaler;
            nothing was changed.
        FileNotFoundError: There is no checkpoint, or it is not complete.

    Example:
        >>> fxamp.save_checkpoint(step, "checkpoints/1")
        >>> fxamp.load_checkpoint(step, "checkpoints/1")
    """
    known: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    if "course" not in known:
        raise PolicyError(f"'{os.fspath(folder)}' does not hold a checkpoint that fxamp.save_checkpoint wrote")
    given: dict[str, Any] = {"course": ()}
    with _quiet():
        load(given, checkpoint_id=folder, process_group=group)
    (course,) = given["course"]
    refuse_other_settings(step, course["settings"], free=("accumulate_steps", *allowed(allow, 0)))
    parts = _tensors(step)
    for name, tensor in parts.items():
        if name not in known or tuple(known[name].size) != tuple(tensor.shape):
            raise PolicyError(f"the checkpoint is that of another model: it differs at '{name.partition('.')[2]}'")

    load_course(step, course)
    saved: dict[str, list[str]] = defaultdict(list)  # the names of the states of each parameter
    for key in known:
        saved[key.rpartition(".")[0]].append(key.rpartition(".")[2])
    states: list[dict[int, dict[str, Any]]] = [{} for _ in step.optimizers]  # by place of the parameter
    for index, place, prefix, p in _slots(step):
        tensors = {key: _like_saved(known[f"{prefix}.{key}"], p) for key in saved[prefix]}
        parts.update((f"{prefix}.{key}", tensor) for key, tensor in tensors.items())
        if kept := {**course["states"].get(prefix, {}), **tensors}:
            states[index][place] = kept
    with _quiet():
        load(parts, checkpoint_id=folder, process_group=group)
    for optimizer, found, before in zip(step.optimizers, states, course["groups"], strict=True):
        now = optimizer.state_dict()["param_groups"]
        groups = [{**old, "params": own["params"]} for own, old in zip(now, before, strict=True)]
        optimizer.load_state_dict({"state": found, "param_groups": groups})
    if len(course["random"]) == _count(group):
        set_random_state(course["random"][dist.get_rank(group) if _count(group) > 1 else 0])


def _tensors(step: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a step's model and averages, and those beside them, by name."""
    tensors = {f"model.{_plain(step.model, name)}": t for name, t in step.model.state_dict().items()}
    for index, average in enumerate(step.averages):
        tensors.update((f"ema.{index}.{_plain(average, name)}", t) for name, t in average.state_dict().items())
    tensors.update((f"beside.{name}", t) for name, t in beside(step).items())
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}


def _slots(step: TrainState) -> Iterator[tuple[int, int, str, Tensor]]:
    """Yield, for each trained parameter, the number of its optimizer, its place, the name of its state, and it."""
    known: dict[Tensor, str] = {p: _plain(step.model, name) for name, p in step.model.named_parameters()}
    for index, optimizer in enumerate(step.optimizers):
        for place, p in enumerate(parameters(optimizer)):
            yield index, place, f"optimizer.{index}.{known.get(p, f'parameter {place}')}", p


def _like_saved(saved: Any, p: Tensor) -> Tensor:
    """Return a tensor to load the state of a parameter into: sharded as that is, if it has its shape."""
    size, dtype = saved.size, saved.properties.dtype
    alike = p.ndim > 0 and tuple(size) == tuple(p.shape)
    return (torch.empty_like(p, dtype=dtype) if alike else torch.empty(size, dtype=dtype)).detach()


def _plain(model: nn.Module, name: str) -> str:
    """Return a name as the user knows it, without what wrappers put into it."""
    module: nn.Module | None = model
    plain = []
    for part in name.split("."):
        if not isinstance(module, (DistributedDataParallel, AveragedModel)) and original_of(module) is None:
            plain.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(plain) or name


def _count(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about a single process without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
