"""Budgets of the gate: limits on the value of a total, or on how much worse it may be than in the committed plan.

casts=500          at most 500
casts=+0           no more than in the plan
cast_bytes=+5%     at most 5 % more than in the plan
low_flops=80%      at least 80 % of the operations run low
low_flops=-1%      at most one percentage point less than in the plan
kernels=540        at most 540 kernels in a compiled forward and backward; such counts are not in a plan
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from passes.contract.errors import PolicyError
from passes.contract.policy import nearest

from ..record.record import CEILINGS, FLOORS, TOTALS

# Of `fxamp.measure.inductor.Counts`; they take a compilation, and change with torch, so that plans do not have them.
COUNTS = ("kernels", "cast_kernels", "moved_bytes", "peak")
KEYS = TOTALS + COUNTS

_LIMIT = re.compile(r"([+-]?)(\d{1,18}(?:\.\d{1,6})?)(%?)")


@dataclass(frozen=True)
class Budget:
    """One limit of the total `key`: the sign is "" for a value, "+" or "-" for a change against the plan."""

    key: str
    sign: str
    limit: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read KEY=LIMIT; PolicyError if it cannot be parsed, or would limit nothing."""
        key, equals, limit = (part.strip() for part in text.partition("="))
        if key not in KEYS:
            known = ", ".join(KEYS)
            raise PolicyError(f"budget {text!r}: there is no total {key!r}{nearest(key, KEYS)}; one of {known}")
        found = _LIMIT.fullmatch(limit)
        if not equals or found is None:
            change = "" if key in COUNTS else f", or {key}={_example(key)} for a change"
            raise PolicyError(f"budget {text!r}: write {key}=500 for a value{change}")
        sign, number, percent = found.groups()
        if key in COUNTS and (sign or percent):
            raise PolicyError(f"budget {text!r}: a plan has no {key} to compare with; write {key}=500 for a value")
        if sign and sign != ("+" if key in CEILINGS else "-"):
            way = "up" if key in CEILINGS else "down"
            raise PolicyError(
                f"budget {text!r}: a budget limits how far {key} may go {way}; write {key}={_example(key)}"
            )
        if percent and not sign and key in CEILINGS:
            raise PolicyError(f"budget {text!r}: {key} is not a percentage; write {key}=500 or {key}={_example(key)}")
        return cls(key, sign, float(number), bool(percent))

    def __str__(self) -> str:
        return f"{self.key}={self.sign}{self.limit:g}{'%' * self.percent}"

    def broken(self, now: Mapping[str, float], before: Mapping[str, float] | None) -> list[str]:
        """Describe how the totals exceed the budget, in each state of the model; return nothing where they do not.

        PolicyError if the total is not known, now or in the plan. That of a state is named "casts (evaluation)".
        """
        keys = [key for key in now if key.partition(" ")[0] == self.key]
        if not keys:
            raise self._unknown(
                self.key, "a plan alone has none, and a graph whose sizes depend on values cannot be sized"
            )
        floor, out = self.key in FLOORS, []
        for key in keys:
            limit = self._limit(key, before) if self.sign else self.limit
            if now[key] < limit - 1e-9 if floor else now[key] > limit + 1e-9:
                word = "at least" if floor else "at most"
                out.append(f"{key} is {now[key]:g}, and the budget {self} allows {word} {limit:g}")
        return out

    def _limit(self, key: str, before: Mapping[str, float] | None) -> float:
        """Return the limit of a change."""
        if before is None:
            raise PolicyError(f"budget {self}: a change needs a plan to compare with; give --plan FILE")
        if key not in before:
            raise self._unknown(key, "the plan does not have it; write a new plan with --update")
        if self.key in FLOORS:
            return before[key] - self.limit
        return before[key] + (before[key] * self.limit / 100 if self.percent else self.limit)

    def _unknown(self, key: str, why: str) -> PolicyError:
        return PolicyError(f"budget {self}: the total {key} is not known for this model: {why}")


def _example(key: str) -> str:
    return "+0" if key in CEILINGS else "-1%"
