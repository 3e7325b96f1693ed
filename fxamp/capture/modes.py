"""The modes of torch around a graph: an error in it leaves none switched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from passes.contract.devices import DEVICES


class ModesKeptOnError:
    """A context that puts the grad mode and autocast of devices back where an error leaves a region of a graph open."""

    def __init__(self, devices: Iterable[str] = tuple(DEVICES)) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._found = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in self._devices]
        self._cached, self._depth = torch.is_autocast_cache_enabled(), _depth()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        torch.set_grad_enabled(self._grad)
        for device, on, dtype in self._found:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        while _depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:  # as `torch.autocast` does at its end
                torch.clear_autocast_cache()


def _depth() -> int:
    """Return how many regions of autocast are open."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth
