"""A callback for Hugging Face's Trainer: the plan, the loss scale, skipped steps and a census in its logs.

The Trainer trains the view as any model. The callback only looks, and refuses a model that is not converted.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

from transformers import TrainerCallback

from passes.contract.errors import PolicyError
from passes.contract.policy import Policy

from ..census.census import Census, census
from ..convert import converted_in, plan_of
from ..errors import in_short
from ..view.frozen import cast_once
from ..view.view import is_view, runner_of

logger = logging.getLogger("fxamp")


class FxampCallback(TrainerCallback):  # type: ignore[misc]
    """Log what a Trainer's view runs: its plan, a census after the first step, the loss scale and skipped steps.

    The census runs one step more, of the first batch, after which all state is as before. Entries of the log that begin
    with `fxamp/` are in `trainer.state.log_history`, and in the checkpoints.

    Args:
        policy: What the model was converted by; a Trainer whose model was converted by another one is refused.
        census: Take a census.
        cast_once: Cast each weight once between two updates, as `fxamp.cast_once` does, instead of once a micro-batch.

    Attributes:
        census: The census; None before the first step, and where the Trainer's model is not itself a view.
        skipped: How many steps the scaler skipped.

    Raises:
        PolicyError: The Trainer's model is not converted, or by another policy.

    Example:
        >>> callback = FxampCallback("O1,dtype=bf16")
        >>> trainer = Trainer(fxamp.convert(model, policy="O1,dtype=bf16"), arguments, callbacks=[callback])
    """

    def __init__(self, policy: Policy | str | None = None, *, census: bool = True, cast_once: bool = True) -> None:
        self.policy = None if policy is None else Policy.of(policy)
        self.census: Census | None = None
        self.skipped = 0
        self._wanted, self._scale, self._cast_once = census, 0.0, cast_once
        self._scope = contextlib.ExitStack()
        weakref.finalize(self, self._scope.close)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Refuse a model that is not converted, or by another policy."""
        parts = converted_in(model)
        if not parts:
            raise PolicyError(
                f"the model of this Trainer, {type(model).__name__}, is not converted: pass it what fxamp.convert "
                "returns, Trainer(fxamp.convert(model), ...)."
            )
        for path, part in parts:
            asked = runner_of(part).graphs.asked if is_view(part) else self.policy
            if self.policy is not None and asked != self.policy:
                raise PolicyError(
                    f"{path or type(part).__name__} is converted by {asked}, and FxampCallback was "
                    f"given {self.policy}: give both the same, or the callback none."
                )
        if args.bf16 or args.fp16:
            logger.info(
                "fxamp: bf16= and fp16= of TrainingArguments concern code outside of the view's graphs, the dtype of a "
                "policy that leaves it open, and with fp16= the loss scale; the graphs contain their casts."
            )
        if self._wanted and is_view(model):
            self._remember(model)
        self._scope.close()
        if self._cast_once and any(is_view(part) for _, part in parts):
            self._scope.enter_context(cast_once(model))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cast weights at each use again."""
        self._scope.close()

    def _remember(self, view: Any) -> None:
        """Keep what the next call of a view is given."""
        runner = runner_of(view)
        before = runner.override

        def call(*args: Any, **kwargs: Any) -> Any:
            runner.override, self._given = before, (args, kwargs)
            return view(*args, **kwargs)

        runner.override = call

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Log the plan and the census after the first step."""
        if self._given is None:
            return
        (given, named), self._given = self._given, None
        try:
            self._look(state, model, given, named)
        except Exception as error:  # whoever only looks ends no training
            logger.warning("fxamp: there is no census of the first batch: %s: %s", type(error).__name__, error)

    def _look(self, state: Any, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        plan = plan_of(model)
        low = sum(d.colour in ("bfloat16", "float16") for d in plan.decisions)
        entry: dict[str, Any] = {"fxamp/nodes": len(plan.decisions), "fxamp/low": low, "fxamp/casts": plan.casts}
        try:
            self.census = census(model, given, kwargs=named)
        except Exception as e:  # what only looks ends no training
            logger.warning("fxamp: there is no census of the first batch: %s", in_short(e))
        else:
            found = self.census
            entry |= {"fxamp/as_planned": found.share, "fxamp/differences": len(found.differences)}
            logger.info("fxamp: census of the first batch\n%s", found)
            for difference in found.differences:
                logger.warning("fxamp: did not run as planned: %s", difference)
        state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Note the loss scale of the step that follows."""
        scaler = getattr(optimizer, "scaler", None)
        self._scale = 0.0 if scaler is None else scaler.get_scale()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Count skipped steps. A fused optimizer skips by itself, unseen by Accelerate, but then the scale falls."""
        scaler = getattr(optimizer, "scaler", None)
        fell = scaler is not None and scaler.get_scale() < self._scale
        self.skipped += fell or bool(getattr(optimizer, "step_was_skipped", False))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Add the loss scale and the number of skipped steps to what is logged."""
        scaler = getattr(optimizer, "scaler", None)
        if scaler is None or "loss" not in (logs or {}):
            return
        now = {"fxamp/scale": scaler.get_scale(), "fxamp/skipped": self.skipped}
        logs.update(now)
        state.log_history[-1].update(now)
