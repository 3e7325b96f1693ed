"""Notice hooks that are registered, or removed, after a graph was captured.

Dynamo guards the hooks that were there when it captured. Guards on the tables of hooks that are empty would cost up to
2 ms a call for 900 modules, so Dynamo leaves them out, and this watches the number of all hooks ever registered. What
a hook has broken, as a backward hook breaks the graph, no guard mends when it is gone: so of the hooks that were there
it is looked whether they still are.
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Any

from torch import nn

from .._torch import global_module_hooks, is_module_tracker, number_of_hooks

_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)


class HookWatch:
    """Says whether a model has other hooks than at the last look."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def moved(self) -> bool:
        """Say whether hooks were added or removed since the last look."""
        if number_of_hooks() == self._number:
            gone = any(key not in table for table, key in self._present)
            gone = gone or (bool(self._everywhere) and self._everywhere != _everywhere())
            if gone:
                self._look()
            return gone
        before, everywhere = self._hooks, self._everywhere
        self._look()
        return self._hooks != before or self._everywhere != everywhere

    def _look(self) -> None:
        self._number, self._everywhere = number_of_hooks(), _everywhere()
        self._hooks, self._present = set[Hashable](), list[tuple[Container[Any], Any]]()
        for module in self._model.modules():
            for name in _TABLES:
                if table := module.__dict__.get(name):
                    self._present += ((table, key) for key in table)
                    self._hooks.update((id(module), name, key) for key in table)


def _everywhere() -> set[int]:
    """Return the hooks that run for every module, by identity."""
    return {id(hook) for hook in global_module_hooks() if not is_module_tracker(hook)}
