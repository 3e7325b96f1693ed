"""The compiled parts of a training step: model and loss in one graph, and what comes after backward in another.

    graph 1:  low copies of weights, inputs, target -> loss       its backward is compiled with it; the output only if
              it is asked for: what is returned is stored, and autograd hands backward a tensor of zeros for it
    Python:   scale the loss, backward, count micro-batches, look at gradients
    graph 2:  gradients -> unscaled, clipped; weights, optimizer state, low copies -> stepped, or as they were

A view in the model is traced into the first graph, and its casts of weights become inputs of it: leaves of autograd,
whose gradients stay in 16 bits until the second graph reads them. Where that cannot be, `leaves.reason` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from passes._torch import pytree
from passes.contract.errors import PolicyError
from passes.contract.plan import Stored
from passes.contract.policy import Level
from passes.graph.notes import is_inserted
from passes.graph.values import LOW_DTYPES, dtypes_of, no_autocast

from .._torch import has_gradient_hook, is_sharded, registrations
from ..capture.graph import Graph, copied
from ..observe import workload
from ..observe.watch import Part, observed
from ..view.copies import Lifted, lift, lifted_inputs
from ..view.hooks import HookWatch
from ..view.leaves import Leaves
from ..view.runner import Runner
from ..view.traced import convert_views, traced
from ..view.view import is_view, runner_of
from .at_rest import is_o2, options_for, refuse_missing, stored_by_plans, why_not
from .compiled_update import Compiled, CompiledUpdate
from .compiler import CompileSettings, Counted, Region
from .weights import WeightCasts
from .window import LossFunction, loss_of

if TYPE_CHECKING:
    from ..measure.inductor import Counts

Output = Literal["low", "full"]


def require_output(output: object, compiles: bool) -> None:
    """Raise PolicyError unless `output` says what a compiled step keeps of the model's output."""
    if output is None:
        return
    if output not in get_args(Output):
        raise PolicyError(f'output must be None, "low" or "full", got {output!r}')
    if not compiles:
        raise PolicyError(
            f"output={output!r} says what a compiled step keeps of the model's output: leave it out, since "
            "result.output has what the model returned, or set compile=True"
        )


def _loss(model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any) -> Tensor:
    return loss_of(model, loss_fn, inputs, target)[0]


def _loss_and_output(model: nn.Module, loss_fn: LossFunction | None, inputs: Any, target: Any) -> tuple[Tensor, Any]:
    loss, output = loss_of(model, loss_fn, inputs, target)
    return loss, pytree.tree_map_only(Tensor, _kept, output)


def _kept(value: Tensor) -> Tensor:
    """Return an output of the model without its gradient; in a graph this marks it."""
    return value.detach()


torch.compiler.allow_in_graph(_kept)


