"""A small model converted once for each policy, and what tests of a training step compare of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
FP16, BF16 = "O1,dtype=fp16", "O2,dtype=bf16"
WEIGHTS = ("per_use", "per_step")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's numbers by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class WeightCasts(TorchDispatchMode):
    """Counts casts of a model's weights to 16 bits: all of them, and those before each step of an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.by_step, self._model = 0, list[int](), model

    def __enter__(self) -> Any:
        self._hook = register_optimizer_step_post_hook(lambda *_: self.by_step.append(self.count - sum(self.by_step)))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        weights = {p.data_ptr() for p in self._model.parameters()}
        if func is torch.ops.aten._to_copy.default and out.dtype in (torch.bfloat16, torch.float16):
            self.count += args[0].data_ptr() in weights
        if func is torch.ops.aten._foreach_copy_.default:
            low = [to.dtype != source.dtype for to, source in zip(*args[:2], strict=True)]
            self.count += sum(
                source.data_ptr() in weights for source, is_low in zip(args[1], low, strict=True) if is_low
            )
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def converted(policy: str = FP16, kind: Callable[[], nn.Module] = Net) -> Any:
    """Return a view of a new model, always with the same weights."""
    torch.manual_seed(0)
    return fxamp.convert(kind(), policy=policy)


def loss_times(output: Tensor, factor: float = 1.0) -> Tensor:
    return output.float().square().mean() * factor


def state(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)
