"""`fxamp diff A B`: what differs between two plans or models, or of one model under two policies."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .output import DONE, FOUND, aside, coloured, write
from .usage import TARGET, UsageError, add_device

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "Show the differences between two plans or models; exit with 1 if they differ."
FORMATS = ("text", "markdown", "json", "html")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("before", metavar="A", help=f"plan.json, {TARGET}")
    parser.add_argument("after", metavar="B", nargs="?", help="like A; without B, A is compared under two policies")
    parser.add_argument(
        "--policy", action="append", default=[], help="the policy of A and B; if given twice, first of A, then of B"
    )
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two things."""
    from ..report.diff.diff import diff

    with aside():  # standard output is for the difference alone
        made = diff(*_sides(args))
    write(args, coloured, text=lambda: str(made), markdown=made.to_markdown, json=made.to_json, html=made.to_html)
    return FOUND if made else DONE


def _sides(args: argparse.Namespace) -> list[Path | nn.Module]:
    """Return the two things to compare: saved plans, or targets converted, one of them by two policies."""
    from passes.contract.policy import Policy

    from ..target import load_target
    from .target import read

    if len(args.policy) > 2:
        raise UsageError("diff: give --policy at most twice, once for each side")
    names = [args.before, args.after] if args.after is not None else [args.before]
    targets = {name for name in names if not name.endswith(".json") and name.rpartition(":")[0]}
    if len(names) == 1 and (len(args.policy) != 2 or not targets):
        raise UsageError(
            "the following arguments are required: B; see `fxamp diff --help` (or give one TARGET and two --policy)"
        )
    policies = args.policy if len(args.policy) == 2 else [*args.policy, None][:1] * 2
    names = names * 2 if len(names) == 1 else names
    _refuse_policies_of_plans(args, names, policies, targets)
    asked = [Policy.of(policy) for policy in policies]
    made = {name: load_target(name) for name in dict.fromkeys(names) if name in targets}
    return [
        read(made[name], policy, args.device) if name in made else Path(name)
        for name, policy in zip(names, asked, strict=True)
    ]


def _refuse_policies_of_plans(
    args: argparse.Namespace, names: Sequence[str], policies: Sequence[str | None], targets: Collection[str]
) -> None:
    """Refuse a --policy that would apply to a saved plan: the plan has its own."""
    for name, policy in zip(names, policies, strict=True):
        if policy is not None and name not in targets and (len(args.policy) == 2 or not targets):
            raise UsageError(f"{name!r} is a saved plan and has its own policy; leave out --policy")
