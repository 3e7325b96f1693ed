"""The settings and the course of a training step: what its checkpoint, its description and its runs read.

It owns the window that is open, the clearing of gradients, the settings that ranks compare, and what has been said.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan

from .._torch import registrations
from ..capture.graphs import is_compiled
from ..census.census import CallCensus
from ..errors import NotAModuleError, names_arguments
from ..view.switch import policies_in_force
from ..view.view import is_view
from . import given
from .compiled_step import CompiledStep, require_output
from .compiler import model_to_compile, settings_of
from .ranks.ranks import Ranks
from .ranks.refused import refuse_differences, refuse_unfit_model, refuse_unfit_ranks
from .scaler import LossScaler, Tally, forget_step, require_count, require_number, require_scale
from .update import needs_closure
from .weights import Mode, WeightCasts
from .window import ByHand, LossFunction, Window, live, parameters

logger = logging.getLogger("fxamp")

_MEANT = {  # by arguments of other trainers
    **dict.fromkeys(("grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm", "clip"), "max_grad_norm="),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation"), "accumulate_steps="
    ),
    **dict.fromkeys(("grad_scaler", "loss_scale", "loss_scaler"), "scaler="),
    **dict.fromkeys(("criterion", "loss"), "loss_fn="), "lr_scheduler": "scheduler=",
    **dict.fromkeys(("policy", "dtype", "precision"), "fxamp.convert(model, policy=...), and give its view"),
}  # fmt: skip
_LENGTHS = ("step_size", "T_max", "T_0")  # after which a scheduler changes the rate, or begins again
_EPOCHS = (10, 300)  # as many steps as runs have epochs


class TrainState:
    """What a TrainStep is made of. Its arguments, and what it counts, are described there.

    Attributes:
        low_dtype: The low dtype of the model, None if there is none or it is not known yet.
        undecided: Whether the scaler is chosen only when the model is captured.
        pending_scaler: A state of the scaler that was loaded before that.
        torn: The last window was left while its optimizers stepped.
    """

    @names_arguments("TrainStep", _MEANT)
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: LossScaler | float | Literal["auto"] | None = "auto",
        accumulate_steps: int = 1,
        max_grad_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        ema: AveragedModel | Sequence[AveragedModel] | None = None,
        weights: Mode = "auto",
        max_skips: int = 20,
        check_finite: bool = True,
        on_gradients: Callable[[list[Tensor]], Any] | None = None,
        census: Literal["warn", "error"] | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        output: Literal["low", "full"] | None = None,
        reduce: Literal["micro_batch", "window"] = "micro_batch",
    ) -> None:
        given.require_one_of("reduce", reduce, ("micro_batch", "window"))
        given.require_one_of("check_finite", check_finite, (True, False))
        if not isinstance(model, nn.Module):
            raise NotAModuleError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, Optimizer)):
            raise PolicyError(f"loss_fn must be callable, or None for the output's .loss, got {type(loss_fn).__name__}")
        if on_gradients is not None and not callable(on_gradients):
            raise PolicyError(f"on_gradients must be callable, got {type(on_gradients).__name__}")
        require_count("accumulate_steps", accumulate_steps)
        require_count("max_skips", max_skips)
        if max_grad_norm is not None:
            require_number("max_grad_norm", max_grad_norm, "a number greater than 0, or None", lambda x: x > 0)

        self.loss_fn, self.accumulate_steps, self.max_grad_norm = loss_fn, accumulate_steps, max_grad_norm
        self.max_skips, self.on_gradients = max_skips, on_gradients
        self.check_finite = check_finite
        self.optimizers = given.optimizers_of(optimizer, model)
        self.schedulers = given.schedulers_of(scheduler, self.optimizers)
        self.averages = given.averages_of(ema, model)
        settings = settings_of(compile)
        require_output(output, settings is not None)
        given.refuse_company(
            self.optimizers,
            {
                "max_grad_norm": max_grad_norm is not None,
                "on_gradients": on_gradients is not None,
                f"compile={compile!r}": settings is not None,
            },
        )
        if settings is not None:
            model = model_to_compile(model, settings)
        self.model = model
        refuse_unfit_model(model, weights)
        self.ranks = Ranks(model, self.optimizers, reduce)
        if weights == "auto" and settings is not None and self.ranks.replicated > 1:
            weights = "per_use"
        self.weights = WeightCasts(model, weights, accumulate_steps)
        self.compiled = None if settings is None else CompiledStep(settings, model, self.weights, output)
        self.low_dtype = given.low_dtype_of(model)
        self.choose_scaler(scaler)
        self.policies = policies_in_force(model)  # as it was made; `switch` sets others
        # A compiled model is converted at its first call; its low dtype is not known before.
        compiles = any(is_compiled(module) for module in model.modules())
        self.undecided = isinstance(scaler, str) and self.low_dtype is None and compiles
        self.pending_scaler: Mapping[str, Any] | None = None
        self.windows, self.torn = 0, False
        self.opened: Window | None = None
        self.switches: tuple[tuple[int, str], ...] = ()
        self.switched_plan: Plan | None = None
        self.tallies = {"steps": Tally(), "skipped": Tally()}
        self.skips_in_a_row = Tally(in_a_row=True)
        self.by_hand = ByHand()
        self.said: set[str] = set()
        self.closes = any(map(needs_closure, self.optimizers))
        self.census = None if census is None else CallCensus(census)
        self._look_for_untrained()
        self._warn_of_settings()

    def choose_scaler(self, scaler: object) -> None:
        """Scale losses by what an argument means for the low dtype of the model."""
        self.scaler = given.scaler_of(scaler, self.low_dtype)
        self.scaler.name_parameters(self.model.named_parameters())

    def compile_anew(self) -> None:
        """Compile model and loss again, whose views follow another policy."""
        if self.compiled is not None:
            self.compiled = CompiledStep(self.compiled.settings, self.model, self.weights, self.compiled.output)

    @property
    def position(self) -> int:
        """The number of micro-batches in the open window."""
        return 0 if self.opened is None else self.opened.position

    @property
    def steps(self) -> int:
        """How many windows ended with a step of an optimizer. Reading it may wait for the device."""
        return self.tallies["steps"].read()

    @property
    def skipped(self) -> int:
        """How many windows ended with a skipped step of an optimizer. Reading it may wait for the device."""
        return self.tallies["skipped"].read()

    @property
    def in_place(self) -> bool:
        """Whether gradients keep their memory, since a CUDA graph has recorded their addresses."""
        return self.compiled is not None and self.compiled.settings.captures

    def written(self) -> tuple[Any, ...]:
        """Return the objects that a call writes, for whoever runs one and puts everything back afterwards."""
        own = (self, self.scaler, self.by_hand, self.skips_in_a_row, *self.tallies.values(), self.census)
        return (*own, self.model, self.loss_fn, *self.optimizers, *self.schedulers, *self.averages)

    def rates(self) -> tuple[float | Tensor, ...]:
        """Return the learning rate of each group of parameters, as it is now."""
        rates = (group["lr"] for o in self.optimizers for group in o.param_groups if "lr" in group)
        return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)

    def say(self, about: str, text: str) -> None:
        """Log a warning once."""
        if about not in self.said:
            self.said.add(about)
            logger.warning("fxamp: %s", text)

    def settings(self) -> dict[str, Any]:
        """Return the settings that two runs must share, so that one can continue the other."""
        return {
            "accumulate_steps": self.accumulate_steps,
            "loss scaling": "undecided" if self.undecided else self.scaler.kind,
            "optimizers": [type(o).__name__ for o in self.optimizers],
            "parameters": [[len(group["params"]) for group in o.param_groups] for o in self.optimizers],
            "schedulers": [type(s).__name__ for s in self.schedulers],
            "ema": len(self.averages),
            "policy": list(dict.fromkeys(str(asked) for asked, _ in self.policies.values())),
            "max_grad_norm": self.max_grad_norm,
        }

    def _compare_ranks(self) -> None:
        """Refuse, on all ranks, settings that they cannot share or that differ: at a first call, and after a change."""
        if "ranks" in self.said:
            return
        ranks = self.ranks
        scaled = self.scaler.is_enabled() or self.undecided
        refuse_unfit_ranks(ranks, accumulate_steps=self.accumulate_steps, scaled=scaled)
        if ranks.groups or (ranks.shared and dist.get_world_size() > 1):
            told = {
                "the policy": given.policies_asked(self.model),
                "the number of ranks": [dist.get_world_size(group) for group in ranks.groups],
                "the loss scaler": "undecided"
                if self.undecided
                else {"kind": self.scaler.kind, **self.scaler.state_dict()},
                **self.settings(),
                "the number of finished windows": self.windows,
            }
            refuse_differences(told, ranks.groups, self.model)
        self.said.add("ranks")

    def _before_micro_batch(self) -> None:
        """Make the checks of each micro-batch; name a model in eval mode each time anew."""
        self._compare_ranks()
        for about, text in self.by_hand.found(self.optimizers, self.schedulers, self.position, self.accumulate_steps):
            self.say(about, text)
        if self.model.training:
            self.said.discard("eval")
        else:
            self.say(
                "eval",
                f"TrainStep trains {type(self.model).__name__} in eval mode: dropout is off and statistics of batch "
                "norms stay. Call train() before.",
            )

    def _warn_of_fp32(self) -> None:
        """Say that a model is not converted, once, after its first forward: it trains in FP32, perhaps by mistake."""
        if "fp32" in self.said:
            return
        under_autocast = any(map(torch.is_autocast_enabled, DEVICES))
        if not under_autocast and not any(map(is_view, self.model.modules())) and not given.policies_of(self.model):
            self.say(
                "fp32",
                f"TrainStep trains {type(self.model).__name__} in FP32, since it is not converted: give it what "
                "fxamp.convert(model, ...) or fxamp.compile(model) returned. Keep the optimizer: the parameters are "
                "the same.",
            )
        self.said.add("fp32")

    def refuse_torn(self) -> None:
        """Raise PolicyError for what would go on from half a step."""
        if self.torn:
            raise PolicyError(
                "the last window was left while its optimizers stepped, by an error or an interrupt, so that weights "
                "and states of optimizers may be those of half a step: load a state, by step.load, step.load_state_dict"
                " or fxamp.load_checkpoint"
            )

    def check_scale(self, scale: float | None) -> None:
        """Refuse a scale that no window could be opened with, or that the open one does not have."""
        self.refuse_torn()
        if scale is None:
            return
        require_scale("scale", scale)
        window = self.opened
        if window is not None and scale != window.given_scale:
            raise PolicyError(
                f"scale={scale!r} within a window that began with {window.given_scale or 'the scale of the scaler'}: "
                "the gradients of a window add up, so they need the same scale. Change it at the start of a window."
            )

    def open_window(self, scale: float | None = None) -> Window:
        """Open a window with a scale of its own, or return the one that is open."""
        if self.opened is not None:
            return self.opened
        self._clear_stale()
        scaler = self.scaler if scale is None else LossScaler(init_scale=scale, dynamic=False)
        if self.low_dtype == torch.float16 and not scaler.is_enabled() and "unscaled" not in self.said:
            self.said.add("unscaled")
            warnings.warn(
                "training in FP16 without loss scaling: gradients below 6e-8 become zero. "
                'Leave scaler at "auto", or give a LossScaler.',
                stacklevel=3,
            )
        self.opened = Window(scaler, scale)
        return self.opened

    def close_window(self) -> None:
        """Leave the window that is open, without a step, if one is; what was cut off can be repeated."""
        self.weights.end()
        if self.opened is not None:
            forget_step(self.opened.scaler)
            self.by_hand.after_window(self.schedulers, self._clear(in_place=self.in_place))
            self.opened = None

    def _clear(self, *, in_place: bool) -> list[Tensor]:
        """Clear the gradients of model, loss and optimizers; return the parameters of optimizers that had one."""
        had = live(self.optimizers)
        for p in had:
            if in_place and p.grad is not None:
                p.grad.detach_().zero_()
            else:
                p.grad = None
        if self._registered != registrations():
            self._look_for_untrained()
        for p in self._untrained:
            if p.grad is not None:
                p.grad = None
        return had

    def _look_for_untrained(self) -> None:
        """Find the parameters of the model, and of a loss that is a module, that are in no optimizer."""
        self._registered = registrations()
        held = {id(p) for optimizer in self.optimizers for p in parameters(optimizer)}
        modules = [self.model, self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [self.model]
        self._untrained = [p for module in modules for p in module.parameters() if id(p) not in held]

    def _warn_of_settings(self) -> None:
        """Name settings that look like mistakes: a scheduler made for epochs, and a model that is hardly trained."""
        untrained = set(map(id, self._untrained))
        sizes = {id(p): p.numel() for p in self.model.parameters() if p.requires_grad}
        left_out = sum(size for p, size in sizes.items() if p in untrained) / max(sum(sizes.values()), 1)
        if left_out >= 0.5:
            self.say(
                "untrained",
                f"no optimizer of this TrainStep trains {100 * left_out:.0f} % of the trainable weights of "
                f"{type(self.model).__name__}: give it the other optimizers too, or call requires_grad_(False) on what "
                "stays.",
            )
        for scheduler in self.schedulers:
            length = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
            if isinstance(length, int) and _EPOCHS[0] <= length <= _EPOCHS[1]:
                self.say(
                    f"epochs of {type(scheduler).__name__}",
                    f"{type(scheduler).__name__} steps after each window, and {length} windows are few: if it counts "
                    "epochs, leave it out of the TrainStep, and call scheduler.step() yourself after each epoch.",
                )

    def _clear_stale(self) -> None:
        """Clear gradients that somebody has left; for CUDA graphs have one of zeros for each parameter."""
        if self.in_place:
            for p in (p for o in self.optimizers for p in parameters(o) if p.grad is None):
                p.grad = torch.zeros_like(p)
            return
        stale = self.by_hand.stale(self.optimizers)
        if stale is not None:
            name = next((name for name, p in self.model.named_parameters() if p is stale), "a parameter outside of it")
            self.say(
                "stale",
                f"{type(self.model).__name__} had gradients that were there when its window opened, the first '{name}':"
                " they are cleared. A TrainStep adds up those of its own window only",
            )
            self._clear(in_place=False)
