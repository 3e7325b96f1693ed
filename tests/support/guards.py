"""Captures without what Dynamo does for its own statistics."""

from __future__ import annotations

from typing import Any

import torch._dynamo.guards


def untimed_guards() -> None:
    """Keep Dynamo from timing the guards of each graph, for which it flushes the caches of the CPU."""
    guards: Any = torch._dynamo.guards
    assert hasattr(guards, "profile_guard_manager")
    guards.profile_guard_manager = lambda *_: 0.0
