"""The command line: the arguments of each verb, which lie in the file of the verb, and what verbs share.

Nothing here, and nothing at the top of a verb's file, imports torch: `fxamp --help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

TARGET = "package.module:callable or path/file.py:callable"
RETURNS = f"{TARGET}, which returns (model, args), (model, args, kwargs) or (TrainStep, batch)"
POLICY = 'such as "O1" or "O2,dtype=bf16,modules.fc3=fp32"'


class UsageError(Exception):
    """The command line or its configuration is not as it should be; main prints it as one line."""


class Verb(Protocol):
    """A module of this package that is a verb."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802  (a constant of the module)
        """What it does, in a line."""

    @property
    def FORMATS(self) -> Sequence[str]:  # noqa: N802
        """The formats that it writes."""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the verb."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit status."""


class Parser(argparse.ArgumentParser):
    """Raise usage errors as fxamp's own, so that they print as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


class Version(argparse.Action):
    """Print the version that is installed; to look it up takes time that no other verb needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and leave."""
        import importlib.metadata

        try:
            version = importlib.metadata.version("fxamp")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        sys.stdout.write(f"fxamp {version}\n")
        parser.exit()


def parser_of(verbs: Collection[tuple[str, Verb]]) -> Parser:
    """Return the parser; the namespace that it parses has `run`, the function of the verb."""
    parser = Parser(prog="fxamp", description="Mixed precision for PyTorch that can be read, compared and gated.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    every = {form for _, verb in verbs for form in verb.FORMATS}
    for name, verb in verbs:
        made = subparsers.add_parser(name, help=verb.SUMMARY, description=verb.SUMMARY)
        made.set_defaults(run=verb.run, verb=name, formats=verb.FORMATS, every_format=every)
        made.add_argument("--output-format", choices=verb.FORMATS, default="text")
        made.add_argument("-o", dest="file", metavar="FILE", type=Path, help="write to FILE instead of printing")
        made.add_argument(
            "--output", metavar="[FORMAT=]FILE", action="append", default=[],
            help=f"also with a format, as {verb.FORMATS[-1]}=FILE; FORMAT alone prints; may be given several times",
        )  # fmt: skip
        made.add_argument("-q", "--quiet", action="store_true", help="print nothing; only set the exit status")
        made.add_argument("--exit-zero", action="store_true", help="exit with status 0 instead of 1")
        verb.arguments(made)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, which is read where torch is."""
    parser.add_argument("--device", metavar="NAME", help="decide for this device, such as cuda, be it here or not")


def add_step(parser: argparse.ArgumentParser, *, batches: bool = True) -> None:
    """Add what each diagnostic takes: a target, a loss, and batches."""
    parser.add_argument("target", metavar="TARGET", help=RETURNS)
    parser.add_argument("--loss", metavar="TARGET", help="a function of the output, or of output and target")
    if batches:
        parser.add_argument(
            "--batches", metavar="TARGET", help="a function that returns batches: inputs, or (inputs, target)"
        )


def positive(text: str) -> int:
    """Read a number of processes."""
    if not text.isdecimal() or not 0 < int(text) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give one from 1 to 999")
    return int(text)


def levels(text: str) -> int:
    """Read a number of levels."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of levels: give 0, 1, 2, ...")
    return int(text)


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0, such as 0.02")
    return value


def tolerance(text: str) -> float | str:
    """Read a relative error, or whose error it is."""
    return text if text == "autocast" else above_zero(text)
