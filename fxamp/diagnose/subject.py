"""One step of a model under a policy, under autocast, in FP32 or in float64: its loss and its gradients."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from passes._torch import pytree
from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError, PolicyError
from passes.contract.policy import Policy
from passes.graph.notes import is_ours

from ..capture.emitted import record_on
from ..capture.graph import Graph
from ..capture.graphs import Graphs, runner_of
from ..capture.inputs import device_of, resolve
from ..convert import convert, converted_in
from ..errors import in_short
from ..measure.counts import step_counts
from ..observe.eight_bits import as_made_of
from ..observe.emulation import At, Decides, Edge, Emulation, GraphSites, Read, Site, is_fp32
from ..observe.interpret import Run
from ..observe.snapshot import outside_of_regions
from ..observe.tensors import dense
from ..observe.watch import run_instead
from .step import Batch, GivenStep, watched_graphs
from .wide import generators, in_float64

AUTOCAST, FP32 = "autocast", "FP32"
POLICIES = (AUTOCAST, "O1", "O2", "O3")
_SCALE = 2.0**16  # of an FP16 loss at first, as LossScaler's


@dataclass(frozen=True)
class Ran:
    """What one step gave.

    Attributes:
        loss: undivided and unscaled.
        gradients: unscaled, by the name of the parameter; in FP32, or in float64.
        output: of the model; None where it was emulated.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    output: Any


class Decided:
    """What is decided by a policy, and under costs of its own, on the graphs that another one has captured."""

    def __init__(self, base: str, policy: Policy, costs: CostModel | None) -> None:
        self.base, self.policy, self.costs = base, policy, costs
        self._graphs: dict[int, tuple[Graph, GraphModule]] = {}

    def graph(self, known: Graph) -> GraphModule:
        """Return what would be emitted for a captured graph, decided once."""
        if id(known.emitted) not in self._graphs:
            self._graphs[id(known.emitted)] = known, known.decided(self.policy, self.costs)
        return self._graphs[id(known.emitted)][1]

    def run(self, known: Graph, _: GraphModule, args: tuple[Any, ...]) -> Any:
        """Run that in the place of what was emitted."""
        return self.graph(known)(*args)


