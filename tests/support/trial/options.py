"""Options of a script of trial, whose run goes on where its record ends."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser, record: Path, output: Path) -> None:
    """Add how long to run, what of the record to run anew, and where to write.

    Args:
        parser: of a script.
        record: its record, unless another is given.
        output: the folder of its report, likewise.
    """
    parser.add_argument("--seconds", type=float, help="end after so long")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--again", choices=("failed", "outdated"), help="run these of the record anew")
    parser.add_argument("--record", type=Path, default=record, help="where to note what was run (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=output, metavar="FOLDER", help="where to write")
