"""`fxamp.huggingface.FxampCallback`: the plan, the loss scale and a census in the logs of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .integrations.packages import loaded

if TYPE_CHECKING:
    from .integrations.huggingface import FxampCallback as FxampCallback

__all__ = ["FxampCallback"]


def __getattr__(name: str) -> Any:
    return loaded(__name__, name, __all__, "transformers", (5, 0))
