"""The command: `fxamp report | diff | check | rules | demo`.

Exit status of every verb: 0 done and nothing found, 1 found, 2 could not tell.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from tabulate import tabulate

from passes.contract.devices import DEVICES
from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import Plan, write_text
from passes.contract.policy import Policy, nearest

from ..report.forms import harmless
from .waiting import waiting

if TYPE_CHECKING:
    from ..module.module import ConvertedModule
    from ..report.gate.gate import Outcome
    from ..report.gate.targets import Target

logger = logging.getLogger(__name__)

DONE, FOUND, UNKNOWN = 0, 1, 2
TARGET_FORM = "TARGET is package.module:callable or path/file.py:callable, looked up from the current directory"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        # --help and --version leave this way.
        return int(stop.code or 0)
    except FxampError as error:
        return _failed(str(error))
    # A target may import more of its own when it is called, so the path stays until the verb is done.
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        status: int = args.run(args)
    except FxampError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Python would leave with 1, which means "found", and a model that exits with what it likes.
        logger.debug("unexpected", exc_info=True)
        return _failed(f"unexpected {type(error).__name__}: {error}; please report it")
    finally:
        sys.path[:] = path
    return DONE if args.exit_zero and status == FOUND else status


def load_target(target: str) -> tuple[object, object, object]:
    """Import `package.module:callable` or `path/file.py:callable`, call it, and return (model, args, kwargs)."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise FxampError(f"{target!r} is not a target; {TARGET_FORM}")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except KeyboardInterrupt:
        raise
    # A module that calls sys.exit would choose our exit status, and other exceptions than Exception leave a traceback.
    except BaseException as error:
        raise FxampError(f"cannot import {where!r} ({type(error).__name__}: {error}); {TARGET_FORM}") from error
    build = getattr(module, name, None)
    if not callable(build):
        problem = "has no" if build is None else "holds something that cannot be called under"
        near = nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise FxampError(f"{where!r} {problem} {name!r}{near}; {TARGET_FORM}")
    try:
        made = build()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FxampError(
            f"{target!r} raised {type(error).__name__}: {error}; it is called without arguments"
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise FxampError(
            f"{target!r} returned {len(parts)} things; return model, (model, args) or (model, args, kwargs)"
        )
    model, args, kwargs = (*parts, None, None)[:3]
    return model, args, kwargs


def _report(args: argparse.Namespace) -> int:
    from ..report.gate.gate import with_totals
    from ..report.report import Report, report

    if args.target.endswith(".json"):
        if args.policy or args.device:
            raise PolicyError(f"{args.target!r} is a saved plan and has its own policy; leave out --policy")
        plan = Plan.load(args.target)
        made = report(plan)
    else:
        # Standard output is the report's.
        with _aside(), _waiting(args, f"converting {args.target}"):
            module = _converted(args.target, args.policy, args.capture, args.device)
            plan, record = with_totals(module)
            made = Report(module.plan, record=record, model=module.original)
    if args.save_plan:
        plan.save(args.save_plan)
    only = {"modules": args.module, "ops": args.op, "colours": args.colour, "reasons": args.reason}
    shown = functools.partial(made.to_tree, depth=args.depth, nodes=args.nodes, width=_width(args), **only)
    if args.output_format == "model-explorer":
        _write_pair(args, *made.to_model_explorer(**only))
        return DONE
    _write(
        args, text=shown, markdown=lambda: shown(style="pipe", width=None), json=made.to_json,
        html=lambda: made.to_html(**only), dot=lambda: made.to_dot(**only),
    )  # fmt: skip
    return DONE


def _diff(args: argparse.Namespace) -> int:
    from ..report.diff.diff import diff
    from ..report.diff.listing import coloured

    with _aside():  # standard output is the difference's
        made = diff(*_sides(args))
    _write(args, coloured, text=lambda: str(made), markdown=made.to_markdown, json=made.to_json, html=made.to_html)
    return FOUND if made else DONE


def _sides(args: argparse.Namespace) -> list[Path | ConvertedModule]:
    """Return the two things to compare: saved plans, or targets converted, one of them by two policies."""
    if len(args.policy) > 2:
        raise PolicyError("diff: two --policy are enough, one for each side")
    names = [args.before, args.after] if args.after is not None else [args.before]
    targets = {name for name in names if not name.endswith(".json") and name.rpartition(":")[0]}
    if len(names) == 1 and (len(args.policy) != 2 or not targets):
        raise FxampError(
            "the following arguments are required: B; see `fxamp diff --help` (or give one TARGET and two --policy)"
        )
    policies = args.policy if len(args.policy) == 2 else [*args.policy, None][:1] * 2
    names = names * 2 if len(names) == 1 else names
    for name, policy in zip(names, policies, strict=True):
        if policy is not None and name not in targets and (len(args.policy) == 2 or not targets):
            raise PolicyError(f"{name!r} is a saved plan and has its own policy; leave out --policy")
    asked = [Policy.of(policy) for policy in policies]
    made = {name: load_target(name) for name in dict.fromkeys(names) if name in targets}
    return [
        _read(made[name], policy, args.capture, args.device) if name in made else Path(name)
        for name, policy in zip(names, asked, strict=True)
    ]  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    from ..report.gate import outcomes as shown
    from ..report.gate.gate import UNKNOWN as COULD_NOT_TELL
    from ..report.gate.junit import to_junit
    from ..report.gate.sarif import to_sarif
    from ..report.gate.targets import Target, configured, find_pyproject, run_alone

    if args.targets and all(":" in target for target in args.targets):
        folder = Path.cwd()
        chosen = [
            Target(args.name or t, t, args.policy, args.plan, tuple(args.budget), args.capture, args.device)
            for t in args.targets
        ]
        if args.plan is None and not args.budget:
            raise FxampError("check: there is nothing to check by; give --plan FILE, --budget KEY=LIMIT, or both")
        if args.plan is not None and len(chosen) > 1:
            raise FxampError("check: one --plan is the plan of one TARGET; give several of them in pyproject.toml")
    else:
        file = find_pyproject(Path.cwd())
        folder, chosen = file.parent, configured(file, args.targets)
        if args.policy or args.plan or args.budget:
            raise FxampError(f"check: targets of {file.name} have their policy, plan and budget there")
    if args.targets and len(chosen) == 1 and ":" in args.targets[0]:
        with _waiting(args, f"checking {chosen[0].name}"):
            found = [_checked(chosen[0], args.update)]
    else:
        many = f"{len(chosen)} targets" if len(chosen) != 1 else chosen[0].name
        with _waiting(args, f"checking {many}"), ThreadPoolExecutor(args.jobs) as pool:
            found = list(pool.map(lambda target: run_alone(target, folder, args.update), chosen))
    _write(
        args, text=lambda: shown.to_text(found), markdown=lambda: shown.to_markdown(found),
        json=lambda: shown.to_json(found), github=lambda: shown.to_github(found), junit=lambda: to_junit(found),
        sarif=lambda: to_sarif(found),
    )  # fmt: skip
    for outcome in found:
        if outcome.status == COULD_NOT_TELL:
            _failed(outcome.message)
    return max(outcome.status for outcome in found)


def _checked(target: Target, update: bool) -> Outcome:
    """Check one target in this process."""
    from ..report.gate.budget import Budget
    from ..report.gate.gate import check

    budgets = [Budget.parse(text) for text in target.budgets]
    with _aside():  # standard output is the outcome's
        module = _converted(target.target, target.policy, target.capture, target.device)
        return check(target.name, module, target.plan, budgets, update)


def _converted(target: str, policy: str | None, capture: str, device: str | None) -> ConvertedModule:
    asked = Policy.of(policy)
    return _read(load_target(target), asked, capture, device)


def _read(made: tuple[object, object, object], policy: Policy, capture: str, device: str | None) -> ConvertedModule:
    from ..convert import to_read

    model, args, kwargs = made
    asked = policy if device is None else replace(policy, device=device)
    return to_read(model, args, kwargs, asked, capture)  # type: ignore[arg-type]  # it says what a model is not


def _rules(args: argparse.Namespace) -> int:
    from passes.ops.rules import RULES, SUMMARY

    if args.op is not None and args.op not in RULES:
        raise FxampError(f"no rule for the op {args.op!r}{nearest(args.op, RULES)}")
    rows = [asdict(RULES[name]) for name in ([args.op] if args.op else sorted(RULES))]
    # A table of one op reads better upright, and of many with only the columns that any of them fills.
    columns = [name for name in rows[0] if (args.op or name in SUMMARY) and any(row[name] for row in rows)]
    table = [[_cell(row[name]) for name in columns] for row in rows]
    headers: Sequence[str] = columns
    if args.op:
        table, headers = [[name, cell] for name, cell in zip(columns, table[0], strict=True)], ("fact", "value")
    _write(
        args,
        text=lambda: tabulate(table, headers, "simple", disable_numparse=True),
        markdown=lambda: tabulate(table, headers, "pipe", disable_numparse=True),
        json=lambda: json.dumps(rows, indent=1, sort_keys=True, default=_plain) + "\n",
    )
    return DONE


def _demo(args: argparse.Namespace) -> int:
    try:
        from ..demo import run
    except ModuleNotFoundError as error:
        raise FxampError(f"the demo needs {error.name!r}; install it with: pip install 'fxamp[demo]'") from error
    with contextlib.redirect_stdout(io.StringIO()) if args.quiet else contextlib.nullcontext():
        run(seeds=args.seeds, output=args.output)
    return DONE


def _import_file(path: Path) -> ModuleType:
    # A file named as a module that is there already must not take its place.
    name = path.stem if path.stem not in sys.modules else f"_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FxampError(f"cannot import {str(path)!r}; {TARGET_FORM}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Let what a model prints go to standard error, what C and child processes print too."""
    sys.stdout.flush()
    try:
        out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        kept = os.dup(out)
    except (AttributeError, OSError, ValueError):  # there is no terminal and no file behind them
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    os.dup2(err, out)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, out)
        os.close(kept)


def _write(args: argparse.Namespace, paint: Callable[[str], str] = str, **formats: Callable[[], str]) -> None:
    """Write one of the formats to the file asked for, or to standard output, where a terminal may have colours."""
    # What escapes what it is given by itself is left as it is. Workflow commands begin as no other line may.
    own: dict[str, Callable[[str], str]] = {"json": harmless.as_json, "sarif": harmless.as_json}
    own |= dict.fromkeys(("github", "html", "junit"), str)
    shown = own.get(args.output_format, harmless.lines)
    if args.quiet and args.output is None:
        return
    text = shown(formats[args.output_format]().rstrip("\n")) + "\n"
    if args.output is not None:
        write_text(args.output, text)
        return
    try:
        sys.stdout.write(paint(text) if args.output_format == "text" and _has_colours() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python flushes once more at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _waiting(args: argparse.Namespace, what: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if args.quiet else waiting(what, sys.stderr)


def _width(args: argparse.Namespace) -> int | None:
    """Return how wide the terminal is that is written to; None for a file or a pipe, which take any width."""
    return shutil.get_terminal_size().columns if args.output is None and sys.stdout.isatty() else None


def _write_pair(args: argparse.Namespace, graph: str, data: str) -> None:
    """Write a graph to the file asked for, and the data of its nodes beside it."""
    if args.output is None:
        raise FxampError("model-explorer: there are two files, a graph and the data of its nodes; give -o FILE.json")
    beside = args.output.with_name(f"{args.output.stem}.node_data.json")
    write_text(args.output, harmless.as_json(graph))
    write_text(beside, harmless.as_json(data))


def _failed(message: str) -> int:
    sys.stderr.write(f"fxamp: error: {harmless.visible(' '.join(message.split()))}\n")
    return UNKNOWN


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value)))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: object) -> list[str] | str:
    """Give JSON what it has no form for: a set in a fixed order, anything else as text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _add_capture(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--capture", choices=("auto", "fx", "export"), default="auto", help="front end")
    verb.add_argument("--device", choices=tuple(DEVICES), help="decide for it, whether it is here or not")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Raise usage errors as fxamp's own, so that they print as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise FxampError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fxamp", description="Automatic mixed precision for PyTorch as a compiler pass.")
    parser.add_argument("--version", action="version", version=f"fxamp {_version()}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], summary: str,
        formats: Sequence[str] = ("text", "markdown", "json"),
    ) -> argparse.ArgumentParser:  # fmt: skip
        made = verbs.add_parser(name, help=summary, description=summary)
        made.set_defaults(run=run)
        made.add_argument("--output-format", choices=formats, default="text")
        made.add_argument("-o", "--output", metavar="FILE", type=Path, help="write there instead of printing")
        made.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit status says it")
        made.add_argument("--exit-zero", action="store_true", help="exit with 0 where it would be 1")
        return made

    report = verb(
        "report", _report, "Show in which dtype every node runs, and why.",
        formats=("text", "markdown", "json", "html", "dot", "model-explorer"),
    )  # fmt: skip
    report.add_argument("target", metavar="TARGET", help="package.module:callable, path/file.py:callable or plan.json")
    report.add_argument("--policy", help='such as "O1" or "O2,dtype=bf16,modules.fc3=fp32"')
    _add_capture(report)
    report.add_argument("--nodes", action="store_true", help="list every node, with its reason and the line it is from")
    report.add_argument("--depth", type=int, metavar="N", help="show N levels of modules")
    for name, what in (("module", "PATH"), ("op", "NAME"), ("colour", "DTYPE"), ("reason", "CODE")):
        report.add_argument(f"--{name}", metavar=what, action="append", default=[], help=f"only this {name}")
    report.add_argument("--save-plan", metavar="FILE", type=Path, help="save the plan as JSON too")

    diff = verb(
        "diff", _diff, "Show what differs between two plans or models; exit with 1 when they differ.",
        formats=("text", "markdown", "json", "html"),
    )  # fmt: skip
    diff.add_argument("before", metavar="A", help="plan.json, package.module:callable or path/file.py:callable")
    diff.add_argument("after", metavar="B", nargs="?", help="likewise; left out, A is compared under two policies")
    diff.add_argument("--policy", action="append", default=[], help="of A and B; given twice, of A, then of B")
    _add_capture(diff)

    check = verb(
        "check", _check, "Compare models with their committed plans and budgets; exit with 1 on a difference.",
        formats=("text", "markdown", "json", "github", "junit", "sarif"),
    )  # fmt: skip
    check.add_argument(
        "targets", metavar="TARGET", nargs="*",
        help="package.module:callable, path/file.py:callable, or names of [tool.fxamp.targets]; else all of those",
    )  # fmt: skip
    check.add_argument("--policy", help='such as "O1" or "O2,dtype=bf16,modules.fc3=fp32"')
    check.add_argument("--plan", metavar="FILE", help="the committed plan")
    check.add_argument("--update", action="store_true", help="write plans that are missing or have changed")
    check.add_argument("--budget", metavar="KEY=LIMIT", action="append", default=[], help='such as "casts=+0"')
    check.add_argument("--jobs", metavar="N", type=_positive, default=1, help="targets to check at once")
    check.add_argument("--name", help=argparse.SUPPRESS)
    _add_capture(check)

    rules = verb("rules", _rules, "Show the op table, or what is known of one op.")
    rules.add_argument("op", metavar="OP", nargs="?", help="canonical name, such as softmax")

    demo = verb("demo", _demo, "Train two small models on digits in FP32, under autocast and with fxamp.")
    demo.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to average over")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("fxamp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
