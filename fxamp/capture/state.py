"""The states of a model: each may have graphs of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

_GRAD = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@dataclass(frozen=True)
class State:
    """What a graph was captured in."""

    method: str  # that is captured, "" for a call
    training: bool
    grad: str  # "grad", "no_grad" or "inference"

    def __str__(self) -> str:
        return f"{self.method}{': ' if self.method else ''}{'train' if self.training else 'eval'}, {self.grad}"

    @property
    def order(self) -> tuple[str, bool, int]:
        """The place of the state among those of its model."""
        return self.method, not self.training, list(_GRAD).index(self.grad)


TRAINED = State("", True, "grad")
STATES = (TRAINED, State("", False, "grad"), State("", False, "no_grad"), State("", False, "inference"))


def state_of(model: nn.Module, method: str = "") -> State:
    """Return the present state of a model."""
    grad = "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad"
    return State(method, model.training, grad)


@contextlib.contextmanager
def in_state(model: nn.Module, state: State) -> Iterator[None]:
    """Put a model into a state; flags of submodules that differ from the model's are put back at the end."""
    flags = {module: module.training for module in model.modules()}
    if model.training is not state.training:
        for module in flags:
            module.training = state.training
    try:
        with _GRAD[state.grad]():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag
