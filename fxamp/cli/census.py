"""`fxamp census TARGET`: what ran in one step, in which dtype, under autocast or as planned."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from .output import DONE, FOUND, aside, waiting, write, write_file
from .usage import add_step

SUMMARY = "Run one step and show what ran in which dtype; exit with 1 where a view did not run as planned."
FORMATS = ("text", "json")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_step(parser, batches=False)
    parser.add_argument("--policy", help='"autocast" (the default), "autocast,dtype=fp16", "O1" or "FP32" (as it is)')
    parser.add_argument(
        "--save", metavar="FILE", type=Path, help="also save it as JSON, for `fxamp check --census FILE`"
    )


def run(args: argparse.Namespace) -> int:
    """Take a census."""
    from .. import census
    from .target import AUTOCAST, step_asked, under

    saves = None if args.save is None else Path(os.path.abspath(args.save))
    with aside(), waiting(args, f"running {args.target}"):  # standard output is for the census alone
        given, options = step_asked(args, "census")
        with under(given, args.policy, AUTOCAST) as (model, note):
            found = census(model, **options)
        found = replace(found, notes=(*([note] if note else []), *found.notes))
    if saves is not None:
        write_file(saves, found.to_json())
    write(args, text=lambda: str(found), json=found.to_json)
    return FOUND if found.planned is not None and found.differences else DONE
