"""Functions for graphs that serve both training modes: they choose by the flag of the module that owns a node.

Graphs that were saved name these functions, so they stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch


def by_mode(training: bool, train: Any, evaluation: Any) -> Any:
    """Return one of two literals: the first if its owner is in train mode, the second in eval mode."""
    return train if training else evaluation


def count_(counter: torch.Tensor, training: bool, values: int = 2) -> torch.Tensor:
    """Count a batch in training, in place. In eval write nothing: to autograd and torch.func even `add_(0)` is a write.

    Args:
        counter: how many batches there were.
        training: whether this one counts.
        values: how many values each channel has in it.

    Raises:
        ValueError: a channel has a single value, so its running variance would become NaN.
            `torch.nn.functional.batch_norm` raises the same error, but the exporter does not keep that check.
    """
    if training and values == 1:
        raise ValueError("Expected more than 1 value per channel when training: this batch is of size 1")
    return counter.add_(1) if training else counter
