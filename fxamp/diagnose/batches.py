"""The batches of a diagnostic: pairs of inputs and target, each taken when it is asked for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from passes.contract.errors import PolicyError

from ..observe.snapshot import random_state, set_random_state
from ..observe.workload import Loss

MOST = 8  # batches of an iterable that is no sequence
Batch = tuple[Any, Any]


class Batches(Sequence[Batch]):
    """Pairs of inputs and target, each taken when it is asked for, and there for those who ask again.

    Of a sequence, and of an `itertools.islice`, which says how many, all are taken. Of anything else, such as a
    DataLoader or a generator, which may have no end, it is the first 8. A loader is iterated anew, and its generators,
    and those that all share, are as before.

    Args:
        source: yields inputs, or (inputs, target).
        model: whose signature tells inputs from a target.
        loss: of which the target is the second argument.

    Raises:
        PolicyError: there is none.
    """

    def __init__(self, source: Iterable[Any], model: nn.Module, loss: Loss) -> None:
        self._source, self._loss, self._arity = source, loss, _arity(model)
        self._most = math.inf if isinstance(source, (Sequence, islice)) else MOST
        # Whether there may be more than are taken.
        self.cut = math.isfinite(self._most) and not (isinstance(source, Sized) and len(source) <= MOST)
        self._batches: list[Batch] = []
        self._left: Iterator[Any] | None = None
        self._stream: list[Any] | None = None
        if not self[:1]:
            raise PolicyError("batches= is empty: give at least one batch.")

    def _take(self, count: float) -> None:
        """Take batches until there are so many, or no more."""
        while len(self._batches) < min(count, self._most):
            generators = _generators(self._source)
            before = [random_state(), *(g.get_state() for g in generators)]
            try:
                _set_streams(generators, self._stream)
                self._left = iter(self._source) if self._left is None else self._left
                self._batches.append(_split(next(self._left), *self._arity, self._loss))
            except StopIteration:
                self._most, self.cut = len(self._batches), False
            finally:
                self._stream = [random_state(), *(g.get_state() for g in generators)]
                _set_streams(generators, before)

    def __len__(self) -> int:
        self._take(self._most)
        return len(self._batches)

    @overload
    def __getitem__(self, at: int) -> Batch: ...
    @overload
    def __getitem__(self, at: slice) -> list[Batch]: ...
    def __getitem__(self, at: int | slice) -> Batch | list[Batch]:
        last = at.stop if isinstance(at, slice) else at + 1
        self._take(self._most if last is None or last <= 0 else last)
        return self._batches[at]

    def __iter__(self) -> Iterator[Batch]:
        at = 0
        while True:
            self._take(at + 1)
            if at >= len(self._batches):
                return
            yield self._batches[at]
            at += 1


def _generators(source: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader and its samplers draw from."""
    samplers = [source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
    samplers += [getattr(samplers[2], "sampler", None)]
    found = {id(g): g for s in samplers if isinstance(g := getattr(s, "generator", None), torch.Generator)}
    return list(found.values())


def _set_streams(generators: Sequence[torch.Generator], states: Sequence[Any] | None) -> None:
    if states is not None:
        set_random_state(states[0])
        for generator, state in zip(generators, states[1:], strict=True):
            generator.set_state(state)


def _positional(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)


def _arity(model: nn.Module) -> tuple[int, float]:
    """Return how many positional inputs a model needs, and how many it takes."""
    inner = getattr(model, "module", model)  # of a wrapper, which takes anything
    try:
        every = inspect.signature(inner.forward).parameters.values()
    except (TypeError, ValueError):
        return 0, math.inf
    named = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in every)
    return sum(p.default is p.empty for p in named), math.inf if any_number else len(named)


def _split(one: Any, needs: int, most: float, loss: Loss) -> Batch:
    """Return inputs and target. What a DataLoader yields for a data set of pairs is a list.

    Two tensors are inputs and target, unless the model needs two inputs, or takes two and returns its loss. Of more
    than the model takes the last is the target.
    """
    if not isinstance(one, (tuple, list)) or isinstance(one, PackedSequence):
        return one, None
    whole = tuple(one)
    inputs = needs >= 2 or (loss is None and most >= 2 and whole[-1] is not None)
    if len(whole) == 2 and not (inputs and isinstance(whole[0], (Tensor, PackedSequence))):
        return whole
    if loss is not None and len(whole) > most:
        return (whole[0] if len(whole) == 2 else whole[:-1]), whole[-1]
    return whole, None
