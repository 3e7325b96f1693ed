"""Models whose forward writes to itself: to parameters, `.data`, buffers, attributes, tables and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Parts:
    """What a model holds that is no module: an object with a list, a number and a tensor."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.number = 0
        self.tensor = torch.zeros(3)


def data_written(m: Any, h: Tensor) -> Tensor:
    """Write values into `.data`."""
    m.scale.data.copy_(h.detach().float().mean(0))
    return h


def data_replaced(m: Any, h: Tensor) -> Tensor:
    """Set `.data`."""
    m.scale.data = h.detach().float().std(0)
    return h


def data_replaced_low(m: Any, h: Tensor) -> Tensor:
    """Set `.data` to a low tensor."""
    m.frozen.data = h.detach().mean(0)
    return h


def initialized_once(m: Any, h: Tensor) -> Tensor:
    """Write a parameter in the first call, as an ActNorm."""
    if m.done.item() == 0:
        with torch.no_grad():
            m.scale.copy_(1 / (h.float().std(0) + 1e-6))
            m.done.fill_(1)
    return h


def momentum(m: Any, h: Tensor) -> Tensor:
    """Let a layer follow another, as a momentum encoder."""
    with torch.no_grad():
        for key, query in zip(m.m.parameters(), m.l.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
    return h


def parameter_replaced(m: Any, h: Tensor) -> Tensor:
    """Assign another parameter."""
    m.scale = nn.Parameter(torch.full((6,), 2.0))
    return h


def buffer_written(m: Any, h: Tensor) -> Tensor:
    """Write a buffer."""
    m.mean.lerp_(h.detach().float().mean(0), 0.1)
    return h


def buffer_replaced(m: Any, h: Tensor) -> Tensor:
    """Assign a buffer."""
    m.mean = m.mean * 0.9
    return h


def attribute(m: Any, h: Tensor) -> Tensor:
    """Assign attributes."""
    m.steps += 1
    m.last = h.detach()
    return h


def nested(m: Any, h: Tensor) -> Tensor:
    """Write what an object of the model holds."""
    m.parts.seen.append(len(m.parts.seen))
    m.parts.number += 1
    m.parts.tensor.add_(1)
    return h


def cached(m: Any, h: Tensor) -> Tensor:
    """Fill a table."""
    m.cache.setdefault("key", []).append(h.detach())
    return h


def module_added(m: Any, h: Tensor) -> Tensor:
    """Add a module to a table of modules."""
    if "new" not in m.layers:
        m.layers["new"] = nn.Linear(6, 6)
    return h


def queue(m: Any, h: Tensor) -> Tensor:
    """Write a row of a queue."""
    at = int(m.done)
    m.queue[at : at + 1] = h.detach().float()[:1]
    m.done += 1
    return h


def flags(m: Any, h: Tensor) -> Tensor:
    """Change flags of parameters and modules."""
    m.scale.requires_grad_(not m.scale.requires_grad)
    m.l.training = not m.l.training
    return h


def mask(m: Any, h: Tensor) -> Tensor:
    """Write a mask into `.data`."""
    m.m.weight.data.mul_((m.m.weight.abs() > 0.05).float())
    return h


WRITES = (
    data_written, data_replaced, data_replaced_low, initialized_once, momentum, parameter_replaced, buffer_written,
    buffer_replaced, attribute, nested, cached, module_added, queue, flags, mask,
)  # fmt: skip
PLACES = ("first", "last", "before a break", "behind a break")


def model_that(write: Callable[[Any, Tensor], Tensor], place: str) -> Any:
    """Return a model of [n, 6] whose forward writes something, at a place of it."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.ones(6))
            self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
            for name, value in (("mean", torch.zeros(6)), ("done", torch.zeros(1)), ("queue", torch.zeros(8, 6))):
                self.register_buffer(name, value)
            self.layers, self.steps, self.last = nn.ModuleDict(), 0, None
            self.parts, self.cache, self.plain = Parts(), dict[str, Any](), torch.arange(6.0)

        def forward(self, x: Tensor) -> Any:
            if place == "first":
                x = write(self, x)
            h = F.relu(self.l(x))
            if place in ("last", "before a break"):
                h = write(self, h)
            if place.endswith("break"):
                torch._dynamo.graph_break()
            if place == "behind a break":
                h = write(self, h)
            return self.m(h) * self.scale.mean()

    return Writer()
