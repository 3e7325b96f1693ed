"""What a TrainStep is asked for: one value, checked in one place. Arguments that do not fit are refused by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from passes.contract.errors import CaptureError, PolicyError
from passes.contract.policy import Policy

from ..capture.graphs import is_compiled, plan_of
from ..capture.parameters import require_fp32
from ..errors import NotAModuleError
from ..view.view import is_view, runner_of
from .compiled_step import CompiledStep, Output, require_output
from .compiled_update import Compiled
from .compiler import CompileSettings, settings_of
from .scaler import LossScaler, require_count, require_number, require_scale
from .update import needs_closure
from .weights import Mode
from .window import LossFunction, parameters

if TYPE_CHECKING:
    from .step import TrainStep

MEANT = {  # by arguments of other trainers
    **dict.fromkeys(("grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm", "clip"), "max_grad_norm="),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation"), "accumulate_steps="
    ),
    **dict.fromkeys(("grad_scaler", "loss_scale", "loss_scaler"), "scaler="),
    **dict.fromkeys(("criterion", "loss"), "loss_fn="), "lr_scheduler": "scheduler=",
    **dict.fromkeys(("policy", "dtype", "precision"), "fxamp.convert(model, policy=...), and give its view"),
    "on_collapse": "`except fxamp.ScaleCollapseError as error: step.switch(error.overflow.policy)` round its calls",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The arguments of a TrainStep beside its model, as `TrainStep` describes them; several of a kind are a tuple."""

    loss_fn: LossFunction | None
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    averages: tuple[AveragedModel, ...]
    scaler: LossScaler | float | Literal["auto"] | None
    accumulate_steps: int
    max_grad_norm: float | None
    weights: Mode
    max_skips: int
    check_finite: bool
    on_gradients: Callable[[list[Tensor]], Any] | None
    census: Literal["warn", "error"] | None
    compile: CompileSettings | None
    output: Output | None
    update: Compiled | None
    reduce: Literal["micro_batch", "window"]

    @classmethod
    def of(cls, model: object, *, optimizer: Any, scheduler: Any, ema: Any, compile: Any, **asked: Any) -> Options:
        """Return the options that the arguments of a TrainStep stand for; refuse what is invalid or does not fit."""
        if not isinstance(model, nn.Module):
            raise NotAModuleError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        loss_fn, on_gradients = asked["loss_fn"], asked["on_gradients"]
        if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, Optimizer)):
            raise PolicyError(f"loss_fn must be callable, or None for the output's .loss, got {type(loss_fn).__name__}")
        if on_gradients is not None and not callable(on_gradients):
            raise PolicyError(f"on_gradients must be callable, got {type(on_gradients).__name__}")
        _require_one_of("reduce", asked["reduce"], ("micro_batch", "window"))
        _require_one_of("check_finite", asked["check_finite"], (True, False))
        for name in ("accumulate_steps", "max_skips"):
            require_count(name, asked[name])
        clips = asked["max_grad_norm"] is not None
        if clips:
            require_number("max_grad_norm", asked["max_grad_norm"], "a number greater than 0, or None", lambda x: x > 0)
        optimizers, settings = _optimizers_of(optimizer, model), settings_of(compile)
        made = cls(
            optimizers=optimizers, schedulers=_schedulers_of(scheduler, optimizers), averages=_averages_of(ema, model),
            compile=settings, **asked,
        )  # fmt: skip
        require_output(made.output, settings is not None)
        _require_one_of("update", made.update, (None, "compiled"))
        if made.update is not None and settings is None:
            raise PolicyError("update='compiled' is for compiled steps: set compile=True, or leave update out")
        _refuse_company(
            optimizers,
            ["max_grad_norm"] * clips
            + ["on_gradients"] * (on_gradients is not None)
            + [f"compile={compile!r}"] * (settings is not None),
        )
        return made

    @functools.cached_property
    def closes(self) -> bool:
        """Whether the optimizer evaluates the loss itself."""
        return needs_closure(self.optimizers[0])

    def saved(self) -> dict[str, Any]:
        """Return them as plain values, for a state; of what is none, as a loss or a scaler, its class."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["compile"] = None if self.compile is None else self.compile.name
        return {name: _plain(value) for name, value in values.items()}


def choose_scaler(step: TrainStep, low_dtype: torch.dtype | None) -> None:
    """Have a step scale losses by what was asked for, for a model of some low dtype."""
    step.scaler = scaler_of(step.options.scaler, low_dtype)
    step.scaler.name_parameters(step.model.named_parameters())


def compile_anew(step: TrainStep) -> None:
    """Have a step compile model and loss, whose views may follow another policy than before."""
    settings, kept, update = step.options.compile, step.options.output, step.options.update
    step.compiled = None if settings is None else CompiledStep(settings, step.model, step.weights, kept, update)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [type(one).__name__ for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _require_one_of(name: str, value: object, values: Sequence[object]) -> None:
    if not any(type(value) is type(one) and value == one for one in values):
        listed = " or ".join(str(one) if isinstance(one, bool) else f'"{one}"' for one in values)
        raise PolicyError(f"{name} must be {listed}, got {value!r}")


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
            if runner.graphs.device or runner.graphs.policy.dtype is not None:
                found.append(runner.graphs.policy)
        elif module is model or is_compiled(module):
            with contextlib.suppress(CaptureError):
                found.append(plan_of(module).policy)
    return found


def scaler_of(scaler: object, low_dtype: torch.dtype | None) -> LossScaler:
    """Return the LossScaler that the argument means; a disabled one means no loss scaling."""
    if isinstance(scaler, LossScaler):
        return scaler
    if scaler is None or (scaler == "auto" and low_dtype != torch.float16):
        return LossScaler(enabled=False)
    if scaler == "auto":
        return LossScaler(min_scale=1.0, max_scale=2.0**24)
    if isinstance(scaler, torch.amp.GradScaler):
        raise PolicyError(
            "scaler must be a fxamp.LossScaler, got a torch.amp.GradScaler. A LossScaler has the same methods, and "
            "loads the state of a GradScaler"
        )
    if isinstance(scaler, str):
        raise PolicyError(f'scaler must be a LossScaler, a number, None or "auto", got {scaler!r}')
    require_scale("scaler", scaler)
    return LossScaler(init_scale=float(scaler), dynamic=False)  # type: ignore[arg-type]


def _optimizers_of(optimizer: object, model: nn.Module) -> tuple[Optimizer, ...]:
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
    require_fp32(model.named_parameters())
    require_fp32((names[id(param)], param) for one in optimizers for param in parameters(one))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if trained and not trained & owner.keys():
        raise PolicyError(
            f"the optimizer holds none of the trainable parameters of {type(model).__name__}, and would train nothing. "
            "Build it from model.parameters(), after calls that replace them: fully_shard, "
            "load_state_dict(assign=True)."
        )
    return optimizers


def _schedulers_of(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
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


def _averages_of(ema: object, model: nn.Module) -> tuple[AveragedModel, ...]:
    averages = () if ema is None else _several("ema", ema, AveragedModel)
    for one in averages:
        differ = _signature(one.module) ^ _signature(model)
        if differ:
            raise PolicyError(
                f"ema averages another model: '{min(differ)[0]}' is not the same in both. Make it from this model: "
                "AveragedModel(model)."
            )
    return averages


def _signature(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    named = model.named_parameters()
    return {(name.replace("_orig_mod.", "").replace("module.", ""), tuple(p.shape)) for name, p in named}


def _several(name: str, value: object, kind: type[Any]) -> tuple[Any, ...]:
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in several:
        if not isinstance(one, kind):
            raise PolicyError(f"{name} must be a torch {kind.__name__} or a list of them, got {type(one).__name__}")
    return several


def _refuse_company(optimizers: Sequence[Optimizer], settings: Sequence[str]) -> None:
    closes = next((o for o in optimizers if needs_closure(o)), None)
    refused = ["another optimizer"] * (len(optimizers) > 1) + [*settings]
    if closes is not None and refused:
        raise PolicyError(
            f"{type(closes).__name__} evaluates the loss several times in a step, which does not work together with "
            f"{' and '.join(refused)}: leave that out, or write a loop of your own on fxamp.LossScaler"
        )
