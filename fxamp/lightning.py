"""`fxamp.lightning.FxampPrecision`: a precision plugin for Lightning's Trainer and for Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .integrations.packages import loaded

if TYPE_CHECKING:
    from .integrations.lightning import FxampPrecision as FxampPrecision

__all__ = ["FxampPrecision"]


def __getattr__(name: str) -> Any:
    return loaded(__name__, name, __all__, "lightning", (2, 5))
