"""The counts of a step, by what it consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..inductor import Counts


@dataclass(frozen=True)
class Breakdown:
    """Counts of one step, by what runs.

    Attributes:
        forward: Graphs that are differentiated.
        backward: Their backward.
        inference: Graphs that are not differentiated: a compiled update, or a model that is called without gradients.
        outside: Ops outside of compiled graphs, such as a fused optimizer, sums of gradients, and casts of weights.
        peak: The most bytes that are in memory at once above what is held between steps.
    """

    forward: Counts
    backward: Counts
    inference: Counts
    outside: Counts
    peak: int

    @property
    def update(self) -> Counts:
        """What is neither forward nor backward."""
        return self.inference + self.outside

    @property
    def total(self) -> Counts:
        """All of it, with the peak of the whole step."""
        return replace(self.forward + self.backward + self.update, peak=self.peak)
