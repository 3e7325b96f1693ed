"""Settings under which a training step on several ranks would be wrong: each is refused by name, with a way out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from passes._torch import communication_hook, communication_states, gathering
from passes.contract.errors import PolicyError

from ...view.view import is_view
from .ranks import Ranks


def refuse_unfit_model(model: nn.Module, weights: str) -> None:
    """Raise PolicyError for a model that cannot be trained in the way in which it is sharded."""
    for path, module in model.named_modules():
        if not is_sharded(module):
            continue
        where = f"'{path}'" if path else "the model"
        dtype, casts_inputs = gathering(module)
        if weights == "per_step":
            does = (
                f"FSDP2 casts each shard once before it gathers, by param_dtype={dtype}"
                if dtype
                else "To cast each shard once before it is gathered, set MixedPrecisionPolicy(param_dtype=...)"
            )
            raise PolicyError(
                f"weights='per_step' does not work under FSDP2, which shards {where}: it gathers weights again for "
                f"every call, so no cast can be kept longer than a call. {does}. Leave weights at 'auto'."
            )
        if dtype in (None, torch.float32) or not casts_inputs:
            continue
        if any(map(is_view, module.modules())):
            raise PolicyError(
                f"FSDP2 casts the inputs of {where} to {dtype}, but the graph does its own casts: set "
                "cast_forward_inputs=False in its MixedPrecisionPolicy"
            )


def refuse_unfit_ranks(ranks: Ranks, *, accumulate_steps: int, on_overflow: str, scaled: bool) -> None:
    """Raise PolicyError for settings of DistributedDataParallel that go wrong in a training step.

    Args:
        ranks: Ranks that share the step.
        accumulate_steps: Micro-batches in a window.
        on_overflow: As a TrainStep takes it.
        scaled: Whether the loss is scaled.
    """
    skips = on_overflow == "skip_microbatch"
    for replica in ranks.replicas:
        if replica.static_graph and (accumulate_steps > 1 or skips):
            raise PolicyError(
                "DistributedDataParallel(static_graph=True) does not survive a backward without an exchange of "
                "gradients (pytorch#143580), and every window of several micro-batches has one. Leave static_graph "
                "out, or let every micro-batch be a window: accumulate_steps=1, on_overflow='skip_window'."
            )
        if replica.mixed_precision is not None:
            raise PolicyError(
                "DistributedDataParallel(mixed_precision=...) casts parameters and gradients itself: leave it out, "
                "since the graph of a converted model does its own casts."
            )
        _refuse_hook(replica, skips, scaled)
    if ranks.replicas and ranks.apart and not ranks.spread:
        ignored = {name for replica in ranks.replicas for name in replica.parameters_to_ignore}
        forgotten = [name for name in ranks.apart if not any(name.endswith(one) for one in ignored)]
        if forgotten:
            raise PolicyError(
                f"'{forgotten[0]}' is trained, and no DistributedDataParallel exchanges its gradient, so it would "
                "become different on every rank. Wrap the module that holds it, model and loss together if need be, or "
                "name it in parameters_to_ignore if that is intended."
            )


def _refuse_hook(replica: DistributedDataParallel, skips: bool, scaled: bool) -> None:
    hook = communication_hook(replica)
    if hook and skips:
        raise PolicyError(
            "on_overflow='skip_microbatch' exchanges gradients after the window, without calling the communication "
            f"hook '{hook}': leave out the hook or the option"
        )
    if scaled and any(type(state).__name__ == "PowerSGDState" for state in communication_states(replica)):
        raise PolicyError(
            f"the communication hook '{hook}' carries its compression error into the next step, at the old loss scale; "
            "after one overflow that error stays NaN. Train in BF16 without loss scaling, or use fp16_compress_hook or "
            "bf16_compress_hook"
        )


def is_sharded(module: nn.Module) -> bool:
    """Say whether FSDP2 gathers the parameters of a module for its calls."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
