"""Settings that ranks must share, compared before the first step: a later mismatch makes a rank wait for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from passes.contract.errors import PolicyError

_SHOWN = 3  # ranks and settings named one by one


def compare(ours: Mapping[str, object], groups: Sequence[Any]) -> None:
    """Exchange settings with the ranks of some groups, and refuse to continue if they differ.

    Args:
        ours: Settings by name; what is compared is their `repr`.
        groups: The groups of ranks that train together: the dimensions of a grid of ranks, so that each rank learns
            the settings of all.

    Raises:
        PolicyError: Ranks differ (raised on all ranks), or a rank did not arrive within the timeout of its group
            (raised on the others).
    """
    known = {dist.get_rank(): {name: repr(value) for name, value in ours.items()}}
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(gathered, known, group=group)
        except RuntimeError as error:
            raise PolicyError(
                f"rank {dist.get_rank()} waited for the other ranks of {dist.get_process_group_ranks(group)} at its "
                "first step, and not all of them arrived: they train with other ranks, take no step, or failed before "
                f"it. {error}"
            ) from error
        for one in gathered:
            known.update(one)
    differ = [name for name in ours if len({settings.get(name) for settings in known.values()}) > 1]
    if differ:
        raise PolicyError(
            "ranks that train one model have different settings: "
            + "; ".join(_listed(name, known) for name in differ[:_SHOWN])
            + ". Give all of them the same settings, or give them process groups of their own."
        )


def _listed(name: str, known: Mapping[int, Mapping[str, str]]) -> str:
    """Say which ranks have which value of a setting."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, settings in sorted(known.items()):
        ranks[settings.get(name, "nothing")].append(rank)
    said = []
    for value, those in ranks.items():
        more = f" and {len(those) - _SHOWN} more" if len(those) > _SHOWN else ""
        said.append(f"{value} on rank {', '.join(map(str, those[:_SHOWN]))}{more}")
    return f"{name} is {', '.join(said)}"
