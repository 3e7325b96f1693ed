"""Where names that saved modules refer to are now: pickle looks for a name in the file where it was when it was saved.

Functions that emitted graphs call are in `passes.runtime`, and never move again. If a class or function that a saved
module, policy, plan, scaler or backend may refer to moves to another file, it gets a line here; so does the entry point
of an older installation. `tests/fxamp/module/test_moved.py` loads by the old paths.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old module -> (new module, names).
MOVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "fxamp.call": ("fxamp.capture.model.call", ("CallSpec", "Leaf")),
    "fxamp.capture.captured": ("fxamp.capture.model.captured", ("State",)),
    "fxamp.capture.reads": ("fxamp.capture.model.reads", ("Reads",)),
    "fxamp.dynamo": ("fxamp.dynamo.backend", ("Backend", "entry_point")),
    "fxamp.functions": ("fxamp.capture.functions", ("call", "call_under_autocast")),
    "fxamp.modes": ("passes.runtime.modes", ("by_mode", "count_")),
    "fxamp.module": ("fxamp.module.module", ("_load",)),
    "fxamp.serialize": ("fxamp.module.serialize", ("Op", "Ref")),
    "fxamp.train.events": ("fxamp.train.scale.events", ("ScaleEvent", "Event", "Culprits", "SkipsInARow")),
    "fxamp.train.scaler": ("fxamp.train.scale.scaler", ("LossScaler",)),
    "passes.insert_casts": ("passes.runtime.casts", ("cast_floating", "cast_weight")),
    "passes.plan": ("passes.contract.plan", ("Decision", "Plan")),
    "passes.policy": ("passes.contract.policy", ("Policy",)),
    "passes.rnn": ("passes.runtime.rnn", ("lstm", "rnn")),
}


def found(old: str, name: str) -> Any:
    """Return the object that an old file had under a name; raise AttributeError if that name is not listed."""
    new, names = MOVED[old]
    if name not in names:
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    return getattr(importlib.import_module(new), name)


class _OldFiles:
    """A finder and loader of modules: for an old path it makes a module that looks names up in their new places.

    It does not derive from `importlib.abc`, whose import takes longer than all else in `import fxamp`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new, _ = MOVED.get(fullname, ("", ()))
        is_package = new.startswith(f"{fullname}.")
        package = os.path.join(_ROOT, *fullname.split(".")[:-1])  # ours, not another package of that name
        if not new or is_package or package not in (path or ()):
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # an object with both methods will do

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = partial(found, module.__name__)  # type: ignore[method-assign]


_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # where fxamp and passes lie


def install() -> None:
    """Let old paths be imported. Packages with the name of an old file (`fxamp.module`) look names up themselves."""
    if not any(isinstance(finder, _OldFiles) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldFiles())  # first: files of an older version may be left behind
