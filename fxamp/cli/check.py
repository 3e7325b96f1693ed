"""`fxamp check`: models against their committed plans, budgets and censuses, as CI runs it."""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .alone import Processes
from .output import UNKNOWN, aside, failed, waiting, write
from .targets import Target, configured, find_pyproject
from .told import told
from .usage import POLICY, TARGET, UsageError, add_device, positive

if TYPE_CHECKING:
    from torch import nn

    from passes.contract.plan import Plan

    from ..report.gate.budget import Budget
    from ..report.gate.gate import Outcome
    from ..train.step import TrainStep

SUMMARY = "Compare models with their committed plans, budgets and censuses; exit with 1 on a difference."
FORMATS = ("text", "markdown", "json", "github", "junit", "sarif")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "targets", metavar="TARGET", nargs="*",
        help=f"{TARGET}, or names or patterns of [tool.fxamp.targets]; default: all of these",
    )  # fmt: skip
    parser.add_argument("--policy", help=f'{POLICY}; with --census also "autocast" (the default)')
    parser.add_argument("--plan", metavar="FILE", help="the committed plan")
    parser.add_argument("--update", action="store_true", help="write plans and censuses that are missing or changed")
    parser.add_argument("--budget", metavar="KEY=LIMIT", action="append", default=[], help='such as "casts=+0"')
    parser.add_argument(
        "--census", metavar="FILE", help="run one step, and compare what ran with this census, of `fxamp census --save`"
    )
    parser.add_argument(
        "--run", action="store_true", dest="runs",
        help="run one step of a view, and compare what ran with what was planned; TARGET may be (TrainStep, batch)",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="fail on a change of the reason of a decision alone, too")
    parser.add_argument("--verbose", action="store_true", help="list each change, also those that are alike")
    parser.add_argument("--jobs", metavar="N", type=positive, default=1, help="how many targets to check at once")
    add_device(parser)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process


def run(args: argparse.Namespace) -> int:
    """Check targets."""
    chosen, folder = _chosen(args)
    what = chosen[0].name if len(chosen) == 1 else f"{len(chosen)} targets"
    with waiting(args, f"checking {what}"):
        if args.here:
            found = [_safely(target, args.update) for target in chosen]
        else:
            options = ["--update"] * args.update
            found = [_outcome(chosen[at], data) for at, data in enumerate(
                Processes(folder, options, args.jobs).check(chosen)
            )]  # fmt: skip
    from ..report.gate import outcomes as shown

    write(
        args, text=lambda: shown.to_text(found, verbose=args.verbose), markdown=lambda: shown.to_markdown(found),
        json=lambda: shown.to_json(found), github=lambda: shown.to_github(found),
        junit=lambda: shown.to_junit(found), sarif=lambda: shown.to_sarif(found),
    )  # fmt: skip
    for outcome in found:
        if outcome.status == UNKNOWN and not (args.here and args.quiet):  # whoever started this process says it
            failed(outcome.message)
    return max(outcome.status for outcome in found)


def _chosen(args: argparse.Namespace) -> tuple[list[Target], Path]:
    """Return the targets to check, and the folder of their paths."""
    if not args.targets or not all(":" in target for target in args.targets):
        file = find_pyproject(Path.cwd())
        if args.policy or args.plan or args.budget or args.census or args.device:
            raise UsageError(
                "check: --policy, --plan, --budget, --census and --device are of a TARGET that is named, such as "
                f"net.py:make; of targets in {file.name} they are set there"
            )
        targets = [
            replace(target, run=target.run or args.runs, strict=target.strict or args.strict)
            for target in configured(file, args.targets)
        ]
        return targets, file.parent
    if (args.plan or args.census) and len(args.targets) > 1:
        raise UsageError("check: --plan and --census are of one TARGET; set those of several in pyproject.toml")
    chosen = [
        Target(
            args.name or target, target, args.policy, args.plan, tuple(args.budget), args.device, args.runs,
            args.census, args.strict,
        ) for target in args.targets
    ]  # fmt: skip
    if not chosen[0].compares():
        raise UsageError(
            "check: there is nothing to compare with; give --plan FILE, --census FILE, --budget KEY=LIMIT, or --run"
            + _configured_as(args.targets[0])
        )
    return chosen, Path.cwd()


def _configured_as(target: str) -> str:
    """Say under which name pyproject.toml has a target; "" where it has not."""
    with contextlib.suppress(UsageError):
        file = find_pyproject(Path.cwd())
        for one in configured(file):
            if one.target == target:
                return f"; {file.name} has this target: `fxamp check {one.name}`"
    return ""


