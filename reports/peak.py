"""Count the memory that a function needs at most."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], object]) -> int:
    """Return the most that is allocated at a time while a function runs, of what it allocates itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    live: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now += size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
        most = max(most, now)
    return most
