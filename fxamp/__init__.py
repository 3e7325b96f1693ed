"""Automatic mixed precision for PyTorch as a graph-rewriting compiler pass over torch.fx.

Every example below runs as printed, after these lines:

    >>> import torch, fxamp
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> x, y = torch.randn(3, 8), torch.tensor([0, 1, 2])
    >>> converted = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = fxamp.TrainStep(converted, nn.functional.cross_entropy, optimizer)

*Low* is the 16-bit dtype of a conversion, FP16 or BF16. The *colour* of a node is the dtype that it runs in. A *state*
of a model is its mode (train or eval) and whether it computes gradients; each state may have a graph of its own. A
*deviation* is a node that may differ from `torch.autocast` for a reason other than the level or the policy. A *window*
is the group of micro-batches whose gradients one optimizer step uses.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from .guard import refuse_foreign_passes

if "pytest" not in sys.modules:  # pytest always loads our plugin, which refuses only when it is used
    refuse_foreign_passes()

if TYPE_CHECKING:
    from passes.contract.errors import CaptureError as CaptureError
    from passes.contract.errors import FxampError as FxampError
    from passes.contract.errors import PlanError as PlanError
    from passes.contract.errors import PolicyError as PolicyError
    from passes.contract.errors import VerificationError as VerificationError
    from passes.contract.plan import Decision as Decision
    from passes.contract.plan import Plan as Plan
    from passes.contract.policy import Policy as Policy
    from passes.ops.rules import register_rule as register_rule
    from passes.ops.rules import rules as rules

    from .calibration import Calibration as Calibration
    from .capture.backend import Backend as Backend
    from .capture.backend import backend as backend
    from .census.census import Census as Census
    from .census.census import census as census
    from .choose.compare import Comparison as Comparison
    from .choose.compare import advise as advise
    from .choose.compare import bisect as bisect
    from .choose.compare import compare as compare
    from .choose.compare import verify as verify
    from .choose.tune import tune as tune
    from .convert import compile as compile
    from .convert import convert as convert
    from .convert import graphs as graphs
    from .convert import plan as plan
    from .convert import plan_of as plan_of
    from .error.estimate import estimate_error as estimate_error
    from .error.measure import measure_error as measure_error
    from .error.report import ErrorReport as ErrorReport
    from .errors import NotAModuleError as NotAModuleError
    from .errors import ScaleCollapseError as ScaleCollapseError
    from .ranges.calibrate import calibrate as calibrate
    from .ranges.overflow import Overflow as Overflow
    from .ranges.overflow import find_overflow as find_overflow
    from .report.diff.diff import GraphDiff as GraphDiff
    from .report.diff.diff import diff as diff
    from .report.report import Report as Report
    from .report.report import report as report
    from .train.result import StepResult as StepResult
    from .train.scaler import LossScaler as LossScaler
    from .train.sharded_checkpoint import load_checkpoint as load_checkpoint
    from .train.sharded_checkpoint import save_checkpoint as save_checkpoint
    from .train.step import TrainStep as TrainStep
    from .view.frozen import cast_once as cast_once
    from .view.frozen import frozen as frozen

__version__ = "0.1.0"

# Each name is loaded when it is first used, so that `import fxamp` imports neither torch nor the compiler. Type
# checkers read the same names above.
_FOUND_IN = {
    "passes.contract.errors": ("CaptureError", "FxampError", "PlanError", "PolicyError", "VerificationError"),
    "passes.contract.plan": ("Decision", "Plan"),
    "passes.contract.policy": ("Policy",),
    "passes.ops.rules": ("register_rule", "rules"),
    "fxamp.calibration": ("Calibration",),
    "fxamp.errors": ("NotAModuleError", "ScaleCollapseError"),
    "fxamp.convert": ("compile", "convert", "graphs", "plan", "plan_of"),
    "fxamp.capture.backend": ("Backend", "backend"),
    "fxamp.report.diff.diff": ("GraphDiff", "diff"),
    "fxamp.report.report": ("Report", "report"),
    "fxamp.train.result": ("StepResult",),
    "fxamp.train.scaler": ("LossScaler",),
    "fxamp.train.sharded_checkpoint": ("load_checkpoint", "save_checkpoint"),
    "fxamp.train.step": ("TrainStep",),
    "fxamp.census.census": ("Census", "census"),
    "fxamp.choose.compare": ("Comparison", "advise", "bisect", "compare", "verify"),
    "fxamp.choose.tune": ("tune",),
    "fxamp.error.estimate": ("estimate_error",),
    "fxamp.error.measure": ("measure_error",),
    "fxamp.error.report": ("ErrorReport",),
    "fxamp.ranges.calibrate": ("calibrate",),
    "fxamp.ranges.overflow": ("Overflow", "find_overflow"),
    "fxamp.view.frozen": ("cast_once", "frozen"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _FOUND_IN.items() for name in names}
_TRAINERS = ("lightning", "huggingface")  # modules, each for a package that need not be installed
__all__ = [*_MODULE_OF]  # what `import *` loads


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:
        return importlib.import_module(f"fxamp.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_foreign_passes()
    module = _MODULE_OF[name]
    loaded = importlib.import_module(module)
    globals().update({other: getattr(loaded, other) for other in _FOUND_IN[module]})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(types.ModuleType):
    """This package: `fxamp.convert` stays the function when Python has imported the file of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULE_OF or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
