"""The command: `fxamp report | diff | check | verify | advise | rules | demo`.

Exit status of every subcommand: 0 success and no difference, 1 a difference was found, 2 an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from passes import watched
from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy, nearest

from ..errors import NoLossError
from ..target import load_target
from .output import DONE, FOUND, aside, coloured, failed, to_stderr, waiting, width, write, write_pair
from .printed import Printed
from .target import A_LOSS, run_target, step_of
from .usage import parser_of

if TYPE_CHECKING:
    from torch import nn

    from ..report.gate.gate import Outcome
    from ..report.gate.targets import Target

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    try:
        args = parser_of(VERBS).parse_args(argv)
    except SystemExit as stop:
        # --help and --version end with SystemExit.
        return int(stop.code or 0)
    except FxampError as error:
        return failed(str(error))
    # Before it raises what we report, torch 2.15 logs it as an error.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # A target may import more of its own when it is called, so the path stays until the verb is done.
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        status: int = args.run(args)
    except NoLossError as error:
        return failed(f"{error.found}; {A_LOSS}")
    except FxampError as error:
        return failed(str(error))
    except OSError as error:
        return failed(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Python would exit with 1, which means "found" here; a target that calls sys.exit could choose any status.
        logger.debug("unexpected", exc_info=True)
        return failed(_unexpected(error))
    finally:
        sys.path[:] = path
    return DONE if args.exit_zero and status == FOUND else status


def _unexpected(error: BaseException) -> str:
    """Return what to say of an error that no message is made for: code of the target has raised it, or ours has.

    It is the code that is furthest in, leaving torch and the standard library aside.
    """
    import torch

    import passes

    compiler, library, python = (os.path.join(os.path.dirname(str(m.__file__)), "") for m in (passes, torch, os))
    trace = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    code = [
        (file, line) for file, line in trace
        if not file.startswith(("<", library)) and (not file.startswith(python) or "site-packages" in file)
    ]  # fmt: skip
    file, line = (code or trace)[-1]
    what = f"{type(error).__name__} at {os.path.basename(file)}:{line}: {error}"
    if code and not file.startswith((os.path.join(Path(__file__).parents[1], ""), compiler)):
        return f"the code of the target raised {what}"
    return f"unexpected {what}; please report it"


def _report(args: argparse.Namespace) -> int:
    from ..report.reader import model_name, with_totals
    from ..report.report import Report, report

    if args.target.endswith(".json"):
        if args.policy or args.device:
            raise PolicyError(f"{args.target!r} is a saved plan and has its own policy; leave out --policy")
        if args.print_after:
            raise FxampError(f"{args.target!r} is a saved plan, on which no pass runs; leave out --print-after")
        plan = Plan.load(args.target)
        made = report(plan)
    else:
        # Standard output is for the report alone.
        printed = [] if args.quiet else [Printed(name, to_stderr) for name in dict.fromkeys(args.print_after)]
        with aside(), waiting(args, f"converting {args.target}"), watched(*printed):
            module = _converted(args.target, args.policy, args.device)
            plan, record = with_totals(module)
            made = Report(replace(plan, totals={}), (), record, model_name(module))
    if args.save_plan:
        plan.save(args.save_plan)
    only = {"modules": args.module, "ops": args.op, "colours": args.colour, "reasons": args.reason}
    made.record.chosen(**only)  # what matches nothing is an error in every format
    shown = functools.partial(
        made.to_tree, depth=args.depth, nodes=args.nodes, lines=args.lines, edits=args.edits, width=width(args), **only
    )
    if args.output_format == "model-explorer":
        write_pair(args, *made.to_model_explorer(**only))
        return DONE
    write(
        args, text=shown, markdown=lambda: shown(style="pipe", width=None), json=made.to_json,
        html=lambda: made.to_html(**only),
    )  # fmt: skip
    return DONE


def _diff(args: argparse.Namespace) -> int:
    from ..report.diff.diff import diff

    with aside():  # standard output is for the difference alone
        made = diff(*_sides(args))
    write(args, coloured, text=lambda: str(made), markdown=made.to_markdown, json=made.to_json, html=made.to_html)
    return FOUND if made else DONE


def _sides(args: argparse.Namespace) -> list[Path | nn.Module]:
    """Return the two things to compare: saved plans, or targets converted, one of them by two policies."""
    if len(args.policy) > 2:
        raise PolicyError("diff: give --policy at most twice, once for each side")
    names = [args.before, args.after] if args.after is not None else [args.before]
    targets = {name for name in names if not name.endswith(".json") and name.rpartition(":")[0]}
    if len(names) == 1 and (len(args.policy) != 2 or not targets):
        raise FxampError(
            "the following arguments are required: B; see `fxamp diff --help` (or give one TARGET and two --policy)"
        )
    policies = args.policy if len(args.policy) == 2 else [*args.policy, None][:1] * 2
    names = names * 2 if len(names) == 1 else names
    _refuse_policies_of_plans(args, names, policies, targets)
    asked = [Policy.of(policy) for policy in policies]
    made = {name: load_target(name) for name in dict.fromkeys(names) if name in targets}
    return [
        _read(made[name], policy, args.device) if name in made else Path(name)
        for name, policy in zip(names, asked, strict=True)
    ]


def _refuse_policies_of_plans(
    args: argparse.Namespace, names: Sequence[str], policies: Sequence[str | None], targets: Collection[str]
) -> None:
    """Refuse a --policy that would apply to a saved plan: the plan has its own."""
    for name, policy in zip(names, policies, strict=True):
        if policy is not None and name not in targets and (len(args.policy) == 2 or not targets):
            raise PolicyError(f"{name!r} is a saved plan and has its own policy; leave out --policy")


def _check(args: argparse.Namespace) -> int:
    from ..report.gate import outcomes as shown
    from ..report.gate.gate import UNKNOWN as COULD_NOT_TELL
    from ..report.gate.targets import Target, configured, find_pyproject, run_alone

    if args.targets and all(":" in target for target in args.targets):
        folder = Path.cwd()
        chosen = [
            Target(args.name or t, t, args.policy, args.plan, tuple(args.budget), args.device, args.runs)
            for t in args.targets
        ]
        if args.plan is None and not args.budget and not args.runs:
            raise FxampError(
                "check: there is nothing to compare with; give --plan FILE, --budget KEY=LIMIT, or both, or --run"
            )
        if args.plan is not None and len(chosen) > 1:
            raise FxampError(
                "check: --plan is the plan of a single TARGET; set those of several targets in pyproject.toml"
            )
    else:
        file = find_pyproject(Path.cwd())
        folder = file.parent
        chosen = [replace(target, run=target.run or args.runs) for target in configured(file, args.targets)]
        if args.policy or args.plan or args.budget:
            raise FxampError(f"check: set the policy, plan and budget of targets of {file.name} in that file")
    if args.targets and len(chosen) == 1 and ":" in args.targets[0]:
        with waiting(args, f"checking {chosen[0].name}"):
            found = [_checked(chosen[0], args.update)]
    else:
        many = f"{len(chosen)} targets" if len(chosen) != 1 else chosen[0].name
        with waiting(args, f"checking {many}"), ThreadPoolExecutor(args.jobs) as pool:
            found = list(pool.map(lambda target: run_alone(target, folder, args.update), chosen))
    write(
        args, text=lambda: shown.to_text(found), markdown=lambda: shown.to_markdown(found),
        json=lambda: shown.to_json(found), github=lambda: shown.to_github(found),
        junit=lambda: shown.to_junit(found), sarif=lambda: shown.to_sarif(found),
    )  # fmt: skip
    for outcome in found:
        if outcome.status == COULD_NOT_TELL:
            failed(outcome.message)
    return max(outcome.status for outcome in found)


def _checked(target: Target, update: bool) -> Outcome:
    """Check one target in this process."""
    from ..report.gate.budget import COUNTS, Budget
    from ..report.gate.gate import check, with_run

    budgets = [Budget.parse(text) for text in target.budgets]
    with aside():  # standard output is for the outcome alone
        counts = _counts(target) if any(budget.key in COUNTS for budget in budgets) else {}
        if not target.run:
            make = functools.partial(_converted, target.target, target.policy, target.device)
            return check(target.name, make, target.plan, budgets, update, counts)
        if target.device is not None:
            raise FxampError("check: --run runs the model where it is; leave out --device, or set it for the model")
        asked, made = Policy.of(target.policy), load_target(target.target)
        read, differences = run_target(made, asked, own=target.policy is None)

        def converted(replayed: Plan | None) -> nn.Module:
            return read if read is not None else _read(made, asked, None, replayed)

        return with_run(check(target.name, converted, target.plan, budgets, update, counts), differences)


def _counts(target: Target) -> dict[str, float]:
    """Count the kernels of a target, which Inductor compiles for it."""
    from ..report.gate.kernels import counts_of

    asked = Policy.of(target.policy)
    return counts_of(target.target, asked if target.device is None else replace(asked, device=target.device))


def _converted(target: str, policy: str | None, device: str | None, replayed: Plan | None = None) -> nn.Module:
    return _read(load_target(target), Policy.of(policy), device, replayed)


def _read(made: tuple[Any, Any, Any], policy: Policy, device: str | None, replayed: Plan | None = None) -> nn.Module:
    from ..convert import to_read

    asked = policy if device is None else replace(policy, device=device)
    view: nn.Module = to_read(*made, asked, replayed=replayed)
    return view


def _verify(args: argparse.Namespace) -> int:
    from ..error.measure import measure_error

    with aside(), waiting(args, f"measuring {args.target}"):  # standard output is for the errors alone
        made, inputs, target = step_of(load_target(args.target), "verify: a batch is needed")
        found = measure_error(made, inputs, target, policies=args.policy or None)
    write(args, text=lambda: str(found), markdown=found.to_markdown, json=found.to_json)
    beyond = () if args.tolerance is None else found.beyond(args.tolerance)
    for policy in beyond:
        error = f"{found[policy].per_parameter:.2g}"
        to_stderr(f"fxamp: {policy}: an error per parameter of {error} is above --tolerance {args.tolerance:g}\n")
    return FOUND if beyond else DONE


def _advise(args: argparse.Namespace) -> int:
    from ..choose.compare import compare

    with aside(), waiting(args, f"measuring {args.target}"):  # standard output is for the advice alone
        made, inputs, target = step_of(load_target(args.target), "advise: a batch is needed")
        found = compare(made, inputs, target, dtype=args.dtype)
    write(args, text=lambda: str(found), markdown=found.to_markdown, json=found.to_json)
    return DONE


def _rules(args: argparse.Namespace) -> int:
    from passes.ops.rules import RULES, SUMMARY

    if args.op is not None and args.op not in RULES:
        raise FxampError(f"no rule for the op {args.op!r}{nearest(args.op, RULES)}; `fxamp rules` lists all")
    rows = [RULES[name].columns() for name in ([args.op] if args.op else sorted(RULES))]
    # One op is shown as a list of its fields, many ops as a table without the columns that are empty for all.
    columns = [name for name in rows[0] if (args.op or name in SUMMARY) and any(row[name] for row in rows)]
    table = [[_cell(row[name]) for name in columns] for row in rows]
    headers: Sequence[str] = columns
    if args.op:
        table, headers = [[name, cell] for name, cell in zip(columns, table[0], strict=True)], ("fact", "value")
    write(
        args,
        text=lambda: tabulate(table, headers, "simple", disable_numparse=True),
        markdown=lambda: tabulate(table, headers, "pipe", disable_numparse=True),
        json=lambda: json.dumps(rows, indent=1, sort_keys=True, default=_plain) + "\n",
    )
    return DONE


def _demo(args: argparse.Namespace) -> int:
    from ..demo import run

    with contextlib.redirect_stdout(io.StringIO()) if args.quiet else contextlib.nullcontext():
        run(output=args.output)
    return DONE


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value)))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: object) -> list[str] | str:
    """Convert an object that JSON lacks: a set to a sorted list, anything else to text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


VERBS = {
    "report": _report, "diff": _diff, "check": _check, "verify": _verify, "advise": _advise, "rules": _rules,
    "demo": _demo,
}  # fmt: skip
