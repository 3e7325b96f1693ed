"""The private names of torch that nothing public replaces, in one place.

Each is used by PyTorch's own documentation or by its downstream projects, and each is tested against the oldest and
the newest supported torch: fake tensors (shapes and dtypes without data), dispatch modes (what an operator really
did), and the dispatcher's own list of autocast rules.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils import _pytree as pytree


def autocast_registrations(device: str) -> frozenset[str]:
    """Names (`namespace::op` or `namespace::op.overload`) with an autocast kernel for `device` ("cpu", "cuda").

    The fallthrough for everything else is not in the list. Rules that `torch.library.register_autocast` added are.
    """
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "TorchFunctionMode", "autocast_registrations", "pytree"]
