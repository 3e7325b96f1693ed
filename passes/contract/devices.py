"""The devices that fxamp knows, one row for each: which op lists it has, and what moving bytes costs on it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str  # what torch calls it
    # The device whose column of the op table is used: itself, or the device whose autocast lists it shares. An op that
    # torch has registered only for that other device, such as a vendor's kernel, is on no list here.
    lists: str
    autocast: str  # the dispatch key of its autocast
    launch: int  # how many bytes move in the time of one launch; assumed, not measured
    bytes_per_nanosecond: int  # how many bytes move in a nanosecond; assumed
    # Whether copies of many tensors take less time by one launch than one by one: false on a CPU, whose cache would
    # lose each copy before it is read.
    batches: bool
    is_here: Callable[[], bool]  # tells whether this process has one
    capability: Callable[[], str]  # names the kind of this machine's device; measured facts hold for one kind
    synchronize: Callable[[], None]  # waits for what was launched
    # From how many elements on casts of a value share a storage where each needs a node of autograd and nothing else is
    # asked for; None for never.
    shares_storage_from: int | None = None
    # The ops of which its own lists say another kind than those that it shares: their names, by kind.
    own: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def kinds(self) -> Mapping[str, str]:
        """The kind of each op that its own lists name."""
        return {name: kind for kind, names in self.own.items() for name in names.split()}


_ROWS = (
    Device(  # 5 us at 10 GB/s, on a core; a node of autograd in Python takes 50 us
        "cpu", "cpu", "AutocastCPU", 50_000, 10, False,
        lambda: True, torch.backends.cpu.get_cpu_capability, torch.cpu.synchronize, 300_000,
    ),
    Device(  # 2 us at 500 GB/s
        "cuda", "cuda", "AutocastCUDA", 1_000_000, 500, True,
        lambda: torch.cuda.is_available(), lambda: "sm_{}{}".format(*torch.cuda.get_device_capability()),
        torch.cuda.synchronize,
    ),
    Device(  # costs copied from CUDA
        "xpu", "cuda", "AutocastXPU", 1_000_000, 500, True,
        lambda: torch.xpu.is_available(), lambda: torch.xpu.get_device_name(), lambda: torch.xpu.synchronize(),
    ),
    Device(  # costs copied from CUDA
        "mps", "cuda", "AutocastMPS", 1_000_000, 500, True,
        torch.backends.mps.is_available, platform.machine, lambda: torch.mps.synchronize(),
        own={
            "low": "_mps_convolution rnn_tanh_cell rnn_relu_cell",  # the cells call linear
            "fp32": "batch_norm",
            "composite": "gru gru_cell",  # linear layers and pointwise gates, whose state may be FP32
            "promote": "lstm",  # its kernel takes the operands as they are
        },
    ),
)  # fmt: skip
DEVICES: Mapping[str, Device] = {row.name: row for row in _ROWS}
