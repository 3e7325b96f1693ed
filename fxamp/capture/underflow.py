"""Warn when FP16 gradients are computed from an unscaled loss: small ones silently underflow to zero."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable

import torch

from passes.contract.plan import Plan


class UnderflowWatch:
    """Warns once, when gradients flow back through FP16 and no GradScaler has scaled a loss."""

    def __init__(self, plan: Plan) -> None:
        self.done = plan.policy.dtype is not torch.float16 or not plan.policy.level.rounds

    def __call__(self, outputs: Iterable[object]) -> None:
        """Watch the outputs of one call of a graph."""
        if self.done or torch.compiler.is_compiling():
            return
        for out in outputs:
            if isinstance(out, torch.Tensor) and out.requires_grad and not out.is_leaf:
                out.register_hook(self._check)
                return

    def _check(self, _: torch.Tensor) -> None:
        if self.done:
            return
        self.done = True
        scalers = [o for o in gc.get_objects() if issubclass(type(o), torch.amp.GradScaler)]
        if all(getattr(scaler, "_scale", None) is None for scaler in scalers):  # a disabled one has none
            warnings.warn(
                "FP16 gradients without a loss scale underflow silently: scale the loss with fxamp.LossScaler or "
                "torch.amp.GradScaler, or train with fxamp.TrainStep, which scales it.",
                stacklevel=2,
            )
