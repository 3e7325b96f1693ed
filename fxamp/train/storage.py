"""Whether a compiled O2 stores in 16 bits what later kernels read, and why not where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..view.runner import Runner
from .compiler import CompileSettings


class Storage:
    """How a compiled step follows O2.

    Attributes:
        reason: Why O2 is the plan of an eager step, and not what is stored; "" where it is that, or nothing is O2.
    """

    def __init__(self) -> None:
        self.reason = ""

    def options(self, runners: Sequence[Runner], settings: CompileSettings) -> dict[str, Any]:
        """Return the options of Inductor under which a graph with these views is stored low; none where it is not."""
        if not any(_is_o2(runner) for runner in runners):
            return {}
        self.reason = self._why_not(runners, settings)
        if self.reason:
            return {}
        from .at_rest import AtRest, __file__ as file
        from .partitioner import options_with

        return options_with(AtRest(torch.bfloat16), file)

    def _why_not(self, runners: Sequence[Runner], settings: CompileSettings) -> str:
        if settings.backend != "inductor":
            return f"'{settings.name}' does not fuse kernels as Inductor does"
        if not all(map(_is_o2, runners)):
            return "other views in the graph follow another level"
        if any(runner.graphs.low != torch.bfloat16 for runner in runners):
            return "FP16 does not have the range of what is stored in FP32"
        if any(runner.graphs.replayed is not None for runner in runners):
            return "a plan is carried out"
        from .partitioner import why_not

        return why_not(dict(settings.options))


def _is_o2(runner: Runner) -> bool:
    level = runner.graphs.policy.level
    return level.stores_low and not level.rounds_sensitive
