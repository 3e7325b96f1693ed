"""A step: a model with its loss and its batches, and how it is run under observation.

All diagnostics are given it in one way, `f(model_or_step, inputs, target, kwargs=, loss=, batches=, policies=)`.

    step.run(batch, "FP32")                       the model itself; "float64" likewise, by the same tensors
    step.run(batch, "autocast"), (batch, "O2")    the real kernels
    step.run(batch, "O2", Observer(value=...))    the graphs of O2 in FP32, which round nothing, and are looked at
"""

from __future__ import annotations

import contextlib
import math
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.rnn import PackedSequence

from passes._torch import pytree
from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy
from passes.graph.notes import is_ours

from ..capture.emitted import record_on
from ..capture.graph import Graph
from ..capture.graphs import Graphs, runner_of
from ..capture.inputs import device_of, resolve
from ..capture.user_graph import flat_inputs
from ..convert import convert, converted_in
from ..errors import NotAModuleError, in_short
from ..measure.counts import op_counts
from ..observe.emulation import Companions, Emulation, GraphSites, Observer, Site, is_fp32
from ..observe.interpret import Run
from ..observe.reference import as_made_of, generators, in_float64
from ..observe.snapshot import outside_of_regions
from ..observe.tensors import dense
from ..observe.watch import observed, run_instead
from ..observe.workload import Both, Loss, as_before, copies, loss_of, output_of
from ..view.graphs import plan_of
from .batches import Batch, Batches

AUTOCAST, FP32, FLOAT64 = "autocast", "FP32", "float64"
POLICIES = (AUTOCAST, "O1", "O2", "O3")
NO_REGION = "no torch.autocast region was entered: open the one that you train in around the call"
_SCALE = 2.0**16  # of an FP16 loss at first, as LossScaler's
F = TypeVar("F", bound=Callable[..., Any])
_ARGUMENTS = """\
model_or_step: A model, a view, a converted graph, or a TrainStep, which brings its own loss.
inputs: A tensor or a tuple for `model(*inputs)`, or a mapping for `model(**inputs)`, with the shapes that the
    model takes.
target: The second argument of the loss.
kwargs: Keyword inputs beside positional ones.
loss: A function of the output, or, with a target, of output and target, that gives one element. None takes the
    output's own: its `.loss`, itself if it is one element, or the one scalar in it that has a gradient, as in
    `(logits, loss)`, which the notes of the result say.
batches: Inputs, or pairs (inputs, target), in the place of `inputs`, taken one after the other. Of a sequence, and
    of an `itertools.islice`, it is all of them; of anything else, which may have no end, the first 8.
"""


def diagnostic(function: F) -> F:
    """Describe in the docstring of a diagnostic the arguments that all of them have, before its own."""
    head, args, rest = (function.__doc__ or "").partition("Args:\n")
    indent = rest[: len(rest) - len(rest.lstrip(" "))]
    function.__doc__ = head + args + textwrap.indent(_ARGUMENTS, indent) + rest
    return function


@dataclass(frozen=True)
class Outcome:
    """What one step gave."""

    loss: float  # undivided and unscaled
    gradients: Mapping[str, Tensor]  # unscaled, by the name of the parameter; in FP32, or in float64
    output: Any  # of the model; None where its graphs were looked at


class _Colouring:
    """What is decided by a policy, and under costs of its own, on the graphs that another one has captured."""

    def __init__(self, base: str, policy: Policy, costs: CostModel | None) -> None:
        self.base, self.policy, self.costs = base, policy, costs
        self._decided: dict[int, tuple[Graph, GraphModule, Plan]] = {}

    def of(self, known: Graph) -> tuple[Graph, GraphModule, Plan]:
        """Return a captured graph, and what would be emitted for it, with its plan; that is decided once."""
        if id(known.emitted) not in self._decided:
            self._decided[id(known.emitted)] = known, *known.decided(self.policy, self.costs)
        return self._decided[id(known.emitted)]


