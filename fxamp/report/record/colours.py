"""The three classes of a colour, and what each looks like in every form that has colours."""

from __future__ import annotations

from passes.contract.dtypes import dtype_name
from passes.graph.values import LOW_DTYPES

LOW = tuple(map(dtype_name, LOW_DTYPES))
PALETTE = {"low": "#2f6fed", "fp32": "#e07a1f", "other": "#8b93a1"}


def style_of(dtype: str) -> str:
    """Return the class of a dtype: "low" for 16 bits, "fp32", or "other"."""
    return "low" if dtype in LOW else "fp32" if dtype == "float32" else "other"
