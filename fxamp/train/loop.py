"""The loop around a TrainStep: the gradients that it leaves, what it does by hand, and what looks like a mistake.

The step makes the calls of a hand-written loop itself. Those that the loop makes too are found by what they leave
between two calls of the step.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError

from .._torch import registrations, sequence_number
from ..view.view import is_view
from .options import Options, low_dtype_of, policies_of
from .window import first_with_gradient, live, parameters

logger = logging.getLogger("fxamp")

_LENGTHS = ("step_size", "T_max", "T_0")  # after which a scheduler changes the rate, or begins again
_EPOCHS = (10, 300)  # as many steps as runs have epochs


class Loop:
    """What a TrainStep left after its last micro-batch and its last window, compared with what the next one finds."""

    _left_out: frozenset[str] | None = None  # names of the parameters that no optimizer had at first

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model, self._options = model, options
        self.said: set[str] = set()  # the subjects of what was said already, since each is said once
        self.begin()
        self._look_for_untrained()
        self._warn_of_settings()

    def begin(self) -> None:
        """Compare with nothing: schedulers and gradients are those of another state now."""
        # Within a window, of each optimizer the first weight that has a gradient, and how often it was written to.
        self._weights: list[tuple[Optimizer, Tensor, int]] = []
        self._epochs: list[tuple[int, ...]] = []  # of each scheduler, between windows
        self._had: list[Tensor] = []  # the parameters that had gradients in the last window
        self._recorded = -1  # the number of autograd's next op when it ended

    def say(self, about: str, text: str) -> None:
        """Log a warning once."""
        if about not in self.said:
            self.said.add(about)
            logger.warning("fxamp: %s", text)

    def before_micro_batch(self, position: int) -> None:
        """Say what was done by hand since the last micro-batch or window; refuse gradients cleared within one."""
        options, count = self._options, self._options.accumulate_steps
        cleared = self._weights and all(p.grad is None for _, p, _ in self._weights)
        if cleared and first_with_gradient(options.optimizers) is None:
            raise PolicyError(
                f"the gradients of {position} of the window's {count} micro-batches were cleared "
                "before the next one: leave out zero_grad(). A TrainStep clears gradients itself, after each window."
            )
        for optimizer, p, version in self._weights:
            if version != p._version:
                self.say(
                    "weights",
                    f"the weights that {type(optimizer).__name__} trains changed within a window of {count} "
                    "micro-batches: leave out optimizer.step(). A TrainStep steps itself, after each window.",
                )
        for scheduler, epoch in zip(options.schedulers, self._epochs, strict=False):
            if _epochs_of(scheduler) == tuple(one + 1 for one in epoch):
                self.say(
                    "schedulers",
                    f"{type(scheduler).__name__} stepped outside its TrainStep, which steps it after each window: "
                    "leave out scheduler.step(), or do not give the scheduler to the TrainStep.",
                )
        self._epochs = []
        if self._model.training:
            self.said.discard("eval")
        else:
            self.say(
                "eval",
                f"TrainStep trains {type(self._model).__name__} in eval mode: dropout is off and statistics of batch "
                "norms stay. Call train() before.",
            )

    def after_micro_batch(self) -> None:
        """Note the state within a window."""
        firsts = ((o, first_with_gradient([o])) for o in self._options.optimizers)
        self._weights = [(o, p, p._version) for o, p in firsts if p is not None]

    def after_window(self, *, in_place: bool) -> None:
        """Clear gradients, and note the state between windows."""
        had = self._clear(in_place=in_place)
        self._weights, self._had, self._recorded = [], had, sequence_number()
        self._epochs = list(map(_epochs_of, self._options.schedulers))

    def before_window(self, *, scaled: bool, in_place: bool) -> None:
        """Clear gradients that somebody has left; where they stay in place, have one of zeros for each parameter."""
        if not scaled and "unscaled" not in self.said:
            self.said.add("unscaled")
            if low_dtype_of(self._model) == torch.float16:
                warnings.warn(
                    "training in FP16 without loss scaling: gradients below 6e-8 become zero. "
                    'Leave scaler at "auto", or give a LossScaler.',
                    stacklevel=5,
                )
        if in_place:
            for p in (p for o in self._options.optimizers for p in parameters(o) if p.grad is None):
                p.grad = torch.zeros_like(p)
        elif (stale := self._stale()) is not None:
            name = next((name for name, p in self._model.named_parameters() if p is stale), "a parameter outside of it")
            self.say(
                "stale",
                f"{type(self._model).__name__} had gradients that were there when its window opened, the first "
                f"'{name}': they are cleared. A TrainStep adds up those of its own window only",
            )
            self._clear(in_place=False)

    def warn_of_fp32(self) -> None:
        """Say that a model is not converted, once, after its first forward: it trains in FP32, perhaps by mistake."""
        if "fp32" in self.said:
            return
        under_autocast = any(map(torch.is_autocast_enabled, DEVICES))
        if not under_autocast and not any(map(is_view, self._model.modules())) and not policies_of(self._model):
            self.say(
                "fp32",
                f"TrainStep trains {type(self._model).__name__} in FP32, since it is not converted: give it what "
                "fxamp.convert(model, ...) or fxamp.compile(model) returned. Keep the optimizer: the parameters are "
                "the same.",
            )
        self.said.add("fp32")

    def _stale(self) -> Tensor | None:
        """Return the first parameter that has a gradient before a window opens."""
        if sequence_number() != self._recorded:
            return first_with_gradient(self._options.optimizers)
        # Autograd has recorded nothing in this thread since the last window: a walk over thousands of parameters, which
        # costs as much as the forward of a small model, would find none but those that had a gradient in it.
        return next((p for p in self._had if p.grad is not None), None)

    def _clear(self, *, in_place: bool) -> list[Tensor]:
        had = live(self._options.optimizers)
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

    def without_gradients(self) -> None:
        """Say once that a window trains nothing, and of which parameters."""
        if self._registered != registrations():
            self._look_for_untrained()
        if "replaced" in self.said:  # which is why
            return
        trained = [p for optimizer in self._options.optimizers for p in parameters(optimizer)]
        names = {id(p): name for name, p in self._model.named_parameters()}
        first = names.get(id(trained[0]), "one outside of the model") if trained else ""
        self.say(
            "nothing",
            f"nothing of {type(self._model).__name__} was trained: no parameter of the optimizers "
            + (f"has a gradient, the first is '{first}': look for what cuts the loss off from them"
               if any(p.requires_grad for p in trained)
               else f"requires a gradient, the first is '{first}': call requires_grad_(True) on what is to be trained"),
        )  # fmt: skip

    def _look_for_untrained(self) -> None:
        """Find the parameters of the model, and of a loss that is a module, that are in no optimizer.

        Those that are trainable, and were not there or were trained when the step was made, are named once.
        """
        self._registered, loss = registrations(), self._options.loss_fn
        trained = {id(p) for optimizer in self._options.optimizers for p in parameters(optimizer)}
        modules = [self._model, loss] if isinstance(loss, nn.Module) else [self._model]
        self._untrained = [p for module in modules for p in module.parameters() if id(p) not in trained]
        named = {name: p.requires_grad for name, p in self._model.named_parameters() if id(p) not in trained}
        if self._left_out is None:
            self._left_out = frozenset(named)  # on purpose, such as those of a second optimizer's step
        new = [name for name, trainable in named.items() if trainable and name not in self._left_out]
        if new:
            more = f" and {len(new) - 1} more parameters" if len(new) > 1 else ""
            self.say(
                "replaced",
                f"no optimizer of this TrainStep has '{new[0]}'{more} of {type(self._model).__name__}, which took "
                "another's place or was added (load_state_dict(assign=True), a layer that was replaced): they are not "
                "trained. Build the optimizer and the TrainStep again, from model.parameters()",
            )

    def _warn_of_settings(self) -> None:
        """Name settings that look like mistakes: a scheduler made for epochs, and a model that is hardly trained."""
        untrained = set(map(id, self._untrained))
        sizes = {id(p): p.numel() for p in self._model.parameters() if p.requires_grad}
        left_out = sum(size for p, size in sizes.items() if p in untrained) / max(sum(sizes.values()), 1)
        if left_out >= 0.5:
            self.say(
                "untrained",
                f"no optimizer of this TrainStep trains {100 * left_out:.0f} % of the trainable weights of "
                f"{type(self._model).__name__}: give it the other optimizers too, or call requires_grad_(False) on "
                "what stays.",
            )
        for scheduler in self._options.schedulers:
            length = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
            if isinstance(length, int) and _EPOCHS[0] <= length <= _EPOCHS[1]:
                self.say(
                    f"epochs of {type(scheduler).__name__}",
                    f"{type(scheduler).__name__} steps after each window, and {length} windows are few: if it counts "
                    "epochs, leave it out of the TrainStep, and call scheduler.step() yourself after each epoch.",
                )


def _epochs_of(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often a scheduler stepped; for a chain of them how often each did."""
    return tuple(one.last_epoch for one in getattr(scheduler, "_schedulers", [scheduler]) if hasattr(one, "last_epoch"))
