"""The private names of torch that nothing public replaces, in one place.

Each is used by PyTorch's own documentation or by its downstream projects, and each is tested against the oldest and
the newest supported torch: fake tensors (shapes and dtypes without data), dispatch modes (what an operator really
did), the dispatcher's own list of autocast rules, the exporter's guards, and autocast regions as two calls.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP as GUARD_NAMES
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils import _pytree as pytree


def autocast_registrations(device: str) -> frozenset[str]:
    """Names (`namespace::op` or `namespace::op.overload`) with an autocast kernel for `device` ("cpu", "cuda").

    The fallthrough for everything else is not in the list. Rules that `torch.library.register_autocast` added are.
    """
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def guards_of(program: ExportedProgram) -> list[str]:
    """Return what the exporter assumed of the sizes, as Python over `L['argument'][i].size()[j]`."""
    return list(getattr(program, "_guards_code", ()))


__all__ = [
    "GUARD_NAMES",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "autocast_registrations",
    "enter_autocast",
    "exit_autocast",
    "guards_of",
    "pytree",
]
