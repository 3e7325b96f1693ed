"""Processes of one gloo group that stay, and run one function after the other together."""

from __future__ import annotations

import contextlib
import datetime
import gc
import pickle
import re
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from passes.contract.errors import PolicyError
from tests.support.processes import warm
from tests.support.ranks import free_ports, leave_group

COLLECTIVE, CALL = 60.0, 300.0  # seconds that a rank waits for others, and that a function may take


class Workers:
    """A group of processes, started at the first call and anew after a failure.

    Args:
        count: Of the processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function of a test module on all ranks, and return what each returned.

        Raises:
            AssertionError: A rank raised, was ended, or was not done in time; all of them are gone then.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        answers: dict[int, Any] = {}
        end = time.monotonic() + CALL
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            while len(answers) < self.count:
                open_ones = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
                ready: list[Any] = wait(list(open_ones), max(0.0, end - time.monotonic()))
                assert ready, f"ranks {sorted(open_ones.values())} took more than {CALL:g} s"
                for connection in ready:
                    fine, answers[open_ones[connection]] = pickle.loads(connection.recv_bytes())
                    assert fine, f"rank {open_ones[connection]}: {answers[open_ones[connection]]}"
        except (AssertionError, EOFError, OSError) as error:
            self.end()
            raise AssertionError(str(error)) from error
        return [answers[rank] for rank in range(self.count)]

    def end(self) -> None:
        """End the processes, at once."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes.clear()
        self._connections.clear()

    def _start(self) -> None:
        context = warm()
        (port,) = free_ports(1)
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.count, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def serve(rank: int, count: int, port: int, connection: Connection) -> None:
    """Run on one rank what is sent, until nobody sends any more."""
    torch.set_num_threads(1)
    join(rank, count, port)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, args = pickle.loads(connection.recv_bytes())
            try:
                answer = True, function(*args)
            except BaseException:
                answer = False, traceback.format_exc()
            gc.collect()  # see leave_group
            connection.send_bytes(pickle.dumps(answer))
    leave_group()


def join(rank: int, count: int, port: int) -> None:
    """Make this process a rank of a group; not by a file, for which the last one to leave may wait for ever."""
    timeout = datetime.timedelta(seconds=COLLECTIVE)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=timeout)


def refused(workers: Workers, function: Callable[..., Any], *args: Any, match: str) -> None:
    """Assert that a function raises a PolicyError on all ranks, with words that match."""
    for said in workers(refusal, function, args):
        assert re.search(match, said), said


def refusal(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return what a function is refused with, and with what not."""
    try:
        function(*args)
    except PolicyError as error:
        return str(error)
    return "nothing was refused"
