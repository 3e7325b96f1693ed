"""Processes that begin warm: each is forked from one that has done what `tests.support.warmed` does, and nothing else.

A process that begins cold takes five seconds until it has imported torch and fxamp and has converted a model. What is
tested of the interpreter's own start, or of an environment that is read at import, needs a cold one all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

SECONDS = 300.0  # that a function may take
ROOT = Path(__file__).parents[2]


def warm() -> ForkServerContext:
    """Return what starts warm processes, as `multiprocessing` has it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warmed"])
    here = os.getcwd()
    os.chdir(ROOT)  # from where that is imported
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    return context


def in_another_process(function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> Any:
    """Return what a function of a module returns in a process of its own, in this folder and environment.

    Raises:
        AssertionError: It raised there, or left, or was not done in time.
    """
    context = warm()
    ours, theirs = context.Pipe(duplex=False)
    surroundings = os.getcwd(), dict(os.environ)
    process = context.Process(target=_answer, args=(theirs, surroundings, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), f"{function.__name__} took more than {seconds:g} s"
        fine, answer = ours.recv()
    except EOFError:
        fine, answer = False, f"{function.__name__} left its process"
    finally:
        process.kill()
        process.join()
    assert fine, answer
    return answer


def _answer(
    connection: Connection, surroundings: tuple[str, dict[str, str]], function: Callable[..., Any], args: Any
) -> None:
    # A fork replaces torch's pool of threads at first use, in which the threads of a backward pass would race.
    torch.set_num_threads(1)
    folder, environment = surroundings
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    connection.send(answer)


def printed(function: Callable[..., int], *args: Any) -> tuple[int, str, str]:
    """Return what a function returns, and what it and its processes write to pipes, which are the streams here.

    That may be no more than a pipe holds.
    """
    pipes = {stream: os.pipe() for stream in (1, 2)}
    for stream, (_, write) in pipes.items():
        os.dup2(write, stream)
        os.close(write)
    status = function(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in pipes:
        os.close(stream)
    out, err = (_all_of(read) for read, _ in pipes.values())
    return status, out, err


def _all_of(pipe: int) -> str:
    with open(pipe, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
