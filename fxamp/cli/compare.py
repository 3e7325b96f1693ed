"""`fxamp compare TARGET`: FP32, autocast, O1, O2, O3 and a tuned plan, timed and measured on this machine."""

from __future__ import annotations

import argparse

from .output import DONE, aside, waiting, write
from .usage import add_step

SUMMARY = "Measure FP32, autocast, O1, O2, O3 and a tuned plan here, and say which to train with."
FORMATS = ("text", "markdown", "json")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_step(parser)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), help="the low dtype; by default that of the device")


def run(args: argparse.Namespace) -> int:
    """Compare the options."""
    from .. import compare
    from .target import step_asked

    with aside(), waiting(args, f"measuring {args.target}"):  # standard output is for the comparison alone
        model, options = step_asked(args, "compare")
        found = compare(model, **options, dtype=args.dtype)
    write(args, text=lambda: str(found), markdown=found.to_markdown, json=found.to_json)
    return DONE