def _outcome(target: Target, data: dict[str, Any] | str) -> Outcome:
    """Return the outcome of a process."""
    import msgspec

    from ..report.gate.gate import Outcome

    if isinstance(data, str):
        return Outcome(target.name, UNKNOWN, data)
    try:
        return msgspec.convert(data, Outcome)
    except msgspec.ValidationError as error:
        return Outcome(target.name, UNKNOWN, f"{target.name}: its process gave no outcome ({error})")


def _safely(target: Target, update: bool) -> Outcome:
    """Check one target in this process; an error is its outcome."""
    from ..report.gate.gate import Outcome

    begun = time.perf_counter()
    try:
        found = _checked(target, update)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a target may raise anything
        text = told(error)
        found = Outcome(target.name, UNKNOWN, text if text.startswith(target.name) else f"{target.name}: {text}")
    return replace(found, seconds=time.perf_counter() - begun)


def _checked(target: Target, update: bool) -> Outcome:
    """Check one target in this process."""
    from ..report.gate.budget import COUNTS, Budget
    from .target import AUTOCAST

    budgets = [Budget.parse(text) for text in target.budgets]
    by_census = target.census is not None or target.run
    if by_census and target.device is not None:
        raise UsageError("check: --run and --census run the model where it is; leave out --device")
    if target.run and (target.policy or "").startswith(AUTOCAST):
        raise UsageError(f"check: --run compares with a plan, which {target.policy} has not; give a level, or --census")
    census_file = None if target.census is None else Path(target.census).absolute()
    with aside():  # standard output is for the outcome alone
        counts = _counts(target) if any(budget.key in COUNTS for budget in budgets) else {}
        if not by_census:
            return _planned(target, budgets, update, counts, None)
        return _ran(target, budgets, update, counts, census_file)


def _counts(target: Target) -> dict[str, float]:
    """Count the kernels of a target, which Inductor compiles for it."""
    from passes.contract.policy import Policy

    from ..report.gate.kernels import counts_of

    asked = Policy.of(_plan_policy(target))
    return counts_of(target.target, asked if target.device is None else replace(asked, device=target.device))


def _plan_policy(target: Target) -> str | None:
    """Return the policy of the plan: O1 has the decisions of autocast."""
    from .target import AUTOCAST

    level, comma, rest = (target.policy or "").partition(",")
    return f"O1{comma}{rest}" if level == AUTOCAST else target.policy


def _planned(
    target: Target, budgets: list[Budget], update: bool, counts: dict[str, float], made: nn.Module | TrainStep | None,
) -> Outcome:  # fmt: skip
    """Compare the plan of a target; with `made`, of a module that is converted already, or of a step that has run."""
    from ..report.gate.gate import check
    from .target import converted

    def make(replayed: Plan | None) -> nn.Module | TrainStep:
        return made if made is not None else converted(target.target, _plan_policy(target), target.device, replayed)

    return check(target.name, make, target.plan, budgets, update, counts, target.strict)


def _ran(
    target: Target, budgets: list[Budget], update: bool, counts: dict[str, float], census_file: Path | None
) -> Outcome:
    """Run a step of a target, and compare what ran with its plan, with a committed census, or with both."""
    from torch import nn

    from ..census.census import census
    from ..convert import converted_in
    from ..report.gate.committed_census import against
    from ..report.gate.gate import KEPT, NO_PLAN, Outcome, with_run
    from ..target import load_target
    from .target import AUTOCAST, step_of, under

    given, inputs, compared = step_of(load_target(target.target), "check: --run needs a batch")
    whole = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    own = given if isinstance(whole, nn.Module) and converted_in(whole) else None
    with under(given, target.policy, "O1" if target.run else AUTOCAST) as (model, _):
        found = census(model, inputs, compared)
    if target.run and found.planned is None:
        raise UsageError("check: nothing of the target is converted: give the TrainStep what fxamp.convert returned")
    outcome = Outcome(target.name, KEPT, f"{target.name}{NO_PLAN}")
    if target.plan is not None or budgets:
        outcome = _planned(target, budgets, update, counts, own)
    if target.run:
        said = list(map(str, found.differences))
        outcome = with_run(outcome, said, f"{len(said)} differences in what ran" if said else "ran as planned")
    if census_file is not None and target.census is not None:
        outcome = with_run(outcome, *against(census_file, target.census, found, update), target.census)
    return outcome
