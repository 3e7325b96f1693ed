"""The compiled parts of a training step: model and loss in one graph, and what comes after backward in another.

    graph 1:  low copies of weights, inputs, target -> loss       its backward is compiled with it
    Python:   scale the loss, backward, count micro-batches
    graph 2:  gradients -> unscaled, checked, clipped; parameters and optimizer state -> stepped, or as they were

A view in the model is traced into the first graph. In a window that keeps casts of weights, these are inputs of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from passes.graph.values import no_autocast
from passes.ops import ops

from ..view.copies import Lifted, lift, with_copies
from ..view.function import Entry
from ..view.runner import Runner
from ..view.traced import convert_views, traced
from ..view.view import is_view, runner_of
from .compiled_update import CompiledUpdate
from .compiler import CompileSettings, Region
from .ranks.ranks import is_sharded
from .weights import WeightCasts
from .window import LossFunction, loss_of

if TYPE_CHECKING:
    from ..measure.inductor import Counts


class CompiledStep:
    """The compiled parts of a TrainStep, with counts of their graphs: `loss` is that of model and loss."""

    def __init__(self, settings: CompileSettings, model: nn.Module, weights: WeightCasts) -> None:
        self.settings = settings
        self._model, self._weights = model, weights
        self.loss = Region("model and loss", loss_of, settings, self._compile)
        self.update = CompiledUpdate(settings)
        views = [m for m in model.modules() if is_view(m)]
        # The hooks by which FSDP2 gathers break graphs: there a view runs graphs of its own.
        self._runners = [runner_of(view) for view in views if not any(map(is_sharded, view.modules()))]
        self._traced: dict[tuple[Runner, str], Callable[..., Any]] = {}
        self._inlined: list[Runner] = []  # in the present call
        self._entries: list[Entry] = []  # the graphs of views that were captured here

    @property
    def cuda_graph(self) -> str:
        """What became of the requested CUDA graph; "" if none was requested."""
        if not self.settings.cuda_graph:
            return ""
        skipped = [reason for region in self.regions for reason in region.uncaptured]
        if not self.settings.captures:
            skipped = ["there is no CUDA device here"]
        return f"none: {'; '.join(dict.fromkeys(skipped))}" if skipped else "captured by Inductor, each graph by itself"

    @property
    def counts(self) -> Counts | None:
        """What Inductor made of the graphs that the last micro-batch ran, and of the compiled update of a window.

        They are those of this device; on a CPU a kernel is a nest of loops, of which a C++ function may have several.
        Ops outside of the graphs are not in them, such as a fused optimizer. None before the first backward, and where
        another backend compiles, or an option takes the place of the pass that records.
        """
        if not self.loss.kernels.ran:
            return None
        loss, update = self.loss.kernels.counts, self.update.region.kernels.counts
        return None if loss is None or update is None else loss + update

    @property
    def regions(self) -> tuple[Region, Region]:
        """All compiled functions."""
        return self.loss, self.update.region

    def loss_of(self, loss_fn: LossFunction | None, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Return loss and output of a micro-batch; as `fxamp.train.window.loss_of` does."""
        if self.settings.captures:
            torch.compiler.cudagraph_mark_step_begin()
        with self._inlining(inputs):
            found: tuple[Tensor, Any] = self.loss(self._model, loss_fn, inputs, target)
        return found

    @contextlib.contextmanager
    def _inlining(self, inputs: Any) -> Iterator[None]:
        """Let the views be traced into the graph, except those whose `forward` somebody has replaced."""
        for runner in self._runners:
            runner.settle((inputs,))
        self._inlined = [r for r in self._runners if r.override is None and r.traces_autocast]
        with contextlib.ExitStack() as stack:
            for runner in self._inlined:
                stack.callback(setattr, runner, "override", None)
                if (runner, runner.device) not in self._traced:
                    self._traced[runner, runner.device] = traced(runner)
                runner.override = self._traced[runner, runner.device]
                if torch.is_autocast_enabled(runner.device):
                    stack.enter_context(torch.autocast(runner.device, enabled=False))
            yield

    def _compile(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Convert the views in a graph, lift casts of weights out of it, and compile it."""
        backend = self.settings.run()
        if not self._inlined:
            plain: Callable[..., Any] = backend(gm, inputs)
            return plain
        eager = self.settings.backend == "eager"
        convert_views(gm, inputs, self._inlined, self._entries, eager=eager)
        lifted, examples = list[Lifted](), list(inputs)
        if self._weights.is_open:
            gm, examples, lifted = lift(gm, inputs, sums_inside=not eager)
        else:
            recompute_weight_casts(gm, inputs)
        with no_autocast():
            run: Callable[..., Any] = backend(gm, examples)
        run = with_copies(run, lifted, lambda: self._weights.copies if self._weights.is_open else None)
        devices = list({runner.device for runner in self._inlined})

        def call(*args: Any) -> Any:
            with no_autocast(devices):  # after a break inside a view, Python is in its region
                return run(*args)

        return call


def recompute_weight_casts(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Mark casts of parameters in a Dynamo graph as torch's checkpointing does, so that backward makes them again.

    AOTAutograd chooses the tensors to save for backward so that the fewest bytes move, and a low copy of a weight has
    half the bytes of the weight. But the weight is in memory anyway, while copies of all weights take additional
    memory. Recomputing the casts moves more bytes; where there is memory for copies, "per_step" casts once.
    """
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(value, nn.Parameter):
            for user in node.users:
                if user.op.startswith("call") and ops.name(user) == "to":
                    user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    user.meta["ac_graph_id"] = 0
