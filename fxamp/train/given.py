"""What a TrainStep is given, and what it says of it: arguments that fit the model and each other, and likely mistakes.

Others are refused by name. The checks of settings are made when a step is made, before its first micro-batch across
ranks, and before each one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from passes.contract.devices import DEVICES
from passes.contract.errors import CaptureError, PolicyError
from passes.contract.policy import Policy

from ..capture import compiled
from ..view.view import is_view, runner_of
from .ranks.refused import refuse_differences, refuse_unfit_ranks
from .scaler import LossScaler, refuse_low_parameters, require_scale
from .state import TrainState
from .update import needs_closure
from .window import parameters

logger = logging.getLogger("fxamp")

_WRAPPERS = ("_orig_mod.", "module.")  # what wrappers put before the names of a model's parameters
_LENGTHS = ("step_size", "T_max", "T_0")  # after which a scheduler changes the rate, or begins again
_EPOCHS = (10, 300)  # as many steps as runs have epochs


def low_dtype_of(model: nn.Module) -> torch.dtype | None:
    """Find the low dtype that `model`, or a part of it, was converted to; FP16 if both occur."""
    policies = policies_of(model)
    found = {policy.dtype for policy in policies if policy.level.rounds}
    return torch.float16 if torch.float16 in found else next((d for d in found if isinstance(d, torch.dtype)), None)


def policies_of(model: nn.Module) -> list[Policy]:
    """Return the policies by which parts of a model are converted; parts that are not converted (yet) have none."""
    found: list[Policy] = []
    for module in model.modules():
        if is_view(module):
            runner = runner_of(module)
            if runner.device or runner.policy.dtype is not None:
                found.append(runner.policy)
        elif module is model or compiled.is_compiled(module):
            with contextlib.suppress(CaptureError):
                found.append(compiled.plan_of(module).policy)
    return found


def policies_asked(model: nn.Module) -> list[str]:
    """Return the policies that were asked for, each once, for the parts of a model that are converted."""
    asked = (runner_of(m).asked if is_view(m) else compiled.asked_of(m) for m in model.modules())
    return list(dict.fromkeys(str(policy) for policy in asked if policy is not None))


def scaler_of(scaler: object, low_dtype: torch.dtype | None) -> LossScaler:
    """Return the LossScaler that the argument means; a disabled one means no loss scaling.

    Raises:
        PolicyError: A TrainStep does not take it as `scaler`.
    """
    if isinstance(scaler, LossScaler):
        return scaler
    if scaler is None:
        return LossScaler(enabled=False)
    if isinstance(scaler, str) and scaler == "auto":
        if low_dtype == torch.float16:
            return LossScaler(min_scale=1.0, max_scale=2.0**24, max_skips=20)
        return LossScaler(enabled=False)
    if isinstance(scaler, torch.amp.GradScaler):
        raise PolicyError(
            "scaler must be a fxamp.LossScaler, got a torch.amp.GradScaler. A LossScaler has the same methods, and "
            "loads the state of a GradScaler"
        )
    if isinstance(scaler, str):
        raise PolicyError(f'scaler must be a LossScaler, a number, None or "auto", got {scaler!r}')
    require_scale("scaler", scaler)
    return LossScaler(init_scale=float(scaler), dynamic=False)  # type: ignore[arg-type]


def optimizers_of(optimizer: object, model: nn.Module) -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple.

    Raises:
        PolicyError: They share a parameter, hold a trainable low parameter, or hold none of the model's parameters.
    """
    optimizers = _several("optimizer", optimizer, Optimizer)
    if not optimizers:
        raise PolicyError("optimizer must be an optimizer or a list of them, got an empty list")
    names = {id(p): name for name, p in model.named_parameters()}
    owner: dict[int, int] = {}
    for index, one in enumerate(optimizers):
        for place, param in enumerate(parameters(one)):
            name = names.setdefault(id(param), f"parameter {place} of optimizer {index} (shape {tuple(param.shape)})")
            if owner.setdefault(id(param), index) != index:
                raise PolicyError(f"{name} is in two optimizers: its gradient would be unscaled twice")
    refuse_low_parameters(model.named_parameters())
    refuse_low_parameters((names[id(param)], param) for one in optimizers for param in parameters(one))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if trained and not trained & owner.keys():
        raise PolicyError(
            f"the optimizer holds none of the trainable parameters of {type(model).__name__}, and would train nothing. "
            "Build it from model.parameters(), after calls that replace them: fully_shard, "
            "load_state_dict(assign=True)."
        )
    return optimizers