class Step:
    """A model, its loss and its batches; and the model without its conversion, run under policies.

    Steps leave everything as it was. What is below `author` is for models that are converted whole, or not at all.

    Args:
        model: a model, a view, or a converted graph.
        batches: pairs of inputs and target, at least one.
        loss: a function of the output, or of output and target; None for the output's own loss.
        train_step: the TrainStep that was given, None for a model.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], loss: Loss = None, train_step: Any = None) -> None:
        self.model, self.batches, self.loss, self.train_step = model, batches, loss, train_step
        self.uncaptured = set[str]()  # the parameters with a gradient that no graph has read which was looked at
        self.reference = FLOAT64  # what errors are measured against, in words
        self.notes = dict[str, None]()  # what is to be said of the loss, each once
        self._views: dict[str, Any] = {}
        self._policies: dict[str, Policy] = {}
        self._sites: dict[int, tuple[GraphModule, GraphSites]] = {}
        self._written: set[int] | None = None  # the parameters that steps have written, by identity
        self._colourings: dict[str, _Colouring] = {}
        self._scales: dict[str, float] = {}  # of the loss, that were found to fit
        self.draws = False  # whether a step draws random numbers

    @property
    def example(self) -> tuple[Any, Any]:
        """The inputs of the first batch, as positional and as keyword inputs of `convert`."""
        inputs = self.batches[0][0]
        if isinstance(inputs, Both):
            return inputs.args, inputs.kwargs
        return (None, inputs) if isinstance(inputs, Mapping) else (inputs, None)

    def loss_scale(self, asked: float | None) -> float:
        """Return the loss scale that is asked for; None is that of the TrainStep, else 1.

        Raises:
            PolicyError: it is not a finite number above 0.
        """
        if asked is None:
            return float(self.train_step.scaler.get_scale()) if self.train_step is not None else 1.0
        if not isinstance(asked, (int, float)) or isinstance(asked, bool) or not 0 < asked < math.inf:
            raise PolicyError(f"scale is a loss scale, a finite number above 0, not {asked!r}.")
        return float(asked)

    def unlike(self) -> Iterator[Batch]:
        """Yield the batches that are given otherwise than all before them: those may take another path."""
        seen = list[Any]()
        for batch in self.batches:
            leaves, spec = pytree.tree_flatten(batch)
            kind = spec, [(t.dtype, t.dim()) if isinstance(t, Tensor) else t if t is None else type(t) for t in leaves]
            if kind not in seen:
                seen.append(kind)
                yield batch

    @contextlib.contextmanager
    def as_before(self, model: nn.Module, written: Collection[int] | None = None) -> Iterator[list[Tensor]]:
        """Restore what a step changes, of a model and of a loss that is a module."""
        of_loss = as_before(self.loss) if isinstance(self.loss, nn.Module) else contextlib.nullcontext()
        with of_loss, as_before(model, written) as restored:
            yield restored

    def call(self, model: nn.Module, batch: Batch, companions: Companions | None = None) -> tuple[Any, Tensor]:
        """Call a model, or one that is called alike, on copies of the inputs of one batch; return output and loss.

        The loss reads the `companions` of an output.

        Raises:
            PolicyError: there is no loss, or it has more elements than one.
        """
        inputs, target = copies(batch)
        output = output_of(model, inputs)
        output = output if companions is None else companions.of(output)
        loss, notes = loss_of(output, target, self.loss)
        self.notes.update(dict.fromkeys(notes))
        return output, loss

    def under(self, policies: Any) -> Step:
        """Return a step whose model is converted by a policy, if one is asked for.

        Raises:
            PolicyError: several are asked for, or the model is converted already, or it is that of a TrainStep.
        """
        policy = one_policy(policies)
        if policy is None:
            return self
        if self.train_step is not None or converted_in(self.model):
            what = "a TrainStep has the policy of its model" if self.train_step is not None else (
                "this model is converted")  # fmt: skip
            raise PolicyError(f"{what}: leave out policies=, or give the model that it was made of.")
        return self.of(convert(self.model, policy=policy, check=False))

    def of(self, model: nn.Module) -> Step:
        """Return the same step of another model."""
        return Step(model, self.batches, self.loss, self.train_step)

    @cached_property
    def author(self) -> nn.Module:
        """The author's model, without a conversion.

        Raises:
            PolicyError: parts of the model are converted, or a graph is.
        """
        parts = converted_in(self.model)
        if not parts:
            return self.model
        runner = runner_of(parts[0][1])
        if parts[0][0] or runner is None:
            what = f"'{parts[0][0]}'" if parts[0][0] else "it"
            raise PolicyError(
                f"{type(self.model).__name__}: {what} is converted already, so other policies cannot be compared: "
                "give the model that it was made of, or a view of the whole."
            )
        model: nn.Module = runner.model
        asked = resolve(self.view_policy, model, (self.batches[0][0],))
        self.add(self.name, asked, self.model)
        if runner.graphs.replayed is None:
            self._views[str(asked)] = self.model
        return model

    @cached_property
    def view_policy(self) -> Any:
        """The policy of the view that was given, None for a model."""
        runner = runner_of(self.model)
        return None if runner is None else runner.graphs.asked

    @cached_property
    def name(self) -> str:
        """The name of that policy; "" for a model; of a view that carries out a plan it is none to ask for."""
        runner = runner_of(self.model)
        if runner is None:
            return ""
        return str(self.view_policy) if runner.graphs.replayed is None else f"{self.view_policy} by a plan"

    @cached_property
    def device(self) -> str:
        """The device type that it runs on."""
        return device_of(self.author, (self.batches[0][0],))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        return {n: p for n, p in self.author.named_parameters() if p.requires_grad}

    def policy(self, name: str) -> Policy:
        """Return a policy with its dtype and device; that of autocast rounds what O1 rounds.

        Raises:
            PolicyError: there is no such policy, or it rounds nothing.
        """
        model = self.author
        if name in self._policies:
            return self._policies[name]
        asked = Policy.of("O1" + name[len(AUTOCAST) :] if name.startswith(AUTOCAST) else name)
        if not asked.level.rounds:
            raise PolicyError(
                f"{name} rounds nothing: its error is that of FP32, which the report gives beside others."
            )
        return resolve(asked, model, (self.batches[0][0],))

    def policies(self, asked: Sequence[str] | str | None) -> tuple[str, ...]:
        """Return the policies to compare: those asked for, or that of the view that was given, or the usual four.

        Raises:
            PolicyError: one is not a policy.
        """
        if asked is None:
            return (self.name,) if self.name else POLICIES
        names = names_of(asked)
        for name in names:
            self.policy(name)
        return names

    def view(self, name: str) -> Any:
        """Return the model converted by a policy, made once."""
        policy = self.policy(name)
        key = name if name in self._policies else str(policy)
        if key not in self._views:
            args = self.example if isinstance(self.author, GraphModule) else (None, None)
            self._views[key] = convert(self.author, *args, policy=policy, check=False)
            if name in self._colourings:
                runner_of(self._views[key]).graphs.costs = self._colourings[name].costs
        return self._views[key]

    def plan(self, name: str) -> Plan:
        """Return the plan of a policy; of one that was decided on captured graphs nothing is captured for it."""
        colouring = self._colourings.get(name)
        if colouring is None or name in self._views:
            return plan_of(runner_of(self.view(name)))
        return plan_of(runner_of(self.view(colouring.base)), lambda known: colouring.of(known)[2])

    def decide(self, name: str, base: str, policy: Policy, costs: CostModel | None = None) -> None:
        """Know a policy, under costs of its own, by what is decided on the graphs that another one has captured.

        Steps under its name run those graphs; the model is converted by it only when its view is asked for.
        """
        if name not in self._views:
            self._policies[name], self._colourings[name] = policy, _Colouring(base, policy, costs)

    def add(self, name: str, policy: Policy, view: nn.Module) -> None:
        """Compare a view under a name of its own."""
        self._policies[name], self._views[name] = policy, view

    def run(
        self, batch: Batch, how: str, observer: Observer | None = None, *, everywhere: bool = False,
        backward: bool = True, scale: float = 1.0,
    ) -> Outcome:  # fmt: skip
        """Run a step with real kernels; or, where somebody observes, by the emitted graphs of a policy in FP32.

        Args:
            batch: inputs and target.
            how: the name of a policy, "autocast", "FP32", which is the model itself, or "float64".
            observer: sees the values of graphs, which then have no casts, and round nothing.
            everywhere: look also inside kernels that run in FP32 by the plan.
            backward: run it, too.
            scale: of the loss, where somebody observes: gradients are scaled there, and those returned are not.
                Without an observer it is found: see `scaled`.

        Raises:
            CaptureError: no graph ran that an observer sees, or none that reads a parameter with a gradient.
        """
        if how == FLOAT64:
            return self._step(self.author, batch, contextlib.nullcontext, wide=True)
        if observer is not None:
            return self._observed(batch, how, observer, everywhere, backward, scale)
        model, region = self._how(how)
        return self.scaled(how, lambda scale: self._step(model, batch, region, scale, reference=how == FP32))

    def scaled(self, name: str, run: Callable[[float], Outcome]) -> Outcome:
        """Run a step with the loss scale of a policy, which is halved until all gradients are finite.

        As in training the next batch begins with the scale that this one needed. A scale is a power of two, so that
        gradients are as if there were none, but for what would be rounded to zero.

        Args:
            name: of the policy; nothing but FP16 is scaled.
            run: runs the step with a scale, on the same random numbers each time; its gradients are unscaled.
        """
        scale = first = self.scale(name)
        outcome = run(scale)
        while scale > 1 and not _is_finite(outcome):
            scale /= 2
            outcome = run(scale)
        if scale < first and _is_finite(outcome):
            self._scales[name] = scale
        return outcome

    def scale(self, name: str) -> float:
        """Return the scale of a policy's loss: 65536 in FP16 until a step needs a smaller one, 1 in other dtypes."""
        return self._scales.get(name, _SCALE) if self._is_fp16(name) else 1.0

    def skips(self, name: str) -> int:
        """Return how many steps in FP16 were skipped until the loss scale fitted."""
        return round(math.log2(_SCALE / self.scale(name))) if self._is_fp16(name) else 0

    def _is_fp16(self, name: str) -> bool:
        return name != FP32 and self.policy(name).dtype == torch.float16

    def casts(self, name: str) -> tuple[int, int]:
        """Return how many casts a step with the real kernels makes, and the bytes that they read and write.

        Of batches that take several paths, it is that with the most bytes.
        """
        most = (0, 0)
        for batch in self.unlike():
            with self.as_before(self.author), outside_of_regions():
                counts = op_counts(self.forward(name, batch))
            most = max(most, (counts.cast_bytes, counts.casts))
        return most[1], most[0]

    def forward(self, name: str, batch: Batch) -> Callable[[], Tensor]:
        """Return a function that runs a forward with the real kernels, and gives the loss."""
        model, region = self._how(name)

        def run() -> Tensor:
            with region():
                return self.call(model, batch)[1]

        return run

    def _how(self, name: str) -> tuple[nn.Module, Callable[[], Any]]:
        """Return what runs under a name, and the autocast region around it."""
        if name == FP32:
            return self.author, contextlib.nullcontext
        low: Any = self.policy(name).dtype
        if name.startswith(AUTOCAST):
            return self.author, lambda: torch.autocast(self.device, dtype=low)
        colouring = self._colourings.get(name)
        if colouring is None or name in self._views:
            return self.view(name), contextlib.nullcontext
        return self.view(colouring.base), lambda: run_instead(lambda known, _, args: colouring.of(known)[1](*args))

    def _observed(
        self, batch: Batch, name: str, observer: Observer, everywhere: bool, backward: bool, scale: float
    ) -> Outcome:
        read, companions = set[int](), Companions()  # inputs of graphs, and what crosses breaks

        def run(known: Graph, graph: GraphModule, args: tuple[Any, ...]) -> Any:
            read.update(map(id, (graph, *args, *graph.parameters())))
            return Emulation(graph, self._sites_of(graph, known), observer, everywhere, companions).start(*args)

        with run_instead(run):
            outcome = self._step(
                self.view(name), batch, contextlib.nullcontext, scale, backward=backward, companions=companions
            )
        missing = {n for n, p in self.author.named_parameters() if n in outcome.gradients and id(p) not in read}
        if not read or (outcome.gradients and len(missing) == len(outcome.gradients)):
            raise CaptureError(
                f"{type(self.author).__name__}: nothing of it was captured, so nothing can be predicted."
            )
        self.uncaptured |= missing
        return replace(outcome, output=None)

    def look(self, batch: Batch, name: str, see: Callable[[Site, Tensor], None]) -> None:
        """Run a forward with the real kernels of a policy, node by node, and look at the float values."""

        def run(known: Graph, graph: GraphModule, args: tuple[Any, ...]) -> Any:
            sites = self._sites_of(graph, known)

            def call(run: Run, n: Node) -> Any:
                value = run.value_of(n)
                if not is_ours(n) and isinstance(value, Tensor) and value.is_floating_point():
                    see(sites.of(n), value)
                return value

            return Run(graph, call).start(*args)

        with run_instead(run):
            self._step(self.view(name), batch, contextlib.nullcontext, backward=False)

    def _sites_of(self, graph: GraphModule, known: Graph) -> GraphSites:
        """Return the sites of an emitted graph, or of one that was decided on its capture."""
        if id(graph) not in self._sites:
            inputs = graph.graph.find_nodes(op="placeholder")
            names = {inputs[i].name: known.names.get(i, "") for i in known.places}
            self._sites[id(graph)] = graph, GraphSites(graph, names)
        return self._sites[id(graph)][1]

    def rounding(self, name: str) -> Iterator[Site]:
        """Yield what the graphs of a policy round, in the state of the model and with gradients; nothing is run."""
        colouring, state = self._colourings.get(name), (self.author.training, "grad")
        view = self.view(name if colouring is None else colouring.base)
        graphs: Graphs = runner_of(view).graphs
        for batch in () if graphs else self.unlike():  # nothing is captured yet
            self._step(view, batch, contextlib.nullcontext, backward=False)
        for known in graphs.distinct():
            if (known.state.training, known.state.grad) == state:
                graph = known.emitted if colouring is None else colouring.of(known)[1]
                yield from self._sites_of(graph, known).rounding()

    def true(self, batch: Batch, plain: Outcome) -> Outcome:
        """Run a batch by what errors are measured against, `reference`: in float64; where that does not run, `plain`.

        Args:
            batch: inputs and target; the first one shows whether float64 runs.
            plain: what FP32 gave, which shows whether a step draws random numbers.
        """
        try:
            return self.run(batch, FLOAT64) if self.reference == FLOAT64 else plain
        except Exception as e:  # whatever a model raises that names FP32 in its code
            if batch is not self.batches[0]:
                raise
            self.reference = f"FP32, since float64 does not run ({in_short(e):.120})"
            return plain

    def refuse_infinite(self, outcome: Outcome, batch: Batch, number: int) -> None:
        """Raise PolicyError for a batch on which FP32 itself is not finite, and name the node."""
        if math.isfinite(outcome.loss) and _is_finite(outcome):
            return
        sites: list[Site] = []

        def value(site: Site, value: Tensor) -> Tensor:
            if not sites and not bool(value.detach().isfinite().all()):
                sites.append(site)
            return value

        with contextlib.suppress(CaptureError):
            self.run(batch, "O1", Observer(value), backward=False)
        where = f"first at {sites[0].key} ({sites[0].line})" if sites else "in its backward or in its loss"
        raise PolicyError(
            f"batch {number}: FP32 itself is not finite, {where}: nothing can be said of roundings on it."
        )

    def _step(
        self, model: nn.Module, batch: Batch, region: Callable[[], Any], scale: float = 1.0, *, backward: bool = True,
        wide: bool = False, reference: bool = False, companions: Companions | None = None,
    ) -> Outcome:  # fmt: skip
        """Run a step of a model, in float64 if it is `wide`, and leave everything as it was.

        One that is a `reference`, or wide, computes nothing in 8 bits. The loss reads the `companions` of an output.

        All parameters are copied beforehand for the first step, and then those that a step has written: each begins
        with the same parameters and random numbers, and runs the same code.
        """
        if wide:
            batch = pytree.tree_map(lambda v: v.double() if is_fp32(v) else v, batch)
        author = self.author
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            restored = stack.enter_context(self.as_before(author, self._written))
            around = visible_graphs([model]), warnings.catch_warnings(), torch.enable_grad(), outside_of_regions()
            for context in around:
                stack.enter_context(context)
            warnings.simplefilter("ignore")  # of FP16 without a GradScaler: the loss is scaled here
            if wide or reference:
                stack.enter_context(as_made_of(author))
            if wide:
                stack.enter_context(in_float64(author, draws=self.draws))
            before = generators(self.device)
            with region():
                output, loss = self.call(model, batch, companions)
            self.draws = self.draws or not all(map(torch.equal, before, generators(self.device)))
            if backward and loss.requires_grad:
                (loss.double() * scale).backward()
            gradients = {n: dense(p.grad) for n, p in author.named_parameters() if p.grad is not None}
            gradients = {n: g if scale == 1 else g / scale for n, g in gradients.items()}
            outcome = Outcome(float(loss.detach()), gradients, pytree.tree_map_only(Tensor, Tensor.detach, output))
        if backward and not wide:
            self._written = {*(self._written or ()), *map(id, restored)}
        return outcome


