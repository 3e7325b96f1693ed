"""Output of the subcommands: results go to standard output or to files, messages to standard error."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from passes.contract.errors import FxampError
from passes.contract.plan_format import write_text

from .. import harmless

DONE, FOUND, UNKNOWN = 0, 1, 2  # exit statuses
PATIENCE = 2.0  # seconds
_COLOURS = {"+": "32", "-": "31", "!": "33", "@": "36", "=": "36"}  # of a line, by its first character
_FOR_PROGRAMS = ("json", "sarif", "html", "junit")  # the formats that say, or are by definition, UTF-8


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Redirect to standard error what the model prints, also from C and from child processes."""
    sys.stdout.flush()
    try:
        out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        kept = os.dup(out)
    except (AttributeError, OSError, ValueError):  # the standard streams have no file descriptors
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


def write(args: argparse.Namespace, paint: Callable[[str], str] = str, **formats: Callable[[], str]) -> None:
    """Write one of the formats to the requested file, or to standard output, with colours on a terminal."""
    # Formats that escape their own text are left as they are. In "github" the lines are workflow commands, which other
    # formats must not contain.
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
        _print(paint(text) if args.output_format == "text" and _has_colours() else text, args.output_format)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python flushes once more at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str, form: str) -> None:
    """Write to standard output: as UTF-8 what programs read, else with escapes for what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    buffer = getattr(sys.stdout, "buffer", None)
    if form in _FOR_PROGRAMS and buffer is not None and not sys.stdout.isatty():
        sys.stdout.flush()
        buffer.write(text.encode())
    else:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """Colour the lines of a listing, as terminals do it."""
    lines = [f"\x1b[{_COLOURS[line[0]]}m{line}\x1b[0m" if line[:1] in _COLOURS else line for line in text.split("\n")]
    return "\n".join(lines)


def waiting(args: argparse.Namespace, what: str) -> contextlib.AbstractContextManager[None]:
    """Show on standard error what a long step is doing, unless --quiet was given."""
    return contextlib.nullcontext() if args.quiet else shown_while(what, sys.stderr)


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
    return shutil.get_terminal_size().columns if args.output is None and sys.stdout.isatty() else None


def write_pair(args: argparse.Namespace, graph: str, data: str) -> None:
    """Write a graph to the requested file, and the data of its nodes to another file in that folder."""
    if args.output is None:
        raise FxampError("model-explorer writes two files, a graph and the data of its nodes; give -o FILE.json")
    beside = args.output.with_name(f"{args.output.stem}.node_data.json")
    write_text(args.output, harmless.as_json(graph))
    write_text(beside, harmless.as_json(data))


def to_stderr(text: str) -> None:
    """Write lines to standard error, each of them harmless."""
    sys.stderr.write(harmless.lines(text))


def failed(message: str) -> int:
    """Write an error as one line; return the exit status."""
    sys.stderr.write(f"fxamp: error: {harmless.visible(' '.join(message.split()))}\n")
    return UNKNOWN
