"""Which casts of weights are kept for a window, and the generated code that reads them.

A converted module casts its weights at every call. For the calls of a window its graph is run from a second generated
code, which differs in that alone; the module itself, its graph and its parameters stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.fx import GraphModule, Node

from passes.aliases import mutated_operands
from passes.errors import PolicyError
from passes.insert_casts import is_inserted

from ..bindings import called_directly, read_directly
from ..compiled import is_compiled
from ..in_place import called_by_name
from ..module import ConvertedModule
from ..serialize import graph_from_data, graph_to_data
from .kept import KeptCast

Mode = Literal["auto", "per_step", "per_use"]
MODES = ("auto", "per_step", "per_use")

# Wrappers that put other tensors in the parameters' place for a call, or copy the module for it.
_REPLACE_PARAMETERS = (nn.DataParallel, FullyShardedDataParallel)


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
            for cast in _weight_casts(module):
                weight = ".".join(filter(None, (path, str(cast.args[0].target))))  # type: ignore[union-attr]
                reason = _why_not(module, cast)
                if reason:
                    self.per_use[weight] = reason
                else:
                    kept.append(weight)
        self.kept = tuple(dict.fromkeys(kept))
        wanted = mode == "per_step" or (mode == "auto" and accumulate_steps > 1)
        self.mode = "per_step" if wanted and self.kept else "per_use"
        if mode == "per_step" and not self.kept:
            raise PolicyError(f"weights='per_step' keeps casts of weights, and {self._nothing()}")
        self._codes: dict[int, _Code] = {}

    @property
    def converted(self) -> list[ConvertedModule]:
        """The converted modules whose casts may be kept."""
        return [module for _, module in self._modules]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the converted modules read kept casts, for the forward and backward of one micro-batch."""
        if self.mode == "per_use":
            yield
            return
        codes = [self._code(module) for module in self.converted]
        for code in codes:
            code.install()
        try:
            yield
        finally:
            for code in codes:
                code.remove()

    def next_micro_batch(self) -> None:
        """Say, where several backwards run in one use, that one has passed."""
        for code in self._codes.values():
            for cast in code.casts:
                cast.next_micro_batch()

    def forget(self) -> None:
        """Let go of all that is kept, at the end of a window."""
        for code in self._codes.values():
            for cast in code.casts:
                cast.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCasts:
        """Copy nothing that is kept: it belongs to the window of the original."""
        new = WeightCasts.__new__(WeightCasts)
        new.__dict__.update(self.__dict__)
        new._modules, new._codes = copy.deepcopy(self._modules, memo), {}
        return new

    def _code(self, module: ConvertedModule) -> _Code:
        known = self._codes.get(id(module))
        if known is None or known.graph is not module.graph:
            known = self._codes[id(module)] = _Code(module)
        return known

    def _nothing(self) -> str:
        if not self._modules and not self.per_use:
            return "no part of this model was converted ahead of time: give what fxamp.convert returned, or 'auto'."
        why = "; ".join(f"'{path}' {reason}" for path, reason in list(self.per_use.items())[:3])
        return f"there is none here that can be{': ' + why if why else ''}. Use 'auto' or 'per_use'."


class _Code:
    """A second code of a converted module's graph, in which the casts of weights are kept ones."""

    def __init__(self, module: ConvertedModule) -> None:
        self.module, self.graph = module, module.graph
        graph = graph_from_data(graph_to_data(self.graph))
        self.casts: list[KeptCast] = []
        originals = {n.name for n in _weight_casts(module) if not _why_not(module, n)}
        for node in graph.nodes:
            if node.name in originals:
                node.target = KeptCast(node.target, f"kept_{node.name}")
                self.casts.append(node.target)
        with called_directly(graph), called_by_name(graph), read_directly(graph):
            self.run: Callable[..., Any] = type(GraphModule(module, graph)).forward

    def install(self) -> None:
        """Let the module run this code."""
        for cast in self.casts:
            cast.next_micro_batch()
        self.module.__dict__["graph_forward"] = functools.partial(self.run, self.module)

    def remove(self) -> None:
        """Let the module run its own code again."""
        self.module.__dict__.pop("graph_forward", None)


def _converted(model: nn.Module, per_use: dict[str, str], path: str = "") -> Iterator[tuple[str, ConvertedModule]]:
    """Yield the converted modules in a model whose casts may be kept, and note why others may not."""
    if is_compiled(model):
        per_use[path or "the model"] = "is compiled by torch.compile, whose graphs cast weights themselves"
    elif isinstance(model, _REPLACE_PARAMETERS):
        per_use[path or "the model"] = f"is a {type(model).__name__}, which replaces parameters at each call"
    elif isinstance(model, ConvertedModule):
        yield path, model
    else:
        for name, child in model.named_children():
            yield from _converted(child, per_use, f"{path}.{name}".removeprefix("."))


def _weight_casts(module: ConvertedModule) -> Iterator[Node]:
    """Yield the casts that fxamp made of what is, or was, a parameter."""
    for node in module.graph.nodes:
        if is_inserted(node) and node.op == "call_function" and node.args[0].op == "get_attr":
            owner, _, name = str(node.args[0].target).rpartition(".")
            if name not in module.get_submodule(owner)._buffers:
                yield node


def _why_not(module: ConvertedModule, cast: Node) -> str:
    """Return why a cast is not kept, "" if it is."""
    source: Any = cast.args[0]
    owner, _, name = str(source.target).rpartition(".")
    weight = module.get_submodule(owner)._parameters.get(name)
    if weight is None:
        return "is no parameter of its module any more"
    if type(weight) is not nn.Parameter:
        return f"is a {type(weight).__name__}, whose local tensor changes from call to call"
    if any(user.op == "output" or cast in mutated_operands(user) for user in cast.users):
        return "leaves the graph, or is written to in it"
    return ""
