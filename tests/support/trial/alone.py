"""What `torch.compile` alone makes of a model, its graphs run as they are: it does not always keep what eager does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from .runs import Run, changed

if TYPE_CHECKING:
    from .judge import Subject


@dataclass(frozen=True)
class Alone:
    """What a compiled model gives, plain and under autocast.

    Attributes:
        plain: None where it raises.
        autocast: None where it raises, or was not asked for.
        raised: the first error.
    """

    plain: Run | None
    autocast: Run | None
    raised: str

    def differs(self, found: Subject, level: str) -> str:
        """Say how it differs from eager; "" where it does not."""
        pairs = (
            [(self.plain, found.plain)]
            if level == "O0"
            else [(self.autocast, found.autocast), (self.plain, found.plain)]
        )
        return next((why for a, b in pairs if a is not None and b is not None and (why := changed(a, b))), "")

    def beside(self, found: Subject) -> Subject:
        """Return the subject with what this gives for what eager gives."""
        made = copy.copy(found)
        made.plain = self.plain or found.plain
        made.autocast = self.autocast or found.autocast
        made.allowed = found.allowed.beside(made.plain, made.autocast)
        return made


def torch_alone(found: Subject, level: str) -> Iterator[Alone]:
    """Yield what `torch.compile` alone gives, at O0 without autocast; a graph with checkpoints by "aot_eager" too."""
    for backend in ("eager", "aot_eager"):
        seen: list[str] = []

        def inner(gm: Any, inputs: Any, backend: str = backend, seen: list[str] = seen) -> Any:
            seen += [str(n.target) for part in gm.modules() if hasattr(part, "graph") for n in part.graph.nodes]
            return lookup_backend(backend)(gm, inputs)

        runs: list[Run | None] = []
        raised = ""
        for context in [None] if level == "O0" else [None, found.ambient()]:
            torch._dynamo.reset()
            try:
                runs.append(found.run(torch.compile(found.model, backend=inner), context))
            except Exception as e:
                raised = raised or f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
                runs.append(None)
        yield Alone(runs[0], runs[1] if len(runs) > 1 else None, raised)
        if not any("checkpoint" in name for name in seen):
            return
