"""The compiled parts of a training step: model and loss in one graph, and what comes after backward in another.

    graph 1:  low copies of weights, inputs, target -> loss       its backward is compiled with it
    Python:   scale the loss, backward, count micro-batches
    graph 2:  gradients of low copies, and of weights so far -> their sums
    graph 3:  gradients -> unscaled, checked, clipped; parameters and optimizer state -> stepped, or as they were

The casts of weights that are kept for a window are made before the first, and are inputs of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ...dynamo import backend as dynamo
from ...dynamo.outputs import under_autocast
from ..weights.kept import Given, GraphInputs
from ..weights.weights import WeightCasts
from ..window.loss import LossFunction, loss_of
from .compile_settings import CompileSettings
from .compiled_region import Region
from .compiled_update import CompiledUpdate
from .gradient_sums import GradientSums
from .order_of_sums import Read, keep_order_of_sums
from .recompute import recompute_weight_casts


class CompiledStep:
    """The compiled parts of a TrainStep, with counts of their graphs.

    Attributes:
        settings: What compiles it.
        loss: Model and loss.
        sums: What adds the gradients of low copies to those of the weights, after each backward.
        update: What comes after the backward of a window.
    """

    def __init__(self, settings: CompileSettings) -> None:
        self.settings = settings
        self.loss = Region("model and loss", loss_region, settings, self._prepare)
        self.sums = GradientSums(settings)
        self.update = CompiledUpdate(settings)
        self._reads: list[Read] = []  # what the graphs of the present call read

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
    def regions(self) -> tuple[Region, Region, Region]:
        """All compiled functions."""
        return self.loss, self.sums.region, self.update.region

    def loss_of(
        self, weights: WeightCasts, model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any
    ) -> Tensor:
        """Return the loss of a micro-batch; arguments and errors are those of `fxamp.train.window.loss.loss_of`."""
        if self.settings.captures:
            torch.compiler.cudagraph_mark_step_begin()
        given = self._given(weights)
        with contextlib.ExitStack() as stack:
            backend = self.settings.backend
            if isinstance(backend, dynamo.Backend):  # fxamp's backend converts what Dynamo captures under autocast
                stack.enter_context(under_autocast(backend.policy, model, inputs, {}))
            try:
                loss: Tensor = self.loss(weights.inputs, given, model, loss_fn, inputs, target)
            finally:
                self._reads.clear()  # which hold the copies
        return loss

    def after_backward(self, weights: WeightCasts) -> None:
        """Complete the gradients of the weights, once the backward of a micro-batch has run."""
        self.sums(weights.casts)

    def _given(self, weights: WeightCasts) -> list[Given | None]:
        if self.settings.captures or self.loss.breaks or self.loss.fallbacks:
            for cast in weights.casts:  # code outside of the graphs may read the weights too
                cast.alone = False
        given = weights.make_ready()
        self._reads = [(cast, *pair) for cast, pair in zip(weights.casts, given, strict=True) if pair is not None]
        return given

    def _prepare(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        keep_order_of_sums(gm, example_inputs, self._reads)
        recompute_weight_casts(gm, example_inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        """Compile again for the copy: compiled code refers to the objects that it was compiled for."""
        return CompiledStep(self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Compile again where it is loaded."""
        return CompiledStep, (self.settings,)


def loss_region(
    graph_inputs: GraphInputs,
    given: Sequence[Given | None],
    model: nn.Module,
    loss_fn: LossFunction | None,
    inputs: Any,
    target: Any,
) -> Tensor:
    """Return the loss; `torch.compile` compiles this. The model reads low copies of weights, which are inputs."""
    graph_inputs.begin(given)
    return loss_of(model, loss_fn, inputs, target)