def step_of(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None,
) -> Step:  # fmt: skip
    """Read what a diagnostic is given.

    Raises:
        NotAModuleError: there is no model.
        CaptureError: the model is on the meta device, where nothing runs.
        PolicyError: there are no batches, or batches beside inputs; or a TrainStep is given a loss.
    """
    model = model_or_step if isinstance(model_or_step, nn.Module) else getattr(model_or_step, "model", None)
    if not isinstance(model, nn.Module):
        raise NotAModuleError(f"a torch.nn.Module or a TrainStep is needed, not {type(model_or_step).__name__}.")
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is on the meta device, where nothing runs: fxamp.plan decides for such a model; "
            "to run it, make it on a device, with model.to_empty(device=...)."
        )
    train_step = None if model_or_step is model else model_or_step
    if train_step is not None and loss is not None:
        raise PolicyError("a TrainStep brings its own loss: leave out loss=.")
    loss = train_step.loss_fn if train_step is not None else loss
    if kwargs:
        if batches is not None or isinstance(inputs, Mapping):
            raise PolicyError("kwargs= are keyword inputs beside positional ones: give a mapping, or batches, alone.")
        positional = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
        inputs = dict(kwargs) if inputs is None or inputs == () else Both(positional, dict(kwargs))
    if (inputs is None) == (batches is None):
        raise PolicyError("give inputs, or batches= in their place.")
    if batches is None:
        return Step(model, ((inputs, target),), loss, train_step)
    if target is not None:
        raise PolicyError("with batches= a target comes with its batch: give pairs (inputs, target).")
    if not isinstance(batches, Iterable):
        raise PolicyError(f"batches= is an iterable of inputs, not {type(batches).__name__}.")
    return Step(model, batches if isinstance(batches, Batches) else Batches(batches, model, loss), loss, train_step)


