"""Output of the verbs: results go to standard output or to files, messages to standard error."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .. import harmless
from .usage import UsageError

DONE, FOUND, UNKNOWN = 0, 1, 2  # exit statuses
PATIENCE = 2.0  # seconds
_COLOURS = {"+": "32", "-": "31", "!": "33", "@": "36", "=": "36"}  # of a line, by its first character
# What outputs are called; a file of another kind, as a source or a checkpoint, is nobody's to replace.
_REPLACEABLE = {"", ".github", ".htm", ".html", ".json", ".log", ".markdown", ".md", ".sarif", ".txt", ".xml"}
_FOR_PROGRAMS = ("json", "sarif", "html", "junit")  # the formats that say, or are by definition, UTF-8


@dataclass(frozen=True)
class Output:
    """One output that was asked for.

    Attributes:
        form: Its format.
        file: Where it goes, as an absolute path, since a target may change the directory; None for standard output.
    """

    form: str
    file: Path | None


def outputs_of(args: argparse.Namespace) -> list[Output]:
    """Return the outputs that were asked for, each to a place of its own.

    Raises:
        UsageError: Two of them go to one place, one goes nowhere, or one has a format that the verb does not write.
    """
    asked = [Output(args.output_format, _absolute(args.file))] if args.file else []
    for text in args.output:
        form, equals, file = text.partition("=")
        if form not in args.formats and equals and form in args.every_format:
            raise UsageError(
                f"--output {text}: {args.verb} has no {form}; its formats are {', '.join(args.formats)}. A file of "
                f"that name is --output=./{text}"
            )
        if form in args.formats and (equals or not file):
            asked.append(Output(form, _absolute(Path(file)) if file else None))
        else:
            asked.append(Output(args.output_format, _absolute(Path(text))))
    found = asked or [Output(args.output_format, None)]
    for at, one in enumerate(found):
        if one.file in [other.file for other in found[:at]]:
            where = "standard output" if one.file is None else str(one.file)
            raise UsageError(f"two outputs go to {where}: give each a file of its own, as --output FORMAT=FILE")
    for file in (*(one.file for one in found), getattr(args, "save_plan", None), getattr(args, "save", None)):
        if file is not None:  # a search of an hour is not refused at its end
            require_replaceable(file)
    if sys.stdout is None and not args.quiet and any(one.file is None for one in found):
        raise UsageError("standard output is closed: write to a file with -o FILE, or leave the output out with -q")
    return found


def _absolute(file: Path) -> Path:
    return Path(os.path.abspath(file))


class _Lent:
    """A stream that a target may write to, and may close, which ends nothing of ours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def close(self) -> None:
        """Leave it open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run what a target does: what it prints goes to standard error, also from C and from child processes.

    Afterwards the streams and the current directory are as they were, whatever the target did to them.
    """
    folder = os.getcwd()
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, folder)
        stack.enter_context(_descriptors())
        if (stream := sys.stderr) is not None:
            stack.enter_context(contextlib.redirect_stdout(_Lent(stream)))
            stack.enter_context(contextlib.redirect_stderr(_Lent(stream)))
        yield


@contextlib.contextmanager
def _descriptors() -> Iterator[None]:
    """Let descriptor 1 be standard error, and restore both."""
    kept: dict[int, int] = {}
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a standard stream has no file descriptor
        sys.stdout.flush()
        out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        kept = {out: os.dup(out), err: os.dup(err)}
        os.dup2(err, out)
    try:
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)


def write(
    args: argparse.Namespace, paint: Callable[[str], str] = str, **formats: Callable[[], str | tuple[str, str]]
) -> None:
    """Write each output that was asked for to its file, or to standard output, with colours on a terminal.

    A format is a function that gives its text; or a pair, a graph and the data of its nodes, as JSON.
    """
    # Formats that escape their own text are left as they are. In "github" the lines are workflow commands, which other
    # formats must not contain.
    own: dict[str, Callable[[str], str]] = {"json": harmless.as_json, "sarif": harmless.as_json}
    own |= dict.fromkeys(("github", "html", "junit"), str)
    for output in args.outputs:
        if output.file is None and args.quiet:
            continue
        made = formats[output.form.replace("-", "_")]()
        if isinstance(made, tuple):
            _write_pair(output, *made)
            continue
        text = own.get(output.form, harmless.lines)(made.rstrip("\n"))
        if output.file is not None:
            write_file(output.file, f"{text}\n")
        elif text:
            _print(paint(f"{text}\n") if output.form == "text" and _has_colours() else f"{text}\n", output.form)


def _write_pair(output: Output, graph: str, data: str) -> None:
    """Write a graph to the requested file, and the data of its nodes to another file in that folder."""
    if output.file is None:
        raise UsageError(f"{output.form} writes two files, a graph and the data of its nodes; give -o FILE.json")
    write_file(output.file, harmless.as_json(graph))
    write_file(output.file.with_name(f"{output.file.stem}.node_data.json"), harmless.as_json(data))


def write_file(file: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from passes.contract.plan_format import write_text

    write_text(file, text)


def require_replaceable(file: Path) -> None:
    """Raise UsageError for a file that is there, and is of a kind that no output has."""
    if file.suffix.lower() not in _REPLACEABLE and file.is_file():
        raise UsageError(f"{file} is there already, and {file.suffix} is no output of fxamp: give another file")


def _print(text: str, form: str) -> None:
    """Write to standard output: as UTF-8 what programs read, else with escapes for what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    buffer = getattr(sys.stdout, "buffer", None)
    try:
        if form in _FOR_PROGRAMS and buffer is not None and not sys.stdout.isatty():
            sys.stdout.flush()
            buffer.write(text.encode())
        else:
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whose reader (`| head`) has seen enough
            raise UsageError(f"standard output cannot be written: {error.strerror}; give -o FILE") from error


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """Colour the lines of a listing, as terminals do it."""
    lines = [f"\x1b[{_COLOURS[line[0]]}m{line}\x1b[0m" if line[:1] in _COLOURS else line for line in text.split("\n")]
    return "\n".join(lines)


def waiting(args: argparse.Namespace, what: str) -> contextlib.AbstractContextManager[None]:
    """Show on standard error what a long step is doing, unless --quiet was given."""
    return contextlib.nullcontext() if args.quiet or sys.stderr is None else shown_while(what, sys.stderr)


@contextlib.contextmanager
def shown_while(what: str, to: TextIO, patience: float = PATIENCE) -> Iterator[None]:
    """Show a line on a terminal once the body has taken longer than so many seconds, and remove it at the end."""
    if not to.isatty():
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        to.write(harmless.visible(f"fxamp: {what} ..."))
        to.flush()

    timer = threading.Timer(patience, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            to.write("\r\x1b[K")
            to.flush()


def width(args: argparse.Namespace) -> int | None:
    """Return the width of the terminal that is written to; None for a file or a pipe, which have no limit."""
    here = any(output.file is None for output in args.outputs) and sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if here else None


def to_stderr(text: str) -> None:
    """Write lines to standard error, each of them harmless."""
    if sys.stderr is not None:
        sys.stderr.write(harmless.lines(text))


def failed(message: str) -> int:
    """Write an error as one line; return the exit status."""
    to_stderr(f"fxamp: error: {' '.join(message.split())}\n")
    return UNKNOWN
