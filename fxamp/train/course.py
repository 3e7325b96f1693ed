"""The course of a training step: what it has counted, which policies it was switched to, and whether it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.contract.errors import PolicyError
from passes.contract.plan import Plan

from .scaler import Tally


class Course:
    """What a step has counted and switched, the same on all ranks."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        for name in ("windows", "steps", "skipped", "skips_in_a_row"):
            if type(count := state.get(name, 0)) is not int or count < 0:
                raise PolicyError(f"the state has {count!r} where the number of its {name} should be")
        self.windows: int = state.get("windows", 0)  # that were finished
        self._ended: int = state.get("steps", 0)
        self._held_back, self.skipped = Tally(), Tally(state.get("skipped", 0))
        self.skips_in_a_row = Tally(state.get("skips_in_a_row", 0), in_a_row=True)
        # The policies that were set, each with the number of windows before it, and the last one's plan.
        self.switches: tuple[tuple[int, str], ...] = tuple((at, policy) for at, policy in state.get("switches", ()))
        plan = state.get("switched_plan")
        self.plan = None if plan is None else Plan.from_json(plan)
        self.torn = False  # the last window was left while its optimizers stepped

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """All counts that may be on the device."""
        return self._held_back, self.skipped, self.skips_in_a_row

    @property
    def steps(self) -> int:
        """How many windows ended with a step; that waits for the device."""
        return self._ended - self._held_back.read()

    def state(self) -> dict[str, Any]:
        """Return it as plain values; that waits for the device."""
        return {
            "windows": self.windows,
            "steps": self.steps,
            "skipped": self.skipped.read(),
            "skips_in_a_row": self.skips_in_a_row.read(),
            "switches": [list(one) for one in self.switches],
            "switched_plan": None if self.plan is None else self.plan.to_json(),
        }

    def switch(self, policy: str, plan: Plan | None) -> None:
        """Note that the views follow another policy from the next window on."""
        self.skips_in_a_row = Tally(in_a_row=True)
        self.switches, self.plan = (*self.switches, (self.windows, policy)), plan

    def refuse_torn(self) -> None:
        """Raise PolicyError for what would go on from half a step."""
        if self.torn:
            raise PolicyError(
                "the last window was left while its optimizers stepped, by an error or an interrupt, so that weights "
                "and states of optimizers may be those of half a step: load a state, by step.load, step.load_state_dict"
                " or fxamp.load_checkpoint"
            )

    def tears(self) -> None:
        """Note that optimizers begin to step."""
        self.torn = True

    def count(self, held_back: bool | torch.Tensor, skipped: bool | torch.Tensor) -> Tally:
        """Count the end of a window: all optimizers were held back, or one was; return how many were, in a row."""
        self._ended += 1
        self._held_back.add(held_back)
        self.skipped.add(skipped)
        self.skips_in_a_row.add(skipped)
        return self.skips_in_a_row
