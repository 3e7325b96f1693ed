"""`fxamp demo`: all of it in twenty seconds, on a model of fxamp's own."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

from .output import DONE, require_replaceable

SUMMARY = "Show a census, a plan, a changed line that fails the gate, and the casts of a step."
FORMATS = ("text",)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace) -> int:
    """Run the demo, and write it as Markdown too."""
    from ..demo import run

    file = args.outputs[0].file or Path("fxamp-demo.md")
    require_replaceable(file)
    with contextlib.redirect_stdout(io.StringIO()) if args.quiet else contextlib.nullcontext():
        run(output=file)
    return DONE
