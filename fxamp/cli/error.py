"""`fxamp error TARGET`: the errors of policies, predicted from steps in FP32, or measured against float64."""

from __future__ import annotations

import argparse
from typing import Any

from .output import DONE, FOUND, aside, to_stderr, waiting, write
from .usage import UsageError, above_zero, add_step

SUMMARY = "Predict or measure the error of loss and gradients; exit with 1 if one is above the tolerance."
FORMATS = ("text", "markdown", "json")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_step(parser)
    parser.add_argument("--measure", action="store_true", help="measure with the real kernels, instead of predicting")
    parser.add_argument(
        "--policy", action="append", default=[], help='such as "O2,dtype=bf16"; may be given several times'
    )
    parser.add_argument(
        "--tolerance", metavar="NUMBER", type=above_zero,
        help="the largest relative error of gradients, RMS over parameters, such as 0.02",
    )  # fmt: skip
    parser.add_argument(
        "--gradients", choices=("yes", "no", "nodes"),
        help="whether to predict errors of gradients; with nodes, also which nodes they come from",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Predict or measure errors."""
    from .. import estimate_error, measure_error
    from .target import step_asked

    if args.gradients is not None and args.measure:
        raise UsageError("error: --gradients is for a prediction; leave out --measure")
    if args.gradients == "no" and args.tolerance is not None:
        raise UsageError("error: --tolerance is on errors of gradients; leave out --gradients no")
    more: dict[str, Any] = {"policies": args.policy} if args.policy else {}
    if args.gradients is not None:
        more["gradients"] = {"yes": True, "no": False, "nodes": "nodes"}[args.gradients]
    with aside(), waiting(args, f"running {args.target}"):  # standard output is for the errors alone
        model, options = step_asked(args, "error")
        found = (measure_error if args.measure else estimate_error)(model, **options, **more)
    write(args, text=lambda: str(found), markdown=found.to_markdown, json=found.to_json)
    beyond = () if args.tolerance is None else found.beyond(args.tolerance)
    for policy in beyond:
        error = f"{found[policy].per_parameter:.2g}"
        to_stderr(f"fxamp: {policy}: an error per parameter of {error} is above --tolerance {args.tolerance:g}\n")
    return FOUND if beyond else DONE