def schedulers_of(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """Return one scheduler or several as a tuple.

    Raises:
        PolicyError: One belongs to no given optimizer, or needs what a TrainStep does not have.
    """
    schedulers = () if scheduler is None else _several("scheduler", scheduler, LRScheduler)
    for one in schedulers:
        if isinstance(one, ReduceLROnPlateau):
            raise PolicyError(
                "ReduceLROnPlateau needs a metric, which TrainStep does not have: "
                "leave it out and call scheduler.step(metric) yourself, after validation"
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise PolicyError(f"scheduler {type(one).__name__} belongs to none of the optimizers given")
    return schedulers


def averages_of(ema: object, model: nn.Module) -> tuple[AveragedModel, ...]:
    """Return one average or several as a tuple.

    Raises:
        PolicyError: Something else was given, or the average of another model.
    """
    averages = () if ema is None else tuple(ema) if isinstance(ema, (list, tuple)) else (ema,)
    for one in averages:
        if not isinstance(one, AveragedModel):
            raise PolicyError(
                f"ema must be a torch.optim.swa_utils.AveragedModel or a list of them, got {type(one).__name__}"
            )
        differ = _signature(one.module) ^ _signature(model)
        if differ:
            raise PolicyError(
                f"ema averages another model: '{min(differ)[0]}' is not the same in both. Make it from this model: "
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


def _several(name: str, value: object, kind: type[Any]) -> tuple[Any, ...]:
    """Make a tuple from one object or a list, and check the type of each."""
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in several:
        if not isinstance(one, kind):
            raise PolicyError(f"{name} must be a torch {kind.__name__} or a list of them, got {type(one).__name__}")
    return several


def refuse_company(
    optimizers: Sequence[Optimizer], max_grad_norm: float | None, on_overflow: str, on_gradients: object = None
) -> None:
    """Raise PolicyError where an optimizer that needs a closure has a setting that has no meaning for it."""
    found = next((o for o in optimizers if needs_closure(o)), None)
    with_it = {
        "another optimizer": len(optimizers) > 1,
        "max_grad_norm": max_grad_norm is not None,
        'on_overflow="skip_microbatch"': on_overflow == "skip_microbatch",
        "on_gradients": on_gradients is not None,
    }
    refused = [what for what, given in with_it.items() if given]
    if found is not None and refused:
        raise PolicyError(
            f"{type(found).__name__} evaluates the loss several times in a step, which does not work together with "
            f"{' and '.join(refused)}: leave that out, or write a loop of your own on fxamp.LossScaler"
        )


# ------------------------------------------------------------------------------------- settings of a step


def settings_of(step: TrainState) -> dict[str, Any]:
    """Return the settings that two runs must share, so that one can continue the other."""
    return {
        "accumulate_steps": step.accumulate_steps,
        "on_overflow": step.on_overflow,
        "loss scaling": "undecided" if step.undecided else step.scaler.kind,
        "optimizers": [type(o).__name__ for o in step.optimizers],
        "parameters": [[len(group["params"]) for group in o.param_groups] for o in step.optimizers],
        "schedulers": [type(s).__name__ for s in step.schedulers],
        "ema": len(step.averages),
        "policy": policies_asked(step.model) if not step.switches else None,
        "max_grad_norm": step.max_grad_norm,
    }


def begin(step: TrainState) -> None:
    """Refuse, on all ranks, settings that they cannot share or that differ. Only the first call checks."""
    if "ranks" in step.said:
        return
    ranks = step.ranks
    scaled = step.scaler.is_enabled() or step.undecided
    refuse_unfit_ranks(ranks, accumulate_steps=step.accumulate_steps, on_overflow=step.on_overflow, scaled=scaled)
    if ranks.groups or (ranks.shared and dist.get_world_size() > 1):
        told = {
            "the policy": policies_asked(step.model),
            "the number of ranks": [dist.get_world_size(group) for group in ranks.groups],
            "the loss scaler": "undecided"
            if step.undecided
            else {"kind": step.scaler.kind, **step.scaler.state_dict()},
            **settings_of(step),
            "on_collapse": step.on_collapse,
            "the number of finished windows": step.windows,
        }
        refuse_differences(told, ranks.groups, step.model)
    step.said.add("ranks")


def before_micro_batch(step: TrainState) -> None:
    """Make the checks of each micro-batch, and of the first one `begin`'s; name a model in eval mode each time anew."""
    begin(step)
    step.by_hand.check(step.optimizers, step.schedulers, step.position, step.accumulate_steps)
    if step.model.training:
        step.said.discard("eval")
    else:
        step.say(
            "eval",
            f"TrainStep trains {type(step.model).__name__} in eval mode: dropout is off and statistics of batch norms "
            "stay. Call train() before.",
        )


def warn_of_fp32(step: TrainState) -> None:
    """Say that a model is not converted, once, after its first forward: it trains in FP32, perhaps by mistake."""
    if "fp32" in step.said:
        return
    under_autocast = any(map(torch.is_autocast_enabled, DEVICES))
    if not under_autocast and not any(map(is_view, step.model.modules())) and not policies_of(step.model):
        step.say(
            "fp32",
            f"TrainStep trains {type(step.model).__name__} in FP32, since it is not converted: give it what "
            "fxamp.convert(model, ...) or fxamp.compile(model) returned. Keep the optimizer: the parameters are the "
            "same.",
        )
    step.said.add("fp32")


def warn_of_settings(step: TrainState) -> None:
    """Name settings that look like mistakes: a scheduler made for epochs, and a model that is hardly trained."""
    held = {id(p) for o in step.optimizers for p in parameters(o)}
    trainable = [p for p in step.model.parameters() if p.requires_grad]
    left_out = sum(p.numel() for p in trainable if id(p) not in held) / max(sum(p.numel() for p in trainable), 1)
    if left_out >= 0.5:
        logger.warning(
            "fxamp: no optimizer of this TrainStep trains %.0f %% of the trainable weights of %s: give it the other "
            "optimizers too, or call requires_grad_(False) on what stays.", 100 * left_out, type(step.model).__name__,
        )  # fmt: skip
    for scheduler in step.schedulers:
        length = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
        if isinstance(length, int) and _EPOCHS[0] <= length <= _EPOCHS[1]:
            logger.warning(
                "fxamp: %s steps after each window, and %d windows are few: if it counts epochs, leave it out of the "
                "TrainStep, and call scheduler.step() yourself after each epoch.", type(scheduler).__name__, length,
            )  # fmt: skip
