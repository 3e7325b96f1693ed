"""`fxamp report TARGET`: a plan as a table, a tree, a page or a graph; of a target, or one that was saved."""

from __future__ import annotations

import argparse
import functools
import os
from dataclasses import replace
from pathlib import Path

from .output import DONE, aside, to_stderr, waiting, width, write
from .usage import POLICY, TARGET, UsageError, add_device, levels

SUMMARY = "Show the dtype of every node, and the reason."
FORMATS = ("text", "markdown", "json", "html", "model-explorer")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("target", metavar="TARGET", help=f"{TARGET}, or plan.json")
    parser.add_argument("--policy", help=POLICY)
    add_device(parser)
    parser.add_argument("--nodes", action="store_true", help="list every node, with its reason and your line")
    parser.add_argument("--lines", action="store_true", help="list the ten lines of your code that cost most")
    parser.add_argument("--edits", action="store_true", help="show how often each rule of the passes fired")
    parser.add_argument("--depth", type=levels, metavar="N", help="show N levels of modules")
    for name, what in (("module", "PATH"), ("op", "NAME"), ("colour", "DTYPE"), ("reason", "CODE")):
        parser.add_argument(f"--{name}", metavar=what, action="append", default=[], help=f"only nodes of this {name}")
    parser.add_argument(
        "--print-after", metavar="PASS", action="append", default=[],
        help="write every graph after a pass to standard error; PASS is its name, such as insert-casts",
    )  # fmt: skip
    parser.add_argument("--save-plan", metavar="FILE", type=Path, help="also save the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    """Report on a target or a saved plan."""
    from passes import NAMES, watched
    from passes.contract.plan import Plan
    from passes.contract.policy import nearest

    from ..report.reader import model_name, with_totals
    from ..report.report import Report, report
    from .printed import Printed
    from .target import converted

    unknown = [name for name in args.print_after if name not in NAMES]
    if unknown:
        raise UsageError(f"--print-after: there is no pass {unknown[0]!r}{nearest(unknown[0], NAMES)}; {list(NAMES)}")
    saves = None if args.save_plan is None else os.path.abspath(args.save_plan)
    if args.target.endswith(".json"):
        for option, given in (("--policy", args.policy or args.device), ("--print-after", args.print_after)):
            if given:
                raise UsageError(
                    f"{args.target!r} is a saved plan, with a policy of its own and its passes done; leave out {option}"
                )
        plan = Plan.load(args.target)
        made = report(plan)
    else:
        # Standard output is for the report alone.
        printed = [] if args.quiet else [Printed(name, to_stderr) for name in dict.fromkeys(args.print_after)]
        with aside(), waiting(args, f"converting {args.target}"), watched(*printed):
            module = converted(args.target, args.policy, args.device)
            plan, record = with_totals(module)
            made = Report(replace(plan, totals={}), (), record, model_name(module))
    if saves is not None:
        plan.save(saves)
    only = {"modules": args.module, "ops": args.op, "colours": args.colour, "reasons": args.reason}
    made.record.chosen(**only)  # what matches nothing is an error in every format
    shown = functools.partial(
        made.to_tree, depth=args.depth, nodes=args.nodes, lines=args.lines, edits=args.edits, **only
    )
    write(
        args, text=lambda: shown(width=width(args)), markdown=lambda: shown(style="pipe"), json=made.to_json,
        html=lambda: made.to_html(**only), model_explorer=lambda: made.to_model_explorer(**only),
    )  # fmt: skip
    return DONE
