"""Automatic mixed precision for PyTorch as a graph-rewriting compiler pass over torch.fx.

converted = fxamp.convert(model, (example,))    # values of torch.autocast, fewer casts
print(fxamp.report(converted))                  # every decision, with its reason
"""

from __future__ import annotations

from .guard import refuse_foreign_passes

refuse_foreign_passes()

from passes.errors import CaptureError as CaptureError  # noqa: E402 - the guard comes first
from passes.errors import FxampError as FxampError  # noqa: E402
from passes.errors import NotAModuleError as NotAModuleError  # noqa: E402
from passes.errors import PlanError as PlanError  # noqa: E402
from passes.errors import PolicyError as PolicyError  # noqa: E402
from passes.errors import ScaleCollapseError as ScaleCollapseError  # noqa: E402
from passes.errors import VerificationError as VerificationError  # noqa: E402
from passes.plan import Decision as Decision  # noqa: E402
from passes.plan import Plan as Plan  # noqa: E402
from passes.policy import Policy as Policy  # noqa: E402
from passes.rules import register_rule as register_rule  # noqa: E402
from passes.rules import rules as rules  # noqa: E402

from .convert import convert as convert  # noqa: E402
from .convert import graphs as graphs  # noqa: E402
from .convert import plan as plan  # noqa: E402
from .convert import plan_of as plan_of  # noqa: E402
from .dynamo import Backend as Backend  # noqa: E402
from .dynamo import backend as backend  # noqa: E402
from .dynamo import compile as compile  # noqa: E402
from .freeze import frozen as frozen  # noqa: E402
from .module import ConvertedModule as ConvertedModule  # noqa: E402
from .report.diff import GraphDiff as GraphDiff  # noqa: E402
from .report.diff import diff as diff  # noqa: E402
from .report.report import Report as Report  # noqa: E402
from .report.report import report as report  # noqa: E402
from .train.result import StepResult as StepResult  # noqa: E402
from .train.scaler import LossScaler as LossScaler  # noqa: E402
from .train.step import TrainStep as TrainStep  # noqa: E402

__version__ = "0.1.0"
