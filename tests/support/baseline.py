"""What fxamp is compared with: a model under `torch.autocast`, and how far two runs of a model are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class UnderAutocast(nn.Module):
    """A model whose every call runs under `torch.autocast`.

    Args:
        model: takes any arguments; it is shared, not copied.
        dtype: torch.bfloat16 or torch.float16, what autocast casts to.
        device: "cpu" or "cuda", whose ops autocast casts.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.model, self.dtype, self.device = model, dtype, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model under autocast, in autocast's dtypes."""
        with torch.autocast(self.device, dtype=self.dtype):
            return self.model(*args, **kwargs)


def distance(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors together over the norm of the reference, computed in float64.

    Args:
        got: tensors by name, of the shapes of the reference's, of any floating dtype.
        reference: what they should be, not all zero.

    Raises:
        ValueError: the names are not the same.
    """
    if got.keys() != reference.keys():
        raise ValueError(
            f"only one side has {sorted(got.keys() ^ reference.keys())}; compare tensors of the same names"
        )
    difference = sum((got[n].double() - t.double()).pow(2).sum().item() for n, t in reference.items())
    return float((difference / sum(t.double().pow(2).sum().item() for t in reference.values())) ** 0.5)
