"""The compiled parts of a training step: model and loss in one graph, and what comes after backward in another.

    graph 1:  low copies of weights, inputs, target -> loss       its backward is compiled with it
    Python:   scale the loss, backward, count micro-batches
    graph 2:  gradients -> unscaled, checked, clipped; parameters and optimizer state -> stepped, or as they were

The casts of weights that are kept for a window are made between the two, and are inputs of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...dynamo import backend as dynamo
from ...dynamo.optimized import under_autocast
from ..weights.kept import Given, GraphInputs
from ..weights.weights import WeightCasts
from ..window.loss import LossFunction, loss_of
from .compile_settings import CompileSettings
from .compiled_region import Region
from .compiled_update import CompiledUpdate


class CompiledStep:
    """The compiled parts of a TrainStep, with counts of their graphs.

    Attributes:
        settings: What compiles it.
        loss: Model and loss.
        update: What comes after the backward of a window.
    """

    def __init__(self, settings: CompileSettings) -> None:
        self.settings = settings
        self.loss = Region("model and loss", loss_region, settings)
        self.update = CompiledUpdate(settings)

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
    def regions(self) -> tuple[Region, Region]:
        """Both compiled functions."""
        return self.loss, self.update.region

    def loss_of(
        self, weights: WeightCasts, model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any
    ) -> Tensor:
        """Return the loss of a micro-batch; arguments and errors are those of `fxamp.train.window.loss.loss_of`."""
        if self.settings.captures:
            torch.compiler.cudagraph_mark_step_begin()
        given = weights.make_ready()
        with contextlib.ExitStack() as stack:
            backend = self.settings.backend
            if isinstance(backend, dynamo.Backend):  # fxamp's backend converts what Dynamo captures under autocast
                stack.enter_context(under_autocast(backend.policy, model, inputs, {}))
            loss: Tensor = self.loss(weights.inputs, given, model, loss_fn, inputs, target)
        return loss

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
