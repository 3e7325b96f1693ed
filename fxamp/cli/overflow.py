"""`fxamp overflow TARGET`: the first op of a step that makes inf or NaN, and what cures it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from .output import DONE, FOUND, aside, waiting, write
from .usage import above_zero, add_step

SUMMARY = "Run one step and name the first op that makes inf or NaN; exit with 1 if there is one."
FORMATS = ("text", "json")
_DEFAULT = "O1,dtype=fp16"  # BF16 has the range of FP32


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_step(parser)
    parser.add_argument("--policy", help=f'"{_DEFAULT}" (the default), "autocast,dtype=fp16" or "FP32" (as it is)')
    parser.add_argument("--scale", metavar="NUMBER", type=above_zero, help="the loss scale; else a TrainStep's, or 1")


def run(args: argparse.Namespace) -> int:
    """Look for an overflow."""
    from .. import find_overflow
    from .target import step_asked, under

    with aside(), waiting(args, f"running {args.target}"):  # standard output is for the answer alone
        given, options = step_asked(args, "overflow")
        with under(given, args.policy, _DEFAULT) as (model, _):
            found = find_overflow(model, **options, scale=args.scale)
    data: Any = None if found is None else asdict(found)
    write(
        args, text=lambda: str(found or "no overflow: the loss and all gradients are finite"),
        json=lambda: json.dumps(data, indent=1, sort_keys=True, default=str) + "\n",
    )  # fmt: skip
    return DONE if found is None else FOUND
