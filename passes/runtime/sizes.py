"""The check of sizes and dtypes of inputs that a converted graph begins with, if it was exported for some alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..contract.errors import CaptureError


def check_sizes(
    inputs: Sequence[Tensor], names: Sequence[str], sizes: Sequence[Sequence[int | str]],
    bounds: Mapping[str, tuple[int, int | None]], dtypes: Sequence[torch.dtype] = (),
) -> None:  # fmt: skip
    """Refuse inputs of other sizes or dtypes than a graph was exported for; the error names input and dimension.

    The size of a dimension is a number, or the name of a size that may vary within bounds. Graphs that were saved by
    older versions have no dtypes.
    """
    for value, name, dtype in zip(inputs, names, dtypes, strict=False):
        if value.dtype != dtype and (value.is_floating_point() or dtype.is_floating_point):
            raise CaptureError(
                f"input '{name}' is {value.dtype}, and was exported as {dtype}: cast it, or export for that dtype."
            )
    known: dict[str, tuple[int, str]] = {}
    for value, name, wanted in zip(inputs, names, sizes, strict=True):
        if value.dim() != len(wanted):
            raise CaptureError(f"input '{name}' has {value.dim()} dimensions, and was exported with {len(wanted)}.")
        for at, want in enumerate(wanted):
            size, where = value.shape[at], f"dimension {at} of input '{name}'"
            if isinstance(want, int):
                _require(size == want, f"{where} has size {size}, and was exported with {want}")
                continue
            first, there = known.setdefault(want, (size, where))
            _require(size == first, f"{where} has size {size}, and was exported with that of {there}, {first}")
            least, largest = bounds.get(want, (0, None))
            inside = size >= least and (largest is None or size <= largest)
            _require(inside, f"{where} has size {size}, and was exported for sizes {least} to {largest or 'any'}")


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise CaptureError(f"{text}: export with dynamic_shapes to vary it.")
