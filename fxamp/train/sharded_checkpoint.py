"""Checkpoints of which each rank writes a part, by `torch.distributed.checkpoint`; any number of ranks can read them.

Tensors are stored under the names of parameters in the original model, so that the model that is loaded may be sharded,
replicated or neither. The rest of the state is small, equal on all ranks, and written once.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from passes.contract.errors import FxampError, PolicyError

from .._torch import original_of
from ..observe.snapshot import random_state
from .checkpoint import allowed, beside, course_of, load_course, refuse_other_settings
from .files import naming, refuse_objects
from .shards import Shards
from .window import parameters

if TYPE_CHECKING:
    from .step import TrainStep


def save_checkpoint(step: TrainStep, folder: str | os.PathLike[str], *, group: Any = None) -> None:
    """Save everything that a run needs to continue on any number of ranks. All ranks call this, between two windows.

    The file that marks a checkpoint as complete is written last. Use a new folder for each checkpoint: the folder then
    holds a complete one or none.

    Args:
        step: The TrainStep to save.
        folder: A folder that all ranks can write to.
        group: The process group of the ranks that train; None for all ranks.

    Raises:
        PolicyError: The step is within a window, whose gradients belong to this rank only; its last window was left
            while its optimizers stepped; the folder holds a checkpoint already; or an optimizer or scheduler keeps an
            object in its state that is neither a tensor nor a plain value, which `load_checkpoint` would refuse.

    Example:
        >>> fxamp.save_checkpoint(step, "checkpoints/1")
    """
    step.course.refuse_torn()
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
    refuse_objects(course)
    with _quiet():
        save({"course": (course,), **tensors}, checkpoint_id=folder, process_group=group)


def load_checkpoint(
    step: TrainStep, folder: str | os.PathLike[str], *, group: Any = None, allow: Sequence[str] = ()
) -> None:
    """Load a checkpoint that `save_checkpoint` wrote into a TrainStep made in the same way. All ranks call this.

    The number of ranks and `accumulate_steps` may differ from those that were saved. With the same number of ranks the
    random number generators are restored; otherwise they stay as they are.

    The folder may come from anybody: nothing in it is run. Its `.metadata`, a pickle, is read as data, and the shards
    with `weights_only=True`: classes that you have given to `torch.serialization.add_safe_globals` are made as torch
    makes them. All is read before anything is changed, so that memory holds the weights twice meanwhile. What ranks
    send each other is trusted.

    Args:
        step: The TrainStep to load into.
        folder: A folder that all ranks can read.
        group: The process group of the ranks that train; None for all ranks.
        allow: Settings that may differ from those of the checkpoint: "policy", "max_grad_norm".

    Raises:
        PolicyError: The folder holds no checkpoint of a TrainStep, or one of another model, optimizer or scaler; or a
            file in it, which is named, holds something else, or is damaged. Nothing was changed.
        FileNotFoundError: There is no checkpoint, or it is not complete.

    Example:
        >>> fxamp.save_checkpoint(step, "checkpoints/1")
        >>> fxamp.load_checkpoint(step, "checkpoints/1")
    """
    shards = Shards(folder)
    known = shards.metadata.state_dict_metadata
    if not isinstance(known.get("course"), BytesStorageMetadata):
        raise PolicyError(f"'{os.fspath(folder)}' does not hold a checkpoint that fxamp.save_checkpoint wrote")
    course = shards.course()
    with naming(folder):
        refuse_other_settings(step, course["settings"], free=("accumulate_steps", *allowed(allow, 0)))
        live = _tensors(step)
        for name, tensor in live.items():
            if tuple(_saved(known, name).size) != tuple(tensor.shape):
                raise PolicyError(f"the checkpoint is that of another model: it differs at '{name.partition('.')[2]}'")
        parts = {name: tensor.clone() for name, tensor in live.items()}
        states = _states(step, known, course["states"], parts)
    with _quiet():
        _read(parts, shards, group)
    with naming(folder):
        optimizers = []
        for optimizer, state, before in zip(step.optimizers, states, course["groups"], strict=True):
            now = optimizer.state_dict()["param_groups"]
            groups = [{**old, "params": own["params"]} for own, old in zip(now, before, strict=True)]
            optimizers.append({"state": state, "param_groups": groups})
        rank = dist.get_rank(group) if _count(group) > 1 else 0
        random = [*course["random"], course["random"][rank]] if len(course["random"]) == _count(group) else []
        load_course(step, course, optimizers, random)  # its own last: what one rank refuses, all do
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(parts[name])


def _saved(known: Mapping[str, Any], name: str) -> TensorStorageMetadata:
    found = known.get(name)
    if not isinstance(found, TensorStorageMetadata):
        raise PolicyError(f"the checkpoint is that of another model: it differs at '{name.partition('.')[2]}'")
    return found


def _states(
    step: TrainStep, known: Mapping[str, Any], others: Mapping[str, Any], parts: dict[str, Tensor]
) -> list[dict[int, dict[str, Any]]]:
    """Return the states of each optimizer, by place of the parameter; their tensors, to be read, are added to parts."""
    names: dict[str, list[str]] = defaultdict(list)  # of the states of each parameter
    for key in known:
        names[key.rpartition(".")[0]].append(key.rpartition(".")[2])
    states: list[dict[int, dict[str, Any]]] = [{} for _ in step.optimizers]
    for index, place, prefix, p in _slots(step):
        tensors = {key: _like_saved(_saved(known, f"{prefix}.{key}"), p) for key in names[prefix]}
        parts.update((f"{prefix}.{key}", tensor) for key, tensor in tensors.items())
        if state := {**others.get(prefix, {}), **tensors}:
            states[index][place] = state
    return states


def _read(parts: dict[str, Any], shards: Shards, group: Any) -> None:
    """Read tensors, on all ranks together: what one of them refuses, none loads."""
    try:
        load(parts, storage_reader=shards, process_group=group)
    except CheckpointException as error:  # which is no Exception
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, (FxampError, OSError)) or not isinstance(first, Exception):
            raise first from error
        raise PolicyError(f"'{shards.folder}' cannot be loaded: {first}") from error


def _tensors(step: TrainStep) -> dict[str, Tensor]:
    tensors = {f"model.{_plain(step.model, name)}": t for name, t in step.model.state_dict().items()}
    for index, average in enumerate(step.averages):
        tensors.update((f"ema.{index}.{_plain(average, name)}", t) for name, t in average.state_dict().items())
    tensors.update((f"beside.{name}", t) for name, t in beside(step).items())
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}


def _slots(step: TrainStep) -> Iterator[tuple[int, int, str, Tensor]]:
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
    with warnings.catch_warnings():  # about a single process without a process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