def one_policy(policies: Any) -> Any:
    """Return the policy that is asked for; None where none is.

    Raises:
        PolicyError: there are several.
    """
    if not isinstance(policies, (list, tuple)):
        return policies
    if len(policies) != 1:
        raise PolicyError(f"this diagnostic takes one policy, not {len(policies)}: ask for one after the other.")
    return policies[0]


def names_of(policies: Sequence[Any] | str) -> tuple[str, ...]:
    """Return policies as strings, each once.

    Raises:
        PolicyError: there are none.
    """
    names = tuple(dict.fromkeys(str(p) for p in ([policies] if isinstance(policies, (str, Policy)) else policies)))
    if not names:
        raise PolicyError("policies= is empty: name at least one, such as 'O1'.")
    return names


@contextlib.contextmanager
def visible_graphs(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Put what a watch can see in the place of the `forward` of converted graphs."""
    changed = [(p, record["plan"]) for p in parts if isinstance(p, GraphModule) and (record := record_on(p))]
    for part, plan in changed:
        part.__dict__["forward"] = _by_node(part, Graph(part, plan, part))
    try:
        yield
    finally:
        for part, _ in changed:
            del part.__dict__["forward"]


def _by_node(part: GraphModule, known: Graph) -> Callable[..., Any]:
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = tuple(flat_inputs(part, args, kwargs))
        return part.graph.process_outputs(observed(known, part, "eager", run, inputs))

    return forward


def _is_finite(outcome: Outcome) -> bool:
    return all(bool(g.isfinite().all()) for g in outcome.gradients.values())
