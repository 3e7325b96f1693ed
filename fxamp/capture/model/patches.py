"""One lock for captures, and one way to patch torch during a capture; every patch is undone afterwards.

`torch.export` and `torch.fx` keep state that all threads share, and preflight replaces functions of torch by its own.
So captures take turns, and a replaced function works only for the thread that captures: every other thread gets torch's
own function.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn

_lock = threading.RLock()
_owner: int | None = None  # the thread that captures
_own: dict[str, Any] = {}  # torch.nn.Module's own functions, as they are while no capture runs
_aside: list[tuple[Any, str, Any]] = []  # what is replaced now: its owner, its name, and the original
_TRACED = ("__call__", "__getattr__")  # of torch.nn.Module, which torch's tracers replace for all threads


def _renew() -> None:
    """Free the lock in a forked child process, in which the thread that held it does not exist."""
    global _lock, _owner
    _lock, _owner = threading.RLock(), None


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside this context only this thread captures; others wait for it to end. It can be nested."""
    global _owner
    lock = _lock
    with lock:
        before, _owner = _owner, threading.get_ident()
        if before is None:
            _own.update({name: vars(nn.Module)[name] for name in _TRACED})
        try:
            yield
        finally:
            _owner = before


def is_capturing() -> bool:
    """Say whether this is the thread that captures."""
    return _owner == threading.get_ident()


@contextlib.contextmanager
def traced_here_alone() -> Iterator[None]:
    """While a tracer of torch runs, let the calls of modules by other threads work as usual."""
    with contextlib.ExitStack() as stack:
        for name in _TRACED:
            stack.enter_context(mock.patch.object(nn.Module, name, _for_thread(vars(nn.Module)[name], _own[name])))
        yield


def _for_thread(traced: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (traced if is_capturing() else own)(*args, **kwargs)

    return call


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch off Python's garbage collector, which would walk all objects again and again as a trace grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put a function in the place of an attribute of a module or a class, for the thread that captures.

    Args:
        owner: a module or a class.
        name: name of a function, a method or a class method.
        make: takes the original function and returns the new one; that of a class method gets the class first.
    """
    original = inspect.getattr_static(owner, name)
    of_class = isinstance(original, (classmethod, types.ClassMethodDescriptorType))
    if of_class:

        def before(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return original.__get__(None, cls)(*args, **kwargs)
    else:
        before = original
    instead = make(before)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if is_capturing() else before)(*args, **kwargs)

    with capturing(), mock.patch.object(owner, name, classmethod(call) if of_class else call):
        _aside.append((owner, name, original))
        try:
            yield
        finally:
            _aside.remove((owner, name, original))


@contextlib.contextmanager
def as_torch_is() -> Iterator[None]:
    """Restore torch's own functions inside this context, while `replaced` patches them.

    Dynamo needs this: when it is first used it lists the functions of torch, and knows only these from then on.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, original in reversed(_aside):  # the first original is torch's own
            stack.enter_context(mock.patch.object(owner, name, original))
        yield
