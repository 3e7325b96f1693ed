"""`fxamp demo`: all of it in twenty seconds, on a model of fxamp's own."""

from __future__ import annotations

import argparse
import contextlib
import io

from .output import DONE

SUMMARY = "Show a census, a plan, a changed line that fails the gate, and the casts of a step."
FORMATS = ("text",)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace) -> int:
    """Run the demo, and write it as Markdown too."""
    from ..demo import run

    with contextlib.redirect_stdout(io.StringIO()) if args.quiet else contextlib.nullcontext():
        run(output=args.outputs[0].file)
    return DONE
