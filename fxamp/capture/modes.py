"""The modes of torch around a call or a graph: an error in it, or an interrupt, leaves none switched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from passes.contract.devices import DEVICES


class Modes:
    """The grad mode and autocast of devices as they are now; as a context, put back where an error ends it."""

    def __init__(self, devices: Iterable[str] = tuple(DEVICES)) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self._cached, self._depth = torch.is_autocast_cache_enabled(), _depth()

    def restore(self) -> None:
        """Put back what has changed, and leave the regions of autocast that were entered."""
        torch.set_grad_enabled(self._grad)
        for device, on, dtype in self._autocast:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        while _depth() > self._depth:
            torch.autocast_decrement_nesting()
        if not self._depth:  # as `torch.autocast` does at its end
            torch.clear_autocast_cache()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        try:
            self.restore()
        finally:
            self.restore()  # a signal may have ended the first


def _depth() -> int:  # of open regions of autocast: C code calls both functions, and handles no signal in between
    enter, leave = iter(torch.autocast_increment_nesting, None), iter(torch.autocast_decrement_nesting, None)
    return next(zip(enter, leave, strict=False))[1]
