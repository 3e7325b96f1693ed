"""Notice hooks that are registered, or removed, after a graph was captured.

Dynamo guards the hooks that were there when it captured. Guards on the tables of hooks that are empty would cost up to
2 ms a call for 900 modules, so Dynamo leaves them out, and this watches the number of all hooks ever registered. What
a hook has broken, as a backward hook breaks the graph, no guard mends when it is gone: so of the hooks that were there
it is looked whether they still are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .._torch import global_module_hooks, is_module_tracker, number_of_hooks

_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)


class HookWatch:
    """Says whether a model has other hooks than at the last look."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[Mapping[Any, Any]] = []
        self._present: list[tuple[Mapping[Any, Any], Any]] = []
        self._everywhere: set[int] = set()
        self._number = -1
        self.look()

    def moved(self) -> bool:
        """Say whether hooks were added or removed since the last look."""
        number = number_of_hooks()
        if number == self._number:
            gone = any(key not in table for table, key in self._present)
        else:  # somewhere: a hook on a tensor at each step is not to cost a walk over the model
            self._number = number
            gone = self._present != [(table, key) for table in filter(None, self._tables) for key in table]
        moved = gone or (self._everywhere != _everywhere())
        if moved:
            self.look()
        return moved

    def around_model(self) -> bool:
        """Say whether a call of the model is more than its `forward`: hooks are around that, or code of its class."""
        hooks = any(vars(self._model).get(name) for name in _TABLES) or bool(_everywhere())
        return hooks or type(self._model).__call__ is not nn.Module.__call__

    def look(self) -> None:
        """Note the hooks of the model, and its modules, as they are now."""
        self._number, self._everywhere = number_of_hooks(), _everywhere()
        tables = (module.__dict__.get(name) for module in self._model.modules() for name in _TABLES)
        self._tables = [table for table in tables if table is not None]
        self._present = [(table, key) for table in filter(None, self._tables) for key in table]


def _everywhere() -> set[int]:  # the hooks that run for every module
    return {id(hook) for hook in global_module_hooks() if not is_module_tracker(hook)}
