"""Notice hooks that are registered after a graph was captured.

Dynamo guards the hooks that were there when it captured. Guards on the tables of hooks that are empty would cost up to
2 ms a call for 900 modules, so Dynamo leaves them out, and this watches the number of all hooks ever registered.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from .._torch import global_module_hooks, is_module_tracker, number_of_hooks

_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)


class HookWatch:
    """Says whether a model has other hooks than at the last look."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._number, self._hooks = model, number_of_hooks(), _hooks_of(model)

    def moved(self) -> bool:
        """Say whether hooks were added since the last look; of hooks that were removed Dynamo's guards know."""
        number = number_of_hooks()
        if number == self._number:
            return False
        self._number, before, self._hooks = number, self._hooks, _hooks_of(self._model)
        return not self._hooks <= before


def _hooks_of(model: nn.Module) -> set[Hashable]:
    found: set[Hashable] = {("", "", id(hook)) for hook in global_module_hooks() if not is_module_tracker(hook)}
    for module in model.modules():
        held: dict[str, Any] = module.__dict__
        for name in _TABLES:
            if table := held.get(name):
                found.update((id(module), name, key) for key in table)
    return found
