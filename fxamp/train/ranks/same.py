"""Compare the settings that ranks must share before the first step: later a mismatch would make a rank hang.

Ranks exchange them through the store of the process group. A collective would hang if a rank does not call it; with the
store, ranks that disagree on which ranks train together get an error too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from passes._torch import store_of_ranks
from passes.contract.errors import PolicyError

_SHOWN = 3  # ranks and settings named one by one
_POLL = 0.01  # seconds


def compare(ours: Mapping[str, object], groups: Sequence[Any], model: nn.Module) -> None:
    """Exchange settings with the ranks of some groups, and of those ranks' groups; raise an error if they differ.

    Args:
        ours: Settings by name; what is compared is their `repr`.
        groups: The groups of ranks that train together.
        model: The model, of which each rank has a replica or a part.

    Raises:
        PolicyError: Ranks differ in settings (raised on all of them). A rank takes its first step of this model with
            other ranks than this one does (raised on the ranks that wait for it, and on it if it comes later). A rank
            did not arrive within the timeout of the process group.
    """
    store, us = store_of_ranks(), dist.get_rank()
    told = {name: repr(value) for name, value in ours.items()}
    step = f"fxamp/{_digest(model)}"
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
    if not shared:
        for rank in range(dist.get_world_size()):
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
                f"rank {dist.get_rank()} waited for rank {rank}, one of {ranks}, at its first step, and that rank did "
                f"not arrive within {store.timeout}: it takes no steps, or failed before its first step."
            )
        time.sleep(_POLL)


def _partners(store: Any, step: str) -> list[list[int]] | None:
    """Return the groups with which a rank takes a step, None if the rank has not reached that step."""
    return json.loads(store.get(step)) if store.check([step]) else None


def _refuse_others(groups: Mapping[int, Sequence[list[int]]]) -> None:
    said = [f"rank {one} trains it {f'with {others[0]}' if others else 'alone'}" for one, others in groups.items()]
    raise PolicyError(
        f"ranks disagree on which ranks train this model: {', '.join(sorted(said))}. Shard or wrap the model over the "
        "same ranks on every rank."
    )


def _digest(model: nn.Module) -> str:
    """Return a hash of what all replicas and shards of a model share: the parameters' names and unsharded shapes."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _listed(name: str, known: Mapping[int, Mapping[str, str]]) -> str:
    """List the values of a setting, each with the ranks that have it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, settings in sorted(known.items()):
        ranks[settings.get(name, "nothing")].append(rank)
    said = []
    for value, those in ranks.items():
        more = f" and {len(those) - _SHOWN} more" if len(those) > _SHOWN else ""
        said.append(f"{value} on rank {', '.join(map(str, those[:_SHOWN]))}{more}")
    return f"{name} is {', '.join(said)}"
