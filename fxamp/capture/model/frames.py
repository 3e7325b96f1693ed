"""Find the line of the user's code on the call stack; skip frames of torch, fxamp and Python's import system."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import traceback
import unittest.mock
from types import CodeType, FrameType, TracebackType

import torch
from torch.autograd import function  # its frames stand between a model and what its autograd functions call

import passes
from passes._torch import decorators


def _folder(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.realpath(file or "")), "")


_TORCH, _NN = _folder(torch.__file__), _folder(torch.nn.__file__)
_OURS = (_folder(sys.modules[__name__.partition(".")[0]].__file__), _folder(passes.__file__))
_BETWEEN = (contextlib, functools, unittest.mock, decorators, function)
_PLUMBING = tuple(os.path.realpath(m.__file__ or "") for m in _BETWEEN)
# What generated code calls its file. "<stdin>", "<string>" and "<ipython-input-1>" are the user's.
_GENERATED = ("<eval_with_key>", "<frozen ", "<__array_function__")


@functools.lru_cache(maxsize=4096)
def kind(file: str) -> str:
    """Say whose a source file is: "user", "nn" (torch.nn, which runs on a model's behalf), "torch", or "plumbing"."""
    real = os.path.realpath(file)
    if real in _PLUMBING or real.startswith(_OURS) or file.startswith(_GENERATED):
        return "plumbing"
    if real.startswith(_TORCH):
        return "nn" if real.startswith(_NN) else "torch"
    return "user"


def caller(kinds: tuple[str, ...], depth: int = 1) -> FrameType | None:
    """Return the innermost frame of these kinds, starting `depth` frames above the calling function."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and kind(frame.f_code.co_filename) not in kinds:
        frame = frame.f_back
    return frame


def place() -> str:
    """Return "file:line (code)" of the innermost line of user code."""
    frame = caller(("user",))
    return "an unknown place" if frame is None else _show(frame.f_code.co_filename, frame.f_lineno)


def place_of(error: BaseException) -> str:
    """Return "file:line (code)" of the user's innermost line in the traceback of an error, or of what caused it."""
    found = ""
    cause: BaseException | None = error
    while cause is not None:
        trace: TracebackType | None = cause.__traceback__
        for frame in traceback.extract_tb(trace):
            if kind(frame.filename) == "user" and frame.lineno is not None:
                found = _show(frame.filename, frame.lineno)
        cause = cause.__cause__ or cause.__context__
    return found


class Stacks:
    """Finds the frames of the model's own code inside the present call of `start`, in the form of a traceback.

    Methods and functions that forward() calls are among them, and the forward() of layers of torch.nn. One object is
    for one capture: it looks up each line once.

    Args:
        start: what calls the model's forward().
    """

    def __init__(self, start: CodeType) -> None:
        self._start = start
        self._printed: dict[tuple[str, int, str], str] = {}

    def __call__(self) -> str:
        """Return the model's frames on the present stack, outermost first."""
        frame: FrameType | None = sys._getframe(1)
        own = []
        while frame is not None and frame.f_code is not self._start:
            code = frame.f_code
            whose = kind(code.co_filename)
            if whose == "user" or (whose == "nn" and code.co_name == "forward"):
                own.append(self._line(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return "".join(reversed(own)).strip()

    def _line(self, file: str, line: int, name: str) -> str:
        found = self._printed.get((file, line, name))
        if found is None:
            found = "".join(traceback.format_list([traceback.FrameSummary(file, line, name)]))
            self._printed[file, line, name] = found
        return found


def _show(file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"{file}:{line} ({code})" if code else f"{file}:{line}"
