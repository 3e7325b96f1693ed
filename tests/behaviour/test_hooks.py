"""Hooks of modules, which are refused ahead of time, take effect in a model that is captured at its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.front_ends import FRESH, convert, decided, one, under_autocast
from tests.support.helpers import Two, example

pytestmark = FRESH


HOOKS: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "forward hook": nn.Module.register_forward_hook,
    "forward pre-hook": nn.Module.register_forward_pre_hook,
    "backward hook": nn.Module.register_full_backward_hook,
    "backward pre-hook": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_hook_fires_at_the_first_call(kind: str) -> None:
    model, seen = Two(), list[str]()
    HOOKS[kind](model.l, lambda *_: seen.append(kind))
    module = convert(model, None, "view")
    module(example().requires_grad_()).sum().backward()
    assert seen == [kind]
    assert set(decided(module, "linear")) == {"bfloat16"}  # Dynamo leaves a module with backward hooks to Python


def test_hooks_of_a_container_take_effect_and_see_what_autocast_gives() -> None:
    seen: list[torch.dtype] = []

    def treble(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output.dtype)
        return output * 3

    inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = nn.Sequential(inner, nn.Linear(6, 6))
    inner.register_forward_hook(treble)
    module = convert(model, None, "view")
    got = module(example())
    assert torch.equal(got, under_autocast(model, one()).float())
    assert seen[0] == torch.bfloat16
    assert module.state_dict().keys() == model.state_dict().keys()
