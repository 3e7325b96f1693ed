"""A log line where a converted module runs on another device than it was converted for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .kept import Kept

logger = logging.getLogger("fxamp")


class DeviceWatch:
    """Logs once that a converted module runs where `torch.autocast` casts other ops. At O0 nothing is cast."""

    def __init__(self, kept: Kept) -> None:
        self._device, self._original = kept.device_type, kept.original
        self._done = not kept.plan.policy.level.rounds

    def __call__(self, module: nn.Module, flat: Sequence[Any]) -> None:
        """Compare the device with that of the inputs of a call, and of the parameters."""
        if self._done or torch.compiler.is_compiling():
            return
        found = {value.device.type for value in flat if isinstance(value, torch.Tensor)}
        if self._device in found or not found - {"meta"}:
            return
        found = {p.device.type for p in module.parameters()} or found  # forward() may move its inputs
        self._done = True
        if self._device not in found:
            device = min(found)
            logger.warning(
                "fxamp: %s was converted for '%s' and runs on '%s', where torch.autocast casts other ops. For the "
                "values that it gives there, convert again, with device=%s in the policy or the model on that device.",
                self._original, self._device, device, device,
            )  # fmt: skip
