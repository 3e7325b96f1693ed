"""What a view is asked for once, and keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from passes.contract.errors import PolicyError
from passes.contract.policy import nearest

from ..capture.backend import Inner


@dataclass(frozen=True)
class Settings:
    """Arguments of `convert`, of the same names."""

    backend: Inner = "eager"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None
    on_change: str = "recompile"
    methods: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options or {}))
        if self.dynamic not in (True, False, None):
            raise PolicyError(f"dynamic is True, False or None, not {self.dynamic!r}.")
        if self.on_change not in ("recompile", "error"):
            raise PolicyError(f"on_change is 'recompile' or 'error', not {self.on_change!r}.")
        if isinstance(self.methods, str):
            raise PolicyError(f"methods is a tuple of names: write methods=({self.methods!r},).")

    def refuse_unfit(self, model: nn.Module) -> None:
        """Raise PolicyError for a method that the model's class does not define."""
        for name in self.methods:
            if not callable(getattr(type(model), name, None)):
                known = [n for n in dir(type(model)) if callable(getattr(type(model), n, None))]
                raise PolicyError(f"{type(model).__name__} has no method {name!r}{nearest(name, known)}.")
