"""What Python, or an op, reads of a value is what it reads of the model's: its dtype, its bits, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.front_ends import F32, FRESH, FRONT_ENDS, convert, decided, each_front_end, o1, one, plain, tensors
from tests.support.helpers import Two

pytestmark = FRESH


def bits(self: Any, x: Tensor) -> Any:
    return self.l(x).view(torch.int32), self.m(x)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_the_bits_of_a_value_are_those_of_the_model(front_end: str) -> None:
    model = Two(bits)
    module, got = o1(model, one(), front_end)
    assert torch.equal(got[0], plain(model, one())[0])
    assert decided(module, "linear") == ["float32", "bfloat16"]


def observe(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    wide = torch.promote_types(y.dtype, torch.float16)
    return self.m(y) * y.element_size(), y.to(wide), y.new_ones(2).to(wide) * torch.finfo(F32).eps


def by_the_size_of_an_element(self: Any, x: Tensor) -> Any:
    return self.m(x) * self.l(x).element_size()


@pytest.mark.default_case(front_end="view")
@each_front_end
@pytest.mark.parametrize("forward", [observe, by_the_size_of_an_element])
def test_a_dtype_that_decides_something_is_that_of_the_model(front_end: str, forward: Callable[..., Any]) -> None:
    model = Two(forward)
    _, got = o1(model, one(), front_end)
    with torch.autocast("cpu"):  # under which the model is captured, which decides
        expected = tensors(plain(model, one()))
    for ours, eager in zip(tensors(got), expected, strict=True):
        torch.testing.assert_close(ours, eager.float(), rtol=0.02, atol=0.02)


def scaled_by_item(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m(y) * y.detach().abs().max().item()


def scaled_by_numpy(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m(y) * float(y.detach().abs().numpy().max())


def asserted(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    torch._assert(y.shape[1] == 6, "six columns")
    return self.m(y)


LEAVING: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "item": (scaled_by_item, {}),
    "numpy": (scaled_by_numpy, {"graph": "numpy"}),
    "assert": (asserted, {}),
}


@pytest.mark.parametrize("way", FRONT_ENDS)  # all of them, for each says something else
@pytest.mark.parametrize("kind", LEAVING)
def test_what_python_reads_of_a_value_is_right(kind: str, way: str) -> None:
    forward, refused = LEAVING[kind]
    model = Two(forward)
    if way in refused:
        with pytest.raises((TypeError, RuntimeError), match=refused[way]):  # torch's own, as under torch.autocast
            convert(model, one(), way)(*one())
        return
    _, got = o1(model, one(), way)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.02)
