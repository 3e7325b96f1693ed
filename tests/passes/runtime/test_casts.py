"""Casts that share a storage: each reader's gradient arrives by itself, as from a copy of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.runtime.casts import again

BF16 = torch.bfloat16
Cast = Callable[[Tensor], Tensor]


def apart(value: Tensor) -> Tensor:
    return value.to(BF16)


class OneStorage:
    """Casts each value once, and gives its later readers the same storage."""

    def __init__(self) -> None:
        self.first: dict[Tensor, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        first = self.first.get(value)
        if first is None:
            self.first[value] = made = value.to(BF16)
            return made
        return again(value, BF16, first)


class LowSums(OneStorage):
    """The control: one cast of a value for all its readers."""

    def __call__(self, value: Tensor) -> Tensor:
        return self.first.setdefault(value, value.to(BF16))


def program(seed: int, cast: Cast) -> list[Tensor]:
    """Return outputs and gradients of a random program whose values have low readers, FP32 readers, and views."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    x, weights = torch.randn(4, 8, requires_grad=True), [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    values = [x * 1.5]
    for _ in range(rng.randrange(3, 9)):
        value, weight = rng.choice(values[-3:]), rng.choice(weights)
        read = rng.randrange(4)
        if read == 0:
            values.append(value.sin())
        elif read == 1:
            values.append((cast(value).view(8, 4).t().reshape(4, 8) @ weight.to(BF16)).float())
        else:
            values.append((cast(value) @ weight.to(BF16)).float() + value * (read - 2))
    loss = torch.stack([v.square().mean() for v in values[-2:]]).sum()
    gradients = torch.autograd.grad(loss, [x, *weights], allow_unused=True, create_graph=rng.random() < 0.3)
    if gradients[0] is not None and gradients[0].requires_grad:
        gradients += torch.autograd.grad(gradients[0].square().sum(), [x, *weights], allow_unused=True)
    return [*values, *(g for g in gradients if g is not None)]


def differ(cast: Callable[[], Cast]) -> list[int]:
    """Return the programs whose outputs or gradients are not those with a copy for each reader."""
    return [
        seed for seed in range(100)
        if not all(map(torch.equal, program(seed, apart), program(seed, cast())))
    ]  # fmt: skip


def test_gradients_are_those_of_separate_copies() -> None:
    assert differ(OneStorage) == []
    assert len(differ(LowSums)) > 20


def test_later_casts_have_the_storage_of_the_first_and_a_node_of_their_own() -> None:
    value = torch.randn(3, requires_grad=True) * 2
    first = value.to(BF16)
    second = again(value, BF16, first)
    assert second.data_ptr() == first.data_ptr()
    assert second.grad_fn is not None
    assert second.grad_fn is not first.grad_fn


def test_without_gradients_the_first_cast_is_returned() -> None:
    value = torch.randn(3)
    first = value.to(BF16)
    assert again(value, BF16, first) is first
    with torch.no_grad():
        assert again(value.requires_grad_(), BF16, first) is first


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_under_a_transform_it_is_a_plain_cast(transform: Callable[..., Callable[[Tensor], Tensor]]) -> None:
    def f(value: Tensor) -> Tensor:
        return (again(value, BF16, value.to(BF16)).float() * value).sum()

    def plain(value: Tensor) -> Tensor:
        return (value.to(BF16).float() * value).sum()

    x = torch.randn(2, 3) if transform is torch.vmap else torch.randn(3)
    assert torch.equal(transform(f)(x), transform(plain)(x))


def test_a_compiler_sees_a_plain_cast() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    class Twice(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            first = value.to(BF16)
            return first.sum() + again(value, BF16, first).sum()

    Twice()(torch.ones(2, requires_grad=True))
    torch.compile(Twice(), backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    assert [n.target for n in graphs[0].graph.nodes if n.op.startswith("call")].count("to") == 2
