"""The command-line arguments of each subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from passes import NAMES
from passes.contract.devices import DEVICES
from passes.contract.errors import FxampError
from passes.contract.plan import installed

Run: TypeAlias = Callable[[argparse.Namespace], int]  # returns the exit status


def _add_device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", choices=tuple(DEVICES), help="decide for this device, even if this machine has none")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give one from 1 to 999")
    return int(text)


def _levels(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of levels: give 0, 1, 2, ...")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: give a relative error above 0, such as 0.02")
    return value


class Parser(argparse.ArgumentParser):
    """Raise usage errors as fxamp's own, so that they print as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise FxampError(f"{message}; see `{self.prog} --help`")


def parser_of(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """Return the parser; the namespace that it parses has `run`, the function of the subcommand.

    Args:
        runs: the function of each verb.
    """
    parser = Parser(prog="fxamp", description="Automatic mixed precision for PyTorch as a compiler pass.")
    parser.add_argument("--version", action="version", version=f"fxamp {installed() or '(not installed)'}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(
        name: str, summary: str,
        formats: Sequence[str] = ("text", "markdown", "json"),
    ) -> argparse.ArgumentParser:  # fmt: skip
        made = verbs.add_parser(name, help=summary, description=summary)
        made.set_defaults(run=runs[name])
        made.add_argument("--output-format", choices=formats, default="text")
        made.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of printing")
        made.add_argument("-q", "--quiet", action="store_true", help="print nothing; only set the exit status")
        made.add_argument("--exit-zero", action="store_true", help="exit with status 0 instead of 1")
        return made

    report = verb(
        "report", "Show the dtype of every node, and the reason.",
        formats=("text", "markdown", "json", "html", "model-explorer"),
    )  # fmt: skip
    report.add_argument("target", metavar="TARGET", help="package.module:callable, path/file.py:callable or plan.json")
    report.add_argument("--policy", help='such as "O1" or "O2,dtype=bf16,modules.fc3=fp32"')
    _add_device(report)
    report.add_argument("--nodes", action="store_true", help="list every node, with its reason and your line")
    report.add_argument("--lines", action="store_true", help="list the ten lines of your code that cost most")
    report.add_argument("--edits", action="store_true", help="show how often each rule of the passes fired")
    report.add_argument("--depth", type=_levels, metavar="N", help="show N levels of modules")
    for name, what in (("module", "PATH"), ("op", "NAME"), ("colour", "DTYPE"), ("reason", "CODE")):
        report.add_argument(f"--{name}", metavar=what, action="append", default=[], help=f"only nodes of this {name}")
    report.add_argument(
        "--print-after", metavar="PASS", action="append", default=[], choices=NAMES,
        help=f"write every graph after a pass to standard error; PASS is one of {', '.join(NAMES)}",
    )  # fmt: skip
    report.add_argument("--save-plan", metavar="FILE", type=Path, help="also save the plan, as JSON")

    diff = verb(
        "diff", "Show the differences between two plans or models; exit with 1 if they differ.",
        formats=("text", "markdown", "json", "html"),
    )  # fmt: skip
    diff.add_argument("before", metavar="A", help="plan.json, package.module:callable or path/file.py:callable")
    diff.add_argument("after", metavar="B", nargs="?", help="like A; without B, A is compared under two policies")
    diff.add_argument(
        "--policy", action="append", default=[], help="the policy of A and B; if given twice, first of A, then of B"
    )
    _add_device(diff)

    check = verb(
        "check", "Compare models with their committed plans and budgets; exit with 1 on a difference.",
        formats=("text", "markdown", "json", "github", "junit", "sarif"),
    )  # fmt: skip
    check.add_argument(
        "targets", metavar="TARGET", nargs="*",
        help="package.module:callable, path/file.py:callable, or names of [tool.fxamp.targets]; default: all",
    )  # fmt: skip
    check.add_argument("--policy", help='such as "O1" or "O2,dtype=bf16,modules.fc3=fp32"')
    check.add_argument("--plan", metavar="FILE", help="the committed plan")
    check.add_argument("--update", action="store_true", help="write plans that are missing or have changed")
    check.add_argument("--budget", metavar="KEY=LIMIT", action="append", default=[], help='such as "casts=+0"')
    check.add_argument(
        "--run", action="store_true", dest="runs",
        help="run one step of TARGET, and compare what ran with what was planned; it may return (TrainStep, batch)",
    )  # fmt: skip
    check.add_argument("--jobs", metavar="N", type=_positive, default=1, help="how many targets to check at once")
    check.add_argument("--name", help=argparse.SUPPRESS)

    _add_device(check)

    verify = verb("verify", "Measure the error of loss and gradients; exit with 1 if one is above the tolerance.")
    verify.add_argument(
        "--policy", action="append", default=[], help='such as "O2,dtype=bf16"; may be given several times'
    )
    verify.add_argument(
        "--tolerance", metavar="NUMBER", type=_tolerance,
        help="the largest relative error of gradients, RMS over parameters, such as 0.02",
    )  # fmt: skip

    advise = verb("advise", "Measure FP32, autocast, O1, O2, O3 and a tuned plan here, and say which to train with.")
    for made in (verify, advise):
        made.add_argument(
            "target", metavar="TARGET",
            help="package.module:callable or path/file.py:callable, which returns (model, args) or (TrainStep, batch)",
        )  # fmt: skip
    advise.add_argument("--dtype", choices=("fp16", "bf16"), help="the low dtype; by default that of the device")

    rules = verb("rules", "Show the op table, or the row of one op.")
    rules.add_argument("op", metavar="OP", nargs="?", help="canonical name, such as softmax")

    verb("demo", "Show a census, a plan, a changed line that fails the gate, and the casts of a step.")
    return parser
