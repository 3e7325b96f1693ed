"""Averages of the weights, `torch.optim.swa_utils.AveragedModel`, which follow the steps that were taken."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel

from passes.contract.errors import PolicyError

# What wrappers put before the names of a model's parameters.
_WRAPPERS = ("_orig_mod.", "module.")


def averages_of(ema: object, model: nn.Module) -> tuple[AveragedModel, ...]:
    """Return one average or several as a tuple.

    Raises:
        PolicyError: Something else was given, or the average of another model.
    """
    averages = () if ema is None else tuple(ema) if isinstance(ema, (list, tuple)) else (ema,)
    ours = _signature(model)
    for one in averages:
        if not isinstance(one, AveragedModel):
            raise PolicyError(
                f"ema must be a torch.optim.swa_utils.AveragedModel or a list of them, got {type(one).__name__}"
            )
        theirs = _signature(one.module)
        if theirs != ours:
            first = next((name for name, _ in [*(theirs ^ ours)]), "")
            raise PolicyError(
                f"ema averages another model: '{first}' is not the same in both. Make it from this model: "
                "AveragedModel(model)."
            )
    return averages


def _signature(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    named = set()
    for name, p in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        named.add((name, tuple(p.shape)))
    return named
