"""From inputs and a target to the loss: how a model and its loss function are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from passes.contract.errors import PolicyError

from .gradients import parameters

LossFunction = Callable[..., torch.Tensor]


def loss_of(model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any) -> tuple[torch.Tensor, Any]:
    """Call the model, and then the loss function on the model's output; return the loss and the output.

    Args:
        model: Called as `model(inputs)`, `model(*inputs)` for a tuple, `model(**inputs)` for a mapping.
        loss_fn: Called as `loss_fn(output, target)`, without a target as `loss_fn(output)`. None takes the output's
            own loss, `output.loss` or `output["loss"]`.
        inputs: A tensor, a PackedSequence, a tuple or a mapping.
        target: What `loss_fn` compares with, or None.

    Raises:
        PolicyError: The inputs are of another kind, or there is no loss of one element.
    """
    output = _output(model, inputs)
    loss = _loss_in(output, loss_fn, target)
    require_loss(loss)
    return loss, output


def require_loss(loss: object) -> None:
    """Raise PolicyError unless a loss is a tensor of one element."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PolicyError(f"the loss must be a tensor of one element, got {what}")


def refuse_constant(loss: torch.Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Raise PolicyError if parameters are trainable and a loss depends on none of them."""
    if not loss.requires_grad and any(p.requires_grad for o in optimizers for p in parameters(o)):
        raise PolicyError(
            "the loss does not depend on any trainable parameter: look for torch.no_grad(), .detach() or "
            ".item() in the model or in loss_fn"
        )


def _output(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    if isinstance(inputs, (torch.Tensor, PackedSequence)):
        return model(inputs)
    raise PolicyError(
        f"inputs must be a tensor, a tuple for model(*inputs) or a mapping for model(**inputs), "
        f"got {type(inputs).__name__}. Give tuple(inputs) for several inputs, (inputs,) for a single one"
    )


def _loss_in(output: Any, loss_fn: LossFunction | None, target: Any) -> Any:
    if loss_fn is not None:
        return loss_fn(output) if target is None else loss_fn(output, target)
    if target is not None:
        raise PolicyError("a target was given but loss_fn is None: give a loss_fn, or pass the target among the inputs")
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise PolicyError(
            f"loss_fn is None, and the output ({type(output).__name__}) has no loss: give labels among the inputs, "
            "or a loss_fn"
        )
    return loss
