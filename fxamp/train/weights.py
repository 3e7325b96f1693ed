"""Which casts of weights are kept for a window of a training step, and when they are in use."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from passes.errors import PolicyError

from ..compiled import is_compiled
from ..module import ConvertedModule
from .kept import KeptCast
from .second_code import SecondCode, graphs_of, running, weight_casts, why_not

Mode = Literal["auto", "per_step", "per_use"]
MODES = ("auto", "per_step", "per_use")

# Wrappers that put other tensors in the parameters' place for a call, or copy the module for it.
_REPLACE_PARAMETERS = ("DataParallel", "FullyShardedDataParallel")


class WeightCasts:
    """The weights of a model that its graphs read low.

    Attributes:
        mode: "per_step" when their casts are kept for a window, else "per_use".
        kept: Paths of the weights whose casts are kept.
        per_use: Of the others, why not, by path of the weight or of the module that reads it.
    """

    def __init__(self, model: nn.Module, mode: Mode, accumulate_steps: int) -> None:
        """Find out which casts can be kept.

        Args:
            model: The model as a TrainStep calls it: converted, or with converted modules inside.
            mode: What was asked for. "auto" is "per_step" where a window has several micro-batches.
            accumulate_steps: Micro-batches in a window.

        Raises:
            PolicyError: `mode` is none of the three, or "per_step" and nothing can be kept.
        """
        if mode not in MODES:
            raise PolicyError(f"weights must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self.per_use: dict[str, str] = {}
        self._modules = list(_converted(model, self.per_use))
        kept: list[str] = []
        for path, module in self._modules:
            for cast in (cast for graph in graphs_of(module) for cast in weight_casts(module, graph)):
                weight = ".".join(filter(None, (path, str(cast.args[0].target))))  # type: ignore[union-attr]
                reason = why_not(module, cast)
                if reason:
                    self.per_use[weight] = reason
                else:
                    kept.append(weight)
        self.kept = tuple(dict.fromkeys(kept))
        wanted = mode == "per_step" or (mode == "auto" and accumulate_steps > 1)
        self.mode = "per_step" if wanted and self.kept else "per_use"
        if mode == "per_step" and not self.kept:
            raise PolicyError(f"weights='per_step' keeps casts of weights, and {self._nothing()}")
        self._codes: dict[int, list[SecondCode]] = {}

    @property
    def converted(self) -> list[ConvertedModule]:
        """The converted modules whose casts may be kept."""
        return [module for _, module in self._modules]

    @property
    def casts(self) -> list[KeptCast]:
        """The casts that are kept, once they were in use."""
        return [cast for codes in self._codes.values() for code in codes for cast in code.casts]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the converted modules read kept casts, for the forward and backward of one micro-batch."""
        if self.mode == "per_use":
            yield
            return
        with contextlib.ExitStack() as stack:
            for module in self.converted:
                stack.enter_context(running(module, self._codes_of(module)))
            self.next_micro_batch()
            yield

    def next_micro_batch(self) -> None:
        """Say, where several backwards run in one use, that one has passed."""
        for cast in self.casts:
            cast.next_micro_batch()

    def forget(self) -> None:
        """Let go of all that is kept, at the end of a window."""
        for cast in self.casts:
            cast.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCasts:
        """Copy nothing that is kept: it belongs to the window of the original."""
        new = WeightCasts.__new__(WeightCasts)
        new.__dict__.update(self.__dict__)
        new._modules, new._codes = copy.deepcopy(self._modules, memo), {}
        return new

    def _codes_of(self, module: ConvertedModule) -> list[SecondCode]:
        """Return the second codes of a module's graphs, made anew where it has other graphs by now."""
        known, graphs = self._codes.get(id(module), []), graphs_of(module)
        if len(known) != len(graphs) or any(c.graph is not g for c, g in zip(known, graphs, strict=True)):
            known = self._codes[id(module)] = [SecondCode(module, graph) for graph in graphs]
        return known

    def _nothing(self) -> str:
        if not self._modules and not self.per_use:
            return "no part of this model was converted ahead of time: give what fxamp.convert returned, or 'auto'."
        why = "; ".join(f"'{path}' {reason}" for path, reason in list(self.per_use.items())[:3])
        return f"there is none here that can be{': ' + why if why else ''}. Use 'auto' or 'per_use'."


def _converted(model: nn.Module, per_use: dict[str, str], path: str = "") -> Iterator[tuple[str, ConvertedModule]]:
    """Yield the converted modules in a model whose casts may be kept, and note why others may not."""
    if is_compiled(model):
        per_use[path or "the model"] = "is compiled by torch.compile, whose graphs cast weights themselves"
    elif type(model).__name__ in _REPLACE_PARAMETERS:
        per_use[path or "the model"] = f"is a {type(model).__name__}, which replaces parameters at each call"
    elif isinstance(model, ConvertedModule):
        yield path, model
    else:
        for name, child in model.named_children():
            yield from _converted(child, per_use, f"{path}.{name}".removeprefix("."))
