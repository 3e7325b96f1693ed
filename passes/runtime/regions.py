"""Modes of torch in a converted graph: a call under `torch.autocast`, a checkpoint, the grad mode.

Graphs that were saved name these functions, so they stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from .._torch import contexts_of_checkpoint


def under_autocast(op: Callable[..., Any], device: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call an op under `torch.autocast`, which casts what the op calls inside.

    The region is one call, and not two nodes that enter and leave it, since an op may raise: a recomputed checkpoint
    stops by an exception, and autocast would stay on.
    """
    with torch.autocast(device, dtype):
        return op(*args, **kwargs)


def recompute(body: GraphModule, *args: Any, held: tuple[int, ...] = (), **kwargs: Any) -> Any:
    """Call the body of a checkpoint as the author's code calls it: once more in backward, on the same random numbers.

    Torch's own op leaves the random numbers to a compiler. Operands at the places `held` are read from the model, as
    parameters and statistics of a batch norm are: they may be written, and the checkpoint does not save them.
    """
    if (contexts := contexts_of_checkpoint(body)) is not None:
        kwargs["context_fn"] = contexts

    def run(*saved: Any) -> Any:
        return body.forward(*(read.get(at, value) for at, value in enumerate(saved)))

    read = {at: args[at] for at in held}
    saved = (None if at in read else value for at, value in enumerate(args))
    return checkpoint(run, *saved, **{**kwargs, "use_reentrant": False})


def grad_mode() -> bool:
    """Return whether gradients are recorded, as `torch.is_grad_enabled`, which no trace records."""
    return torch.is_grad_enabled()
