"""`fxamp tune TARGET`: the plan with the fewest bytes cast within an error, or within a bound of one's own metric."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .output import DONE, aside, waiting, width, write
from .usage import POLICY, UsageError, add_step, tolerance

SUMMARY = "Find the plan that casts the fewest bytes within a budget of error, or under a bound of a metric."
FORMATS = ("text", "markdown", "json")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_step(parser)
    parser.add_argument("--policy", help=f"what holds besides, {POLICY}")
    parser.add_argument(
        "--tolerance", metavar="NUMBER", type=tolerance, help='a relative error, such as 0.02; "autocast" by default'
    )
    parser.add_argument(
        "--metric", metavar="TARGET", help="a function of a view that gives a number, smaller is better"
    )
    parser.add_argument("--bound", metavar="NUMBER", type=float, help="what the metric may be at most")
    parser.add_argument("--save-plan", metavar="FILE", type=Path, help="save the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    """Search for a plan."""
    from passes.contract.plan import CERTIFICATE

    from .. import report, tune
    from ..target import load_callable
    from .target import step_asked

    if (args.metric is None) != (args.bound is None):
        raise UsageError("tune: --metric and --bound go together")
    if args.metric is not None and args.tolerance is not None:
        raise UsageError("tune: give --tolerance, or --metric and --bound")
    saves = None if args.save_plan is None else os.path.abspath(args.save_plan)
    with aside(), waiting(args, f"searching a plan for {args.target}"):  # standard output is for the plan alone
        model, options = step_asked(args, "tune")
        if args.metric is not None:
            metric: Any = load_callable(args.metric)
            plan = tune(model, **options, metric=metric, bound=args.bound, policies=args.policy)
        else:
            plan = tune(model, **options, tolerance=args.tolerance or "autocast", policies=args.policy)
    if saves is not None:
        plan.save(saves)
    made = report(plan)
    said = [note.removeprefix(f"{CERTIFICATE}: ") for note in plan.notes if note.startswith(CERTIFICATE)]
    head = f"{said[0]}\n\n" if said else ""  # what the search came to
    write(args, text=lambda: head + made.to_tree(width=width(args)), markdown=made.to_markdown, json=plan.to_json)
    return DONE
