"""The data that a converted module keeps beside its graphs; it is copied and saved as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from passes.contract.errors import PlanError
from passes.contract.plan import Plan

from ..capture.model.captured import State
from ..capture.model.reads import Reads

# The fields in the order in which they were saved before they had names.
_UNNAMED = ("plan", "device_type", "original", "missing", "reads", "container")


@dataclass(frozen=True)
class Kept:
    """A record; a new field needs only a line here, with its value for modules saved without it.

    Attributes:
        plan: what was decided, node by node, for all graphs.
        device_type: device type whose autocast is disabled while the graphs run.
        original: the name of the model's class.
        missing: states that could not be captured, and why.
        reads: what forward() read of the model, which the graphs have as constants.
        container: the container of torch.nn that the model is, and whose indices the module has; None for another.
        loads_otherwise: the user has overridden how it is loaded.
    """

    plan: Plan
    device_type: str = "cpu"
    original: str = "the original model"
    missing: tuple[tuple[State, str], ...] = ()
    reads: Reads = field(default_factory=Reads)
    container: type[nn.Module] | None = None
    loads_otherwise: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return the record as a saved module holds it: by the names of its fields, the plan as text."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"plan": self.plan.to_json()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | tuple[Any, ...]) -> Kept:
        """Read what a saved module holds, by an older fxamp too.

        Raises:
            PlanError: the plan cannot be read, or a newer fxamp has saved fields that this one does not know.
        """
        named = dict(zip(_UNNAMED, data, strict=False)) if isinstance(data, tuple) else dict(data)
        unknown = sorted(named.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise PlanError(
                f"the saved module keeps {', '.join(unknown)}, which this fxamp does not know: a newer one saved it. "
                "Upgrade fxamp, or convert the model again."
            )
        return cls(**named | {"plan": Plan.from_json(named["plan"])})
