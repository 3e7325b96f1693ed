"""What a training step on several ranks refuses, by name and with a way out: settings that go wrong, or that differ.

Ranks compare their settings before the first step, since later a mismatch would make a rank hang. They exchange them
through the store of the process group: a collective would hang if a rank does not call it, while by the store ranks
that disagree on which ranks train together get an error too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes.contract.errors import PolicyError

from ..._torch import communication_hook, communication_states, gathering, is_sharded, store_of_ranks
from ...view.view import is_view
from .ranks import Ranks

_SHOWN = 3  # ranks and settings named one by one
_POLL = 0.01  # seconds


def refuse_unfit_model(model: nn.Module, weights: str) -> None:
    """Raise PolicyError for a model that cannot be trained in the way in which it is sharded."""
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model"
        if type(module).__name__ == "FullyShardedDataParallel":
            raise PolicyError(
                f"{where} is a FullyShardedDataParallel, which flattens parameters: each rank would clip by the norm "
                "of its own part, and skip steps by itself. Shard it by torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        if not is_sharded(module):
            continue
        dtype, casts_inputs = gathering(module)
        if weights == "per_step":
            does = (
                f"FSDP2 casts each shard once before it gathers, by param_dtype={dtype}"
                if dtype
                else "To cast each shard once before it is gathered, set MixedPrecisionPolicy(param_dtype=...)"
            )
            raise PolicyError(
                f"weights='per_step' does not work under FSDP2, which shards {where}: it gathers weights again for "
                f"every call, so no cast can be kept longer than a call. {does}. Leave weights at 'auto'."
            )
        if dtype not in (None, torch.float32) and casts_inputs and any(map(is_view, module.modules())):
            raise PolicyError(
                f"FSDP2 casts the inputs of {where} to {dtype}, but the graph does its own casts: set "
                "cast_forward_inputs=False in its MixedPrecisionPolicy"
            )


def refuse_unfit_ranks(ranks: Ranks, *, accumulate_steps: int, scaled: bool) -> None:
    """Raise PolicyError for settings of DistributedDataParallel that go wrong in a training step."""
    for replica in ranks.replicas:
        if replica.static_graph and accumulate_steps > 1:
            raise PolicyError(
                "DistributedDataParallel(static_graph=True) does not survive a backward without an exchange of "
                "gradients (pytorch#143580), and every window of several micro-batches has one. Leave static_graph "
                "out, or let every micro-batch be a window: accumulate_steps=1."
            )
        if replica.mixed_precision is not None:
            raise PolicyError(
                "DistributedDataParallel(mixed_precision=...) casts parameters and gradients itself: leave it out, "
                "since the graph of a converted model does its own casts."
            )
        if scaled and any(type(state).__name__ == "PowerSGDState" for state in communication_states(replica)):
            raise PolicyError(
                f"the communication hook '{communication_hook(replica)}' carries its compression error into the next "
                "step, at the old loss scale; after one overflow that error stays NaN. Train in BF16 without loss "
                "scaling, or use fp16_compress_hook or bf16_compress_hook"
            )
    if ranks.replicas and ranks.apart and not ranks.spread:
        ignored = {name for replica in ranks.replicas for name in replica.parameters_to_ignore}
        forgotten = [name for name in ranks.apart if not any(name.endswith(one) for one in ignored)]
        if forgotten:
            raise PolicyError(
                f"'{forgotten[0]}' is trained, and no DistributedDataParallel exchanges its gradient, so it would "
                "become different on every rank. Wrap the module that holds it, model and loss together if need be, or "
                "name it in parameters_to_ignore if that is intended."
            )


def refuse_differences(ours: Mapping[str, object], groups: Sequence[Any], model: nn.Module) -> None:
    """Exchange settings, by their `repr`, with the ranks of some groups, and of those ranks' groups.

    Raises:
        PolicyError: On all ranks, settings differ; or, on those that wait for it and on itself, a rank takes its first
            step of this model with other ranks; or one did not arrive within the timeout of the process group.
    """
    store, us = store_of_ranks(), dist.get_rank()
    told = {name: repr(value) for name, value in ours.items()}
    # What all replicas and shards of a model share: the parameters' names and unsharded shapes.
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    step = f"fxamp/{hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]}"
    # Steps of different ranks belong together if each is its rank's n-th of an equal model, or n-th with the group.
    step += f"/{store.add(f'{step}/{us}', 1)}"
    shared = [(ranks, store.add(f"fxamp/{ranks}/{us}", 1)) for ranks in map(dist.get_process_group_ranks, groups)]
    for ranks, count in shared:
        store.set(f"fxamp/{ranks}/{count}/{us}", json.dumps([told, shared]))
    store.set(f"{step}/{us}", json.dumps([ranks for ranks, _ in shared]))

    known, waiting = {us: told}, list(shared)
    until = time.monotonic() + store.timeout.total_seconds()
    while waiting:
        ranks, count = waiting.pop()
        for rank in ranks:
            if rank not in known:
                place = f"fxamp/{ranks}/{count}/{rank}"
                _wait_for(store, rank, place, f"{step}/{rank}", ranks, until)
                known[rank], theirs = json.loads(store.get(place))
                waiting += theirs
    for rank in () if shared else range(dist.get_world_size()):
        theirs = _partners(store, f"{step}/{rank}") or []
        if any(us in ranks for ranks in theirs):
            _refuse_others({us: [], rank: theirs})
    differ = [name for name in ours if len({settings.get(name) for settings in known.values()}) > 1]
    if differ:
        raise PolicyError(
            "ranks that train one model have different settings: "
            + "; ".join(_listed(name, known) for name in differ[:_SHOWN])
            + ". Give all of them the same settings, or give them process groups of their own."
        )


def _wait_for(store: Any, rank: int, place: str, step: str, ranks: list[int], until: float) -> None:
    """Wait until a rank has stored its settings for a group; refuse a rank that takes this step without the group."""
    while not store.check([place]):
        theirs = _partners(store, step)
        if theirs is not None and ranks not in theirs:
            _refuse_others({dist.get_rank(): [ranks], rank: theirs})
        if time.monotonic() > until:
            raise PolicyError(
                f"rank {dist.get_rank()} waited for rank {rank}, one of {ranks}, and that rank did not arrive within "
                f"{store.timeout}. Ranks compare their settings at a first step, after `load` and `switch`, and after "
                "an error in a window of several micro-batches, which all have to do together."
            )
        time.sleep(_POLL)


def _partners(store: Any, step: str) -> list[list[int]] | None:
    return json.loads(store.get(step)) if store.check([step]) else None


def _refuse_others(groups: Mapping[int, Sequence[list[int]]]) -> None:
    said = [f"rank {one} trains it {f'with {others[0]}' if others else 'alone'}" for one, others in groups.items()]
    raise PolicyError(
        f"ranks disagree on which ranks train this model: {', '.join(sorted(said))}. Shard or wrap the model over the "
        "same ranks on every rank."
    )


def _listed(name: str, known: Mapping[int, Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, settings in sorted(known.items()):
        ranks[settings.get(name, "nothing")].append(rank)
    said = []
    for value, those in ranks.items():
        more = f" and {len(those) - _SHOWN} more" if len(those) > _SHOWN else ""
        said.append(f"{value} on rank {', '.join(map(str, those[:_SHOWN]))}{more}")
    return f"{name} is {', '.join(said)}"
