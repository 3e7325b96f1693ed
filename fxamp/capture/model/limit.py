"""The limits of a capture with dynamic shapes, in processor time and in the length of expressions of sizes.

A capture that exceeds a limit is aborted. A model that pads images to a multiple of a window size compares sizes by
very long expressions if every dimension is dynamic, and its capture takes minutes. The first such expression appears
early, and at the same place on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from passes._torch import FakeTensor, longest_guard


class TooMuch(Exception):  # noqa: N818 - a signal inside this package, not an error
    """A capture exceeds one of its limits; the text names it."""


@dataclass(frozen=True)
class Limit:
    """The limits of a capture.

    Attributes:
        seconds: processor time.
        seconds_per_call: processor time for each call of torch on top of that.
        operations: how many operations one comparison of sizes may have.
    """

    seconds: float = 4.0
    seconds_per_call: float = 0.00025
    operations: int = 96

    def watch(self) -> Callable[[Any], None]:
        """Return a function to call with the arguments of each call; it raises TooMuch. The time counts from now on."""
        end, seen, env = time.thread_time() + self.seconds, 0, None

        def check(args: Any) -> None:
            nonlocal end, seen, env
            end += self.seconds_per_call
            if time.thread_time() > end:
                raise TooMuch(
                    f"takes more than {self.seconds:g} s of processor time plus "
                    f"{self.seconds_per_call * 1000:g} ms for each call of torch"
                )
            if env is None and args and isinstance(args[0], FakeTensor):
                env = args[0].fake_mode.shape_env
            if env is not None and len(env.guards) > seen:
                longest, seen = longest_guard(env, seen), len(env.guards)
                if longest > self.operations:
                    raise TooMuch(f"compares sizes by a formula of {longest} operations, more than {self.operations}")

        return check
