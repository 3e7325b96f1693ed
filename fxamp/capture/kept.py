"""What a compiled graph keeps for backward, seen at the first call with gradients: a partitioner recomputes the rest.

Before: the emitted graph saves 8.1 MB when it runs as it is      After: Inductor's of it has saved 5.2 MB
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import kept_by_compiled, storage_id


class Kept:
    """Measures once what one graph keeps for backward.

    Attributes:
        by: the name of the compiler.
        bytes: size of the storages that it kept, parameters excluded; None if no call with gradients was seen.
    """

    def __init__(self, by: object) -> None:
        self.by = by if isinstance(by, str) else str(getattr(by, "__name__", type(by).__name__))
        self.bytes: int | None = None
        self._done = False

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look at one call."""
        if self._done or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._done = True
        saved = kept_by_compiled(outputs)
        if saved is not None:
            parameters = {storage_id(value) for value in inputs if isinstance(value, nn.Parameter)}
            sizes = {storage_id(t): t.untyped_storage().nbytes() for t in saved}
            self.bytes = sum(size for storage, size in sizes.items() if storage not in parameters)