class CompiledStep:
    """The compiled parts of a TrainStep, with counts of their graphs: `loss` is that of model and loss."""

    def __init__(
        self, settings: CompileSettings, model: nn.Module, weights: WeightCasts, output: Output | None = None,
        update: Compiled | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.output, self.leaves, self.not_at_rest = settings, output, Leaves(), ""
        self._model, self._weights = model, weights
        function = _loss if output is None else _loss_and_output
        self.loss = Region("model and loss", function, settings, self._compile)
        self.update = CompiledUpdate(settings, self.leaves, update)
        views = [m for m in model.modules() if is_view(m)]
        # The hooks by which FSDP2 gathers break graphs: there a view runs graphs of its own.
        self._runners = [runner_of(view) for view in views if not any(map(is_sharded, view.modules()))]
        self._traced: dict[tuple[Runner, str, bool], Callable[..., Any]] = {}
        self._inlined: list[Runner] = []  # in the present call
        self._graphs: list[Graph] = []  # the graphs of views that were captured here
        self._hooks = HookWatch(model)
        self._stores_anew = False  # a graph was compiled, of which it was not looked at what it stores
        self._registered, self._named = -2, list[tuple[str, nn.Parameter]]()

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
    def stored(self) -> tuple[Stored, ...]:
        """What the graphs of the last micro-batch store in 16 bits where O1's store FP32, in the order of backward.

        That is how a compiled step follows O2; `not_at_rest` says why it follows the plan of an eager O2 instead.
        """
        return tuple(replace(Stored(**each), graph=at) for at, each in self.loss.kernels.stored)

    @property
    def regions(self) -> tuple[Counted, ...]:
        """All compiled functions."""
        return self.loss, self.update.region

    def forward(self, loss_fn: LossFunction | None, inputs: Any, target: Any) -> tuple[Tensor, Any]:
        """Return loss and output of a micro-batch, as `fxamp.train.window.loss_of` does; None for no output."""
        if self.settings.captures:
            torch.compiler.cudagraph_mark_step_begin()
        if self._hooks.moved():  # of which torch's guards on a model without hooks see nothing
            self.loss.forget()
        self.leaves.begin(self._why_no_leaves())
        with self._inlining(inputs, loss_fn):
            returned = self.loss(self._model, loss_fn, inputs, target)
        if self.output is None:
            return returned, None
        _refuse_objects(returned[1])
        return returned[0], returned[1]

    def _why_no_leaves(self) -> str:
        """Return why weights are not read through leaves, whose gradients the weights do not see; "" if they are."""
        if self._weights.asked == "per_use":
            return "weights='per_use' casts them in the graph"
        if self.settings.captures:
            return "CUDA graphs record the addresses of gradients"
        if not self._runners:
            return "no view is traced into the graph"
        if self._registered != (now := registrations()):
            self._registered, self._named = now, list(self._model.named_parameters())
        hooked = (name for name, p in self._named if has_gradient_hook(p))
        return next((f"'{name}' has a hook on its gradient" for name in hooked), "")

    def after_backward(self, last: bool) -> None:
        """Add the gradients of a micro-batch up at the weights, unless the update reads them: those of the `last`."""
        self.loss.kernels.after_backward()
        if self._stores_anew:
            refuse_missing(self.stored, self._runners)
            self._stores_anew = False
        self.update.region.kernels.ran.clear()
        if not last:
            self.leaves.arrive(self.update.add)

    @contextlib.contextmanager
    def _inlining(self, inputs: Any, loss_fn: LossFunction | None) -> Iterator[None]:
        """Let the views be traced into the graph, except those whose `forward` somebody has replaced."""
        for runner in self._runners:
            runner.settle((inputs,))
        self._inlined = [r for r in self._runners if r.override is None]
        with contextlib.ExitStack() as stack:
            for runner in self._inlined:
                stack.callback(setattr, runner, "override", None)
                # Where the loss that the model computes is all that is read of its output, the rest is not cast.
                alone = loss_fn is None and self.output is None and is_view(self._model)
                key = runner, runner.graphs.device, alone and runner_of(self._model) is runner
                if key not in self._traced:
                    reads = (lambda output: {"loss": workload.loss_of(output, None, None)[0]}) if key[2] else None
                    self._traced[key] = traced(runner, reads)
                runner.override = self._traced[key]
                if torch.is_autocast_enabled(runner.graphs.device):
                    stack.enter_context(torch.autocast(runner.graphs.device, enabled=False))
            yield

    def _compile(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Convert the views in a graph, lift casts of weights out of it, and compile it."""
        if not self._inlined:
            _detach_outputs(gm, as_computed=False)
            plain: Callable[..., Any] = self.settings.run()(gm, inputs)
            return plain
        eager = self.settings.backend == "eager"
        settings, level = self.settings, None  # of the views' own policies
        if any(map(is_o2, self._inlined)) or stored_by_plans(self._inlined):
            self.not_at_rest = why_not(self._inlined, settings)
            if not self.not_at_rest:
                self._stores_anew = True
                more = options_for(self._inlined, graph=len(self.loss.kernels.ran))
                settings, level = replace(settings, options={**settings.options, **more}), Level.O1
        parts = convert_views(gm, inputs, self._inlined, self._graphs, eager=eager, level=level)
        _detach_outputs(gm, as_computed=self.output == "low")
        lifted, examples = list[Lifted](), list(inputs)
        if self._weights.is_open or not self.leaves.reason:
            gm, examples, lifted = lift(gm, inputs, sums_inside=not eager)
            parts = [_without(part, gm) for part in parts]
        planned, emitted = tuple(parts), copied(gm)
        inner = self.settings.backend
        by = inner if isinstance(inner, str) else self.settings.name
        with no_autocast():
            made: Callable[..., Any] = settings.run()(gm, examples)

        def again(options: dict[str, Any], given: list[Any]) -> Callable[..., Any]:
            more = replace(settings, options={**settings.options, **options})
            compiled: Callable[..., Any] = more.run()(copied(emitted), given)
            return compiled

        devices, weights = list({runner.graphs.device for runner in self._inlined}), self._weights

        def call(*args: Any) -> Any:
            with no_autocast(devices):  # after a break inside a view, Python is in its region
                if self.leaves.reason:
                    low = lifted_inputs(lifted, lambda: weights.copies if weights.is_open else None, args, whole=True)
                else:
                    low = self.leaves.all_of(lifted, args)
                return observed(planned, emitted, by, made, (*args, *low), again)

        return call


def _without(part: Part, lifted: GraphModule) -> Part:
    assert part.names is not None
    here = {n.name for n in lifted.graph.nodes}
    return replace(
        part, names={name: planned for name, planned in part.names.items() if name in here},
        lifted=frozenset(planned for name, planned in part.names.items() if name not in here),
    )  # fmt: skip


def _detach_outputs(gm: GraphModule, as_computed: bool) -> None:
    """Detach the outputs that a graph keeps, those of low values before their casts to FP32 if `as_computed`."""
    for node in gm.graph.find_nodes(op="call_function", target=_kept):
        node.target, cast = torch.Tensor.detach, node.args[0]
        restored = isinstance(cast, Node) and is_inserted(cast) and cast.args[1] == torch.float32
        if as_computed and restored and dtypes_of(cast.args[0].meta.get("val")) in LOW_DTYPES:
            node.args = cast.args[:1]
    gm.recompile()


def _refuse_objects(output: Any) -> None:
    """Raise PolicyError where an output is more than tensors and numbers in containers that torch knows."""
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, (Tensor, int, float, complex, str, bool, type(None))):
            raise PolicyError(
                f"the model returns an object of class {type(leaf).__name__}, of which a compiled step cannot keep the "
                "tensors detached: leave output= out, or return tensors in tuples, lists and mappings"
            )
