"""What the scripts of trial have in common: options of a run that goes on where its record ends, and its report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


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


def write(folder: Path, name: str, data: dict[str, Any], text: str) -> None:
    """Write a report as `name.json` and `name.md`, and print it."""
    folder.joinpath(f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    folder.joinpath(f"{name}.md").write_text(text)
    sys.stdout.write(text)
