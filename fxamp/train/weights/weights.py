"""Which casts of weights are kept for a window of a training step, and when they are in use."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, Literal

from torch import nn
from torch.fx import Graph

from passes.contract.errors import PolicyError

from ...dynamo.compiled import is_compiled
from ...module.module import ConvertedModule
from .held_nodes import nodes_are_held
from .kept import Given, GraphInputs, KeptCast
from .second_code import SecondCode, graphs_of, running, same_cast, weight_casts, why_not
from .together import fill

Mode = Literal["auto", "per_step", "per_use"]
MODES = ("auto", "per_step", "per_use")

# Wrappers that put other tensors in the parameters' place for a call, or copy the module for it.
_REPLACE_PARAMETERS = ("DataParallel", "FullyShardedDataParallel")


class WeightCasts:
    """The weights of a model that its graphs read low.

    Attributes:
        mode: "per_step" when their casts are kept for a window, else "per_use".
        kept: Paths of the weights whose casts are kept.
        times: How often a window would otherwise cast the weight that is cast most often, if every converted module is
            called once a micro-batch.
        per_use: Why other casts are not kept, by path of the weight or of the module that reads it.
        inputs: What stands for the casts in code that `torch.compile` traces.
        parts: The parts of the model that were converted ahead of time, or are at their first call.
    """

    def __init__(self, model: nn.Module, mode: Mode, accumulate_steps: int) -> None:
        """Find out which casts can be kept.

        Args:
            model: The model as a TrainStep calls it: converted, or with converted modules inside.
            mode: What was asked for. "auto" is "per_step" where a weight would be cast more than once a window. Where
                each is cast once, both modes have the same casts, bytes and ops in eager mode, and their times differed
                by no more than their spread. Compiled, "per_use" is faster by a twentieth and has the lower peak
                (reports/compiled_step.md), though backward casts again.
            accumulate_steps: Micro-batches in a window.

        Raises:
            PolicyError: `mode` is none of the three, or "per_step" and nothing can be kept.
        """
        if mode not in MODES:
            raise PolicyError(f"weights must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self.per_use: dict[str, str] = {}
        self.parts: list[nn.Module] = []
        self._modules: list[tuple[str, ConvertedModule]] = []
        for path, module in _parts(model):
            self.parts.append(module)
            reason = _why_not(module)
            if reason:
                self.per_use[path or "the model"] = reason
            elif isinstance(module, ConvertedModule):
                self._modules.append((path, module))
        kept: dict[str, None] = {}
        a_micro_batch: Counter[Hashable] = Counter()
        for path, module in self._modules:
            a_call: Counter[Hashable] = Counter()
            for graph in graphs_of(module):  # a call runs one of these graphs
                a_call |= self._count(path, module, graph, kept)
            a_micro_batch += a_call
        self.kept = tuple(kept)
        self.times = accumulate_steps * max(a_micro_batch.values(), default=0)
        wanted = mode == "per_step" or (mode == "auto" and self.times > 1)
        self.mode = "per_step" if wanted and self.kept else "per_use"
        if mode == "per_step" and not self.kept:
            raise PolicyError(f"weights='per_step' keeps casts of weights for a whole step, but {self._nothing()}")
        self._codes: dict[int, list[SecondCode]] = {}
        self._casts: dict[Hashable, KeptCast] = {}
        self.inputs = GraphInputs()

    @property
    def casts(self) -> list[KeptCast]:
        """The casts that are kept, once they were in use: one for all that read the same weight in the same dtype."""
        return list(self._casts.values())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the converted modules read kept casts, for the forward and backward of one micro-batch."""
        if self.mode == "per_use":
            yield
            return
        with contextlib.ExitStack() as stack:
            for _, module in self._modules:
                stack.enter_context(running(module, self._codes_of(module)))
            self.next_micro_batch()
            fill([cast.place for cast in self.casts if cast.place is not None])
            yield

    def make_ready(self) -> list[Given | None]:
        """Make the casts that are in use, as inputs of a compiled graph; return what `inputs.begin` takes."""
        modules = self._modules if self.mode == "per_step" else []
        reads = [read for _, module in modules for code in self._codes_of(module) for read in code.reads()]
        leaves = [(cast, weight) for cast, weight, _ in reads if cast.becomes_leaf(weight)]
        for (cast, _), held in zip(leaves, nodes_are_held([weight for _, weight in leaves]), strict=True):
            if held:
                cast.alone = False
        made = {cast.at: cast.make_ready(weight, dtype) for cast, weight, dtype in reads}
        return [made.get(at) for at in range(len(self._casts))]

    def next_micro_batch(self) -> None:
        """Note that one of several backwards within one use has run."""
        for cast in self.casts:
            cast.next_micro_batch()

    def forget(self) -> None:
        """Free all that is kept, at the end of a window."""
        for cast in self.casts:
            cast.forget()
        self.inputs.begin(())

    def __getstate__(self) -> dict[str, Any]:
        """Copy no kept casts, which belong to the window of the original."""
        return {**self.__dict__, "_codes": {}, "_casts": {}, "inputs": GraphInputs()}

    def _count(self, path: str, module: ConvertedModule, graph: Graph, kept: dict[str, None]) -> Counter[Hashable]:
        """Count the casts of a graph that can be kept, and note their weights; for other casts note why they cannot."""
        found: Counter[Hashable] = Counter()
        for cast in weight_casts(module, graph):
            weight = ".".join(filter(None, (path, str(cast.args[0].target))))  # type: ignore[union-attr]
            reason = why_not(module, cast)
            if reason:
                self.per_use[weight] = reason
            else:
                kept[weight] = None
                found[same_cast(module, cast)] += 1
        return found

    def _codes_of(self, module: ConvertedModule) -> list[SecondCode]:
        """Return the second codes of a module's graphs, made again if its graphs have changed."""
        known, graphs = self._codes.get(id(module), []), graphs_of(module)
        if len(known) != len(graphs) or any(c.graph is not g for c, g in zip(known, graphs, strict=True)):
            known = self._codes[id(module)] = [SecondCode(module, graph, self._casts, self.inputs) for graph in graphs]
        return known

    def _nothing(self) -> str:
        if not self._modules and not self.per_use:
            return "no part of this model was converted ahead of time: give what fxamp.convert returned, or 'auto'."
        why = "; ".join(f"'{path}' {reason}" for path, reason in list(self.per_use.items())[:3])
        return f"this model has no cast that can be kept{': ' + why if why else ''}. Use 'auto' or 'per_use'."


def _parts(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model that are converted, compiled or replace parameters, but none inside these."""
    if isinstance(model, ConvertedModule) or _why_not(model):
        yield path, model
    else:
        for name, child in model.named_children():
            yield from _parts(child, f"{path}.{name}".removeprefix("."))


def _why_not(module: nn.Module) -> str:
    """Return why no casts in a module are kept, "" if they may be."""
    if is_compiled(module):
        return "is compiled by torch.compile, whose graphs cast weights themselves"
    if type(module).__name__ in _REPLACE_PARAMETERS:
        return f"is a {type(module).__name__}, which replaces parameters at each call"
    return ""
