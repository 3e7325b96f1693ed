"""Which casts of weights are kept for a window of a training step, and the copies that it keeps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from passes.contract.errors import PolicyError

from ..view.copies import Copies, is_plain
from ..view.frozen import keep, parts_of, weights_of
from ..view.view import is_view, runner_of

Mode = Literal["auto", "per_step", "per_use"]


class _Found(NamedTuple):
    """What so many captured graphs cast."""

    graphs: int
    kept: dict[str, None]  # weights whose casts are kept
    per_use: dict[str, str]  # why others are not
    times: int  # that a call casts the weight which it casts most often


class WeightCasts:
    """The weights that graphs read low, of a model as a TrainStep calls it: a view, or with views inside."""

    def __init__(self, model: nn.Module, mode: Mode, accumulate_steps: int) -> None:
        if mode not in get_args(Mode):
            raise PolicyError(f"weights must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
        self.asked, self._accumulate_steps = mode, accumulate_steps
        self.copies, self._scope = Copies("cast_once", bounded=True), contextlib.ExitStack()  # for the step's life
        parts = list(parts_of(model))
        self.parts = [module for _, module, _ in parts if is_view(module)]
        self._refused = {path or "the model": reason for path, _, reason in parts if reason}
        self._views = {path: runner_of(module) for path, module, reason in parts if is_view(module) and not reason}
        self._found = _Found(-1, {}, {}, 0)
        if mode == "per_step" and self._keeps_nothing:
            why = "; ".join(f"'{path}' {reason}" for path, reason in list(self.per_use.items())[:3])
            raise PolicyError(
                "weights='per_step' keeps casts of weights for a whole step, but "
                + (
                    f"this model has no cast that can be kept{': ' + why if why else ''}. Use 'auto' or 'per_use'."
                    if self._views or why
                    else "no part of this model is converted: give what fxamp.convert or fxamp.compile returned, or "
                    "'auto'."
                )
            )

    @property
    def mode(self) -> Literal["per_step", "per_use"]:
        """Whether casts are kept for a window: "per_step", else "per_use"."""
        if self.asked == "per_use" or self._keeps_nothing:
            return "per_use"
        # Where each weight is cast once, both modes have the same casts, bytes and ops in eager mode.
        return "per_step" if self.asked == "per_step" or self.times > 1 else "per_use"

    @property
    def kept(self) -> tuple[str, ...]:
        """Paths of the weights whose casts can be kept, in the graphs that are captured so far."""
        return tuple(self._look().kept)

    @property
    def per_use(self) -> dict[str, str]:
        """Why other casts are not kept, by path of the weight or of the module that reads it."""
        return self._refused | self._look().per_use

    @property
    def times(self) -> int:
        """How often a window casts the weight that is cast most often, if every view is called once a micro-batch."""
        found = self._look()
        return self._accumulate_steps * (found.times or bool(self._views and not found.graphs))

    @property
    def _keeps_nothing(self) -> bool:
        found = self._look()
        return not self._views or bool(found.graphs and not found.kept)

    @property
    def is_open(self) -> bool:
        """Whether views read the copies now."""
        return any(runner.opened() is self.copies for runner in self._views.values())

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Let views read copies inside this context; what was cast stays valid after it, until `end`."""
        if self.mode == "per_use" or self.is_open:
            yield
        else:
            with self._scope:
                keep(self._scope, self.copies, self._views.values())
                yield

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Let views read copies inside this context, after which none is valid."""
        try:
            with self.read():
                yield
        finally:
            self.end()

    def end(self) -> None:
        """End a window: no view reads copies, and weights are cast again when they are next read."""
        self._scope.close()
        self.copies.end()

    def _look(self) -> _Found:
        """Read the captured graphs, if there are others than at the last look."""
        graphs = sum(len(runner.graphs) for runner in self._views.values())
        if self._found.graphs == graphs:
            return self._found
        kept, per_use, times = dict[str, None](), dict[str, str](), Counter[Any]()
        for path, runner in self._views.items():
            named = dict(runner.model.named_parameters(remove_duplicate=False))
            a_call = Counter[Any]()
            for graph in runner.graphs:  # a call runs one of them, or several that read different weights
                a_graph = Counter[Any]()
                casts, others = weights_of(graph)
                per_use.update((".".join(filter(None, (path, name))), reason) for name, reason in others.items())
                for name, what, count in casts:
                    weight = named.get(name)
                    whole = ".".join(filter(None, (path, name)))
                    if is_plain(weight):
                        kept[whole] = None
                        a_graph[id(weight), what.dtype] += count
                    elif weight is not None:
                        kind = type(weight).__name__
                        per_use[whole] = f"is a {kind}, which is gathered or exchanged again at each call"
                a_call |= a_graph
            times += a_call
        self._found = _Found(graphs, kept, per_use, max(times.values(), default=0))
        return self._found
