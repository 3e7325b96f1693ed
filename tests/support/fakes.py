"""How much is run on fake tensors, as a number that is the same on every machine, and whatever ran before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from passes._torch import FakeTensorMode


@contextlib.contextmanager
def counted_fakes() -> Iterator[Callable[[], int]]:
    """Count the ops that reach any mode of fake tensors inside this context; the value tells how many those were."""
    ops: list[Any] = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counting(self: FakeTensorMode, func: Any, *args: Any) -> Any:
        ops.append(func)
        return dispatch(self, func, *args)

    uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    with uncached, mock.patch.object(FakeTensorMode, "__torch_dispatch__", counting):
        yield lambda: len(ops)