class Subject:
    """The model of a diagnostic without its conversion, and how it is converted by other policies.

    Args:
        given: what the diagnostic was given: a model, a view, or a TrainStep over one of these.

    Attributes:
        model: the author's model; the steps run leave it as it was.
        own: the policy of the view that was given, None for a model.
        name: of that policy, for the methods below; of a view that carries out a plan it is none that can be asked for.
        uncaptured: the parameters with a gradient that no graph has read which was emulated.
        device: the device type that it runs on.

    Raises:
        PolicyError: parts of the model are converted, or a graph is.
    """

    def __init__(self, given: GivenStep) -> None:
        parts = converted_in(given.model)
        self.given, self.model, self.own, self.name = given, given.model, None, ""
        self.uncaptured: set[str] = set()
        self._views: dict[str, Any] = {}
        self._named: dict[str, Policy] = {}
        if parts:
            runner = runner_of(parts[0][1])
            if parts[0][0] or runner is None:
                what = f"'{parts[0][0]}'" if parts[0][0] else "it"
                raise PolicyError(
                    f"{type(given.model).__name__}: {what} is converted already, so other policies cannot be compared: "
                    "give the model that it was made of, or a view of the whole."
                )
            self.model, self.own = runner.model, runner.graphs.asked
        self.device = device_of(self.model, (given.batches[0][0],))
        if self.own is not None:
            self.name = str(self.own) if runner.graphs.replayed is None else f"{self.own} by a plan"
            self.add(self.name, resolve(self.own, self.model, (given.batches[0][0],)), given.model)
            if runner.graphs.replayed is None:
                self._views[str(self.policy(self.name))] = given.model
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._sites: dict[int, tuple[GraphModule, GraphSites]] = {}
        self._written: set[int] | None = None  # the parameters that steps have written, by identity
        self._decided: dict[str, Decided] = {}
        self._scales: dict[str, float] = {}  # of the loss, that were found to fit
        self._draws = False  # whether a step draws random numbers

    def policy(self, name: str) -> Policy:
        """Return a policy with its dtype and device; that of autocast rounds what O1 rounds.

        Raises:
            PolicyError: there is no such policy, or it rounds nothing.
        """
        if name in self._named:
            return self._named[name]
        asked = Policy.of("O1" + name[len(AUTOCAST) :] if name.startswith(AUTOCAST) else name)
        if not asked.level.rounds:
            raise PolicyError(
                f"{name} rounds nothing: its error is that of FP32, which the report gives beside others."
            )
        return resolve(asked, self.model, (self.given.batches[0][0],))

    def view(self, name: str) -> Any:
        """Return the model converted by a policy, made once."""
        key = name if name in self._named else str(self.policy(name))
        if key not in self._views:
            self._views[key] = self.converted(self.policy(name))
            if name in self._decided:
                runner_of(self._views[key]).graphs.costs = self._decided[name].costs
        return self._views[key]

    def converted(self, policy: Policy) -> Any:
        """Return the model converted by a policy."""
        args = self.given.example if isinstance(self.model, GraphModule) else (None, None)
        return convert(self.model, *args, policy=policy, check=False)

    def decide(self, name: str, base: str, policy: Policy, costs: CostModel | None = None) -> None:
        """Know a policy, under costs of its own, by what is decided on the graphs that another one has captured.

        Steps under its name run those graphs; the model is converted by it only when its view is asked for.
        """
        if name not in self._views:
            self._named[name], self._decided[name] = policy, Decided(base, policy, costs)

    def add(self, name: str, policy: Policy, view: nn.Module) -> None:
        """Compare a view under a name of its own."""
        self._named[name], self._views[name] = policy, view

    def real(self, name: str, batch: Batch) -> Ran:
        """Run a step with the kernels of a policy, of autocast, or of FP32 (the model itself)."""
        model, region = self.how(name)
        return self.scaled(name, lambda scale: self._step(model, batch, region, scale, reference=name == FP32))

    def scaled(self, name: str, run: Callable[[float], Ran]) -> Ran:
        """Run a step with the loss scale of a policy, which is halved until all gradients are finite.

        As in training the next batch begins with the scale that this one needed. A scale is a power of two, so that
        gradients are as if there were none, but for what would be rounded to zero.

        Args:
            name: of the policy; nothing but FP16 is scaled.
            run: runs the step with a scale, on the same random numbers each time; its gradients are unscaled.
        """
        scale = first = self.scale(name)
        ran = run(scale)
        while scale > 1 and not _is_finite(ran):
            scale /= 2
            ran = run(scale)
        if scale < first and _is_finite(ran):
            self._scales[name] = scale
        return ran

    def scale(self, name: str) -> float:
        """Return the scale of a policy's loss: 65536 in FP16 until a step needs a smaller one, 1 in other dtypes."""
        if name == FP32 or self.policy(name).dtype != torch.float16:
            return 1.0
        return self._scales.get(name, _SCALE)

    def skips(self, name: str) -> int:
        """Return how many steps in FP16 were skipped until the loss scale fitted."""
        fp16 = name != FP32 and self.policy(name).dtype == torch.float16
        return round(math.log2(_SCALE / self.scale(name))) if fp16 else 0

    def casts(self, name: str) -> tuple[int, int]:
        """Return how many casts a step with the real kernels makes, and the bytes that they read and write.

        Of batches that take several paths, it is that with the most bytes.
        """
        counted = list[tuple[int, int]]()
        for batch in self.given.unlike():
            with self.given.as_before(self.model), outside_of_regions():
                counts = step_counts(self.forward(name, batch))
            counted.append((counts.cast_bytes, counts.casts))
        moved, casts = max(counted)
        return casts, moved

    def forward(self, name: str, batch: Batch) -> Callable[[], Tensor]:
        """Return a function that runs a forward with the real kernels, and gives the loss."""
        model, region = self.how(name)

        def run() -> Tensor:
            with region():
                return self.given.run(model, batch)[1]

        return run

    def how(self, name: str) -> tuple[nn.Module, Callable[[], Any]]:
        """Return what runs under a name, and the autocast region around it."""
        if name == FP32:
            return self.model, contextlib.nullcontext
        low: Any = self.policy(name).dtype
        if name.startswith(AUTOCAST):
            return self.model, lambda: torch.autocast(self.device, dtype=low)
        decided = self._decided.get(name)
        if decided is None or name in self._views:
            return self.view(name), contextlib.nullcontext
        return self.view(decided.base), lambda: run_instead(decided.run)

    def emulated(
        self, name: str, batch: Batch, at: At, edge: Edge | None = None, *, read: Read | None = None,
        decides: Decides | None = None, everywhere: bool = False, backward: bool = True, scale: float = 1.0,
    ) -> Ran:  # fmt: skip
        """Run a step by the emitted graphs of a policy in FP32, without casts, and look at all sites.

        With a `scale` of the loss, gradients are scaled where sites look at them, and those returned are not.

        Raises:
            CaptureError: no graph ran, or none of those that ran reads a parameter that gets a gradient.
        """
        counted, inputs = [0], set[int]()

        def run(converted: Any, graph: GraphModule, args: tuple[Any, ...]) -> Any:
            counted[0] += 1
            inputs.update(map(id, (*args, *graph.parameters())))
            sites = self.sites(graph, converted)
            return Emulation(graph, sites, at, edge, read, decides, everywhere).start(*args)

        with run_instead(run):
            ran = self._step(self.view(name), batch, contextlib.nullcontext, scale, backward=backward)
        missing = {n for n, p in self.model.named_parameters() if n in ran.gradients and id(p) not in inputs}
        if not counted[0] or (ran.gradients and len(missing) == len(ran.gradients)):
            raise CaptureError(f"{type(self.model).__name__}: nothing of it was captured, so nothing can be predicted.")
        self.uncaptured |= missing
        return replace(ran, output=None)

    def watched(self, name: str, batch: Batch, see: Callable[[Site, Tensor], None]) -> None:
        """Run a forward with the real kernels of a policy, node by node, and look at the float values."""

        def run(converted: Any, graph: GraphModule, args: tuple[Any, ...]) -> Any:
            sites = self.sites(graph, converted)

            def call(run: Run, n: Node) -> Any:
                value = run.value_of(n)
                if not is_ours(n) and isinstance(value, Tensor) and value.is_floating_point():
                    see(sites.of(n), value)
                return value

            return Run(graph, call).start(*args)

        with run_instead(run):
            self._step(self.view(name), batch, contextlib.nullcontext, backward=False)

    def sites(self, graph: GraphModule, converted: Any) -> GraphSites:
        """Return the sites of an emitted graph, found once."""
        if id(graph) not in self._sites:
            self._sites[id(graph)] = graph, GraphSites(graph, self._names(graph, converted))
        return self._sites[id(graph)][1]

    @staticmethod
    def _names(graph: GraphModule, known: Graph) -> dict[str, str]:
        inputs = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        return {inputs[i]: known.names.get(i, "") for i in known.places}

    def rounding(self, name: str) -> Iterator[Site]:
        """Yield what the graphs of a policy round, in the state of the model and with gradients; nothing is run."""
        decided, state = self._decided.get(name), (self.model.training, "grad")
        name = name if decided is None else decided.base
        graphs: Graphs = runner_of(self.view(name)).graphs
        for batch in () if graphs else self.given.unlike():  # nothing is captured yet
            self._step(self.view(name), batch, contextlib.nullcontext, backward=False)
        for known in graphs.distinct():
            if (known.state.training, known.state.grad) == state:
                graph = known.emitted if decided is None else decided.graph(known)
                yield from GraphSites(graph, self._names(graph, known)).rounding()

    def reference(self) -> tuple[str, Callable[[Batch], Ran]]:
        """Return what errors are measured against, and a function that runs it: float64, or FP32 where it does not run.

        The first is "float64", or "FP32" with the cause.
        """

        def run(batch: Batch) -> Ran:
            return self._step(self.model, batch, contextlib.nullcontext, wide=True)

        first = self.given.batches[0]
        self.real(FP32, first)  # which shows whether it draws random numbers
        try:
            run(first)
        except Exception as e:  # whatever a model raises that names FP32 in its code
            return f"FP32, since float64 does not run ({in_short(e):.120})", lambda batch: self.real(FP32, batch)
        return "float64", run

    def _step(
        self, model: nn.Module, batch: Batch, region: Callable[[], Any], scale: float = 1.0, *, backward: bool = True,
        wide: bool = False, reference: bool = False,
    ) -> Ran:  # fmt: skip
        """Run a step of a model, in float64 if it is `wide`, and leave everything as it was.

        One that is a `reference`, or wide, computes nothing in 8 bits.

        All parameters are copied beforehand for the first step, and then those that a step has written: each begins
        with the same parameters and random numbers, and runs the same code.
        """
        if wide:
            batch = pytree.tree_map(lambda v: v.double() if is_fp32(v) else v, batch)
        parts = [model] if isinstance(model, GraphModule) and record_on(model) is not None else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            restored = stack.enter_context(self.given.as_before(self.model, self._written))
            for around in (watched_graphs(parts), warnings.catch_warnings(), torch.enable_grad(), outside_of_regions()):
                stack.enter_context(around)
            warnings.simplefilter("ignore")  # of FP16 without a GradScaler: the loss is scaled here
            if wide or reference:
                stack.enter_context(as_made_of(self.model))
            if wide:
                stack.enter_context(in_float64(self.model, draws=self._draws))
            before = generators(self.device)
            with region():
                output, loss = self.given.run(model, batch)
            self._draws = self._draws or not all(map(torch.equal, before, generators(self.device)))
            if backward:
                (loss.double() * scale).backward() if loss.requires_grad else None
            held = {n: dense(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
            gradients = held if scale == 1 else {n: grad / scale for n, grad in held.items()}
            ran = Ran(float(loss.detach()), gradients, pytree.tree_map_only(Tensor, Tensor.detach, output))
        if backward and not wide:
            self._written = {*(self._written or ()), *map(id, restored)}
        return ran


def policies_of(subject: Subject, policies: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the policies to compare: those asked for, or that of the view that was given, or the usual four.

    Raises:
        PolicyError: one is not a policy.
    """
    if policies is None:
        return (subject.name,) if subject.name else POLICIES
    names = named(policies)
    for name in names:
        subject.policy(name)
    return names


def named(policies: Sequence[Any] | str) -> tuple[str, ...]:
    """Return policies as strings, each once.

    Raises:
        PolicyError: there are none.
    """
    names = tuple(dict.fromkeys(str(p) for p in ([policies] if isinstance(policies, (str, Policy)) else policies)))
    if not names:
        raise PolicyError("policies= is empty: name at least one, such as 'O1'.")
    return names


def refuse_infinite(subject: Subject, ran: Ran, batch: Batch, number: int) -> None:
    """Raise PolicyError for a batch on which FP32 itself is not finite, and name the node."""
    if math.isfinite(ran.loss) and _is_finite(ran):
        return
    found: list[Site] = []

    def at(site: Site, value: Tensor) -> Tensor:
        if not found and not bool(value.detach().isfinite().all()):
            found.append(site)
        return value

    with contextlib.suppress(CaptureError):
        subject.emulated("O1", batch, at, backward=False)
    where = f"first at {found[0].key} ({found[0].line})" if found else "in its backward or in its loss"
    raise PolicyError(f"batch {number}: FP32 itself is not finite, {where}: nothing can be said of roundings on it.")


def _is_finite(ran: Ran) -> bool:
    return all(bool(g.isfinite().all()) for g in ran.gradients.values())
