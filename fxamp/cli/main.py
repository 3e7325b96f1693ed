"""The command `fxamp VERB`: each verb is a file of this folder, with its arguments and what it does.

Exit status of every verb: 0 success and nothing found, 1 something was found (a difference, an overflow, an error above
a tolerance), 2 an error. 130 and 143 after Ctrl-C and SIGTERM, as in a shell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from . import census, check, compare, demo, diff, error, init, overflow, report, rules, tune
from .output import DONE, FOUND, failed, outputs_of, to_stderr
from .told import told
from .usage import UsageError, Verb, parser_of

VERBS: dict[str, Verb] = {
    "census": census, "report": report, "diff": diff, "check": check, "init": init, "error": error,
    "overflow": overflow, "tune": tune, "compare": compare, "rules": rules, "demo": demo,
}  # fmt: skip
# Names that work for one release more.
_FORMER = {"verify": ("error", "--measure"), "advise": ("compare",)}


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: what is written is cleaned up, as after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    try:
        args = parser_of(VERBS.items()).parse_args(_renamed(sys.argv[1:] if argv is None else argv))
        args.outputs = outputs_of(args)
    except SystemExit as stop:
        # --help and --version end with SystemExit.
        return int(stop.code or 0)
    except UsageError as problem:
        return failed(str(problem))
    # Before it raises what we report, torch 2.15 logs it as an error.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # A target may import more of its own when it is called, so the path stays until the verb is done.
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with _ended_by_sigterm():
            status: int = args.run(args)
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        to_stderr(f"fxamp: {'terminated' if terminated else 'interrupted'}\n")
        return 143 if terminated else 130
    except BaseException as problem:
        # Python would exit with 1, which means "found" here; a target that calls sys.exit could choose any status.
        return failed(told(problem))
    finally:
        sys.path[:] = path
    return DONE if args.exit_zero and status == FOUND else status


def _renamed(words: Sequence[str]) -> list[str]:
    """Return the command line with the present name of a verb, and warn of a former one."""
    if not words or words[0] not in _FORMER:
        return list(words)
    instead = _FORMER[words[0]]
    to_stderr(f"fxamp: warning: `fxamp {words[0]}` is now `fxamp {' '.join(instead)}`; the old name will go\n")
    return [*instead, *words[1:]]


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Raise where SIGTERM comes, so that files half written are removed and processes of ours end."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
