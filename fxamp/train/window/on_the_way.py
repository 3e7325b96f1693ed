"""Copy values that the host will need from the device asynchronously, as soon as they are known.

A read waits for all kernels launched before it. A copy that is launched before the optimizer's step does not wait for
that step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OnTheWay:
    """A flag of one element whose copy to the host has begun; `bool()` waits for it.

    Args:
        flag: On an accelerator; what is written to it later is not seen.
    """

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._arrived = torch.get_device_module(flag.device).current_stream(flag.device).record_event()

    def __bool__(self) -> bool:
        self._arrived.synchronize()
        return bool(self._host)


def begin(flag: bool | Tensor) -> bool | Tensor | OnTheWay:
    """Begin to copy a flag from an accelerator to the host; a flag on the host is returned itself."""
    return OnTheWay(flag) if isinstance(flag, Tensor) and flag.device.type != "cpu" else flag
