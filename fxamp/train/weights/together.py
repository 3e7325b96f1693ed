"""Copy many weights with one kernel launch, on devices where a launch is expensive.

A cast makes two things: a low copy and its autograd node. At the end of a window the memory of the copies is freed, and
the nodes are kept. At the start of the next window one batched copy, which autograd does not record, fills them again.

Before: to = w.to(torch.bfloat16); to_1 = v.to(torch.bfloat16)
After:  _foreach_copy_([to, to_1], [w, v])
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from passes._torch import copy_together, in_transform
from passes.contract.devices import DEVICES


def one_launch_pays(weight: Tensor) -> bool:
    """Say whether a weight is on a device where one launch for many copies saves time."""
    row = DEVICES.get(weight.device.type)
    return row is not None and row.batches


class Place:
    """A kept cast's tensor and autograd node, which stay while the memory of the copy is freed and filled again.

    A backward that comes after the copy was freed, or made again, raises an error of torch.

    Attributes:
        weight: The weight that was cast.
        low: Its copy in the low dtype.
        filled: Whether it holds the weight, as it was when it was filled.
    """

    def __init__(self, weight: Tensor, low: Tensor) -> None:
        self.weight, self.low = weight, low
        self._like = _like(weight)
        self._note()

    def _note(self) -> None:
        self.filled, self._version, self._pointer = True, self.weight._version, self.weight.data_ptr()

    def empty(self) -> None:
        """Free the copy, and a gradient that an error has left there."""
        self.low.grad = None
        self.low.data, self.filled = self.low.new_empty(0), False

    def fits(self) -> bool:
        """Say whether the weight still has the shape, dtype and device for which the place was made."""
        return _like(self.weight) == self._like

    def make_room(self) -> Tensor:
        """Allocate memory for the copy and return it, to be filled with the present values of the weight."""
        self.low.data = torch.empty_like(self.weight, dtype=self.low.dtype)
        self._note()
        return self.low

    def holds(self, weight: Tensor) -> bool:
        """Say whether the copy holds the present values of a weight."""
        current = weight._version == self._version and weight.data_ptr() == self._pointer
        return self.filled and weight is self.weight and current and self.fits()


def fill(places: Iterable[Place]) -> None:
    """Fill the copies of all empty places with one launch."""
    empty = [place for place in places if not place.filled and place.fits()]
    if not empty or torch.is_inference_mode_enabled() or in_transform():
        return
    with torch.no_grad():
        copy_together([place.make_room() for place in empty], [place.weight for place in empty])


def _like(weight: Tensor) -> tuple[object, ...]:
    return weight.shape, weight.dtype, weight.device, weight.requires_grad
