"""The store of the graphs of one model, a view's or one compiled in place; and the plan over them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError
from passes.contract.plan import CERTIFICATE, Decision, Plan, sums
from passes.contract.policy import Policy
from passes.contract.reasons import Code

from .._torch import at_recompile_limit, compiled_call, original_of
from .graph import Graph, moved_to
from .inputs import device_of, resolve
from .parameters import is_only_read
from .state import State

logger = logging.getLogger(__name__)


class Graphs(list[Graph]):
    """The graphs of one model, in the order of capture, and what they are captured under."""

    def __init__(self, asked: Policy | None = None, replayed: Plan | None = None) -> None:
        super().__init__()
        self.asked = self.policy = asked or Policy()  # the second is settled at the first call of a view
        self.device, self.low = "", torch.bfloat16  # the kind of device that a view's model runs on, and the low dtype
        self.replayed = replayed  # the plan that is carried out
        self.costs: CostModel | None = None  # what the cut is told that things cost; None for bytes
        # Raises for a graph that may not be captured, of which it is told whether it is all of a call.
        self.ensure: Callable[[Graph, bool], None] | None = None
        kept = () if replayed is None else replayed.notes
        self.notes = tuple(note for note in kept if note.startswith((Code.NOT_WORTH_CASTS.value, CERTIFICATE)))
        self.complete = True  # all graphs of a view were captured, those after a graph break too
        self.as_written: dict[State, str] = {}  # why a view's model runs as its author wrote it, by state
        self.lowered: set[str] = set()  # the names of the parameters that forward itself makes low
        self.said: set[str] = set()  # the causes of the lines that were logged once

    @property
    def restores(self) -> bool:
        """Whether outputs that are low by autocast alone go back to their original dtype."""
        return self.policy.level.rounds and self.policy.output_dtype == "original"

    def region(self, cache: bool = True) -> Any:
        """Return the autocast that a view's model is captured under, as a context."""
        rounds = self.policy.level.rounds
        keeps = cache and torch.is_autocast_cache_enabled()
        return torch.autocast(self.device, dtype=self.low if rounds else None, enabled=rounds, cache_enabled=keeps)

    def in_region(self) -> bool:
        """Say whether the present autocast is that of the view."""
        on = torch.is_autocast_enabled(self.device)
        rounds = self.policy.level.rounds
        return on == rounds and (not on or torch.get_autocast_dtype(self.device) == self.low)

    def settle(self, model: nn.Module, inputs: Any) -> bool:
        """Settle device and dtype by a call; say whether that is another kind of device than before."""
        here = device_of(model, inputs)
        if here == self.device:
            return False
        moved, self.device = self.device, here
        self.policy = resolve(self.asked, model, inputs)
        self.low = self.policy.dtype or torch.bfloat16
        name = type(model).__name__
        if moved:
            logger.info("fxamp: %s has moved from '%s' to '%s', and is captured anew", name, moved, here)
        if is_only_read():
            return True
        if self.policy.device != here and self.policy.level.rounds:
            logger.warning(
                "fxamp: %s was converted for '%s' and runs on '%s', where torch.autocast casts other ops. For the "
                "values that it gives there, convert again, with device=%s in the policy or the model on that device.",
                name, self.policy.device, here, here,
            )  # fmt: skip
        if here == "cuda" and self.asked.dtype is None and not torch.is_autocast_enabled(here):
            logger.warning("fxamp: %s runs in %s; pass dtype=bf16 for BF16", name, str(self.low).removeprefix("torch."))
        return True

    def switch(self, asked: Policy, policy: Policy, replayed: Plan | None = None) -> None:
        """Follow another policy, or plan, from now on; graphs are captured again."""
        self.asked, self.policy, self.replayed = asked, policy, replayed
        self.as_written.clear()
        self.notes, self.complete = (), True
        self.clear()

    def add(self, graph: Graph) -> Graph:
        """Keep a graph, with the number that it has here."""
        self.append(replace(graph, number=len(self)))
        return self[-1]

    def rebind(self, graph: Graph) -> Graph:
        """Keep a graph for other parameters, with its number: in its own place, if decisions are at the same paths."""
        for i, known in enumerate(self):
            if known.emitted is graph.emitted and (not known.paths or known.plan.decisions == graph.plan.decisions):
                self[i] = replace(graph, number=i)
                return self[i]
        return self.add(graph)

    def distinct(self) -> list[Graph]:
        """Return the graphs, in order; of those that were captured repeatedly the last, under the last policy."""
        once: dict[Any, dict[Any, Graph]] = {}  # of one code several, if its numbers or sizes decided differently
        for graph in self:
            of_code = once.setdefault((graph.state, str(graph.code)), {})
            if any(known.plan.policy != graph.plan.policy for known in of_code.values()):
                of_code.clear()
            of_code[graph.colours] = graph
        return list(itertools.chain.from_iterable(of_code.values() for of_code in once.values()))

    def note(self, *notes: str) -> None:
        """Keep what is to be said in the plan."""
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))

    def say(self, cause: str, level: int, text: str) -> None:
        """Log a line, once a cause."""
        if cause not in self.said:
            self.said.add(cause)
            logger.log(level, "fxamp: %s", text)


COMPILED: Any = WeakIdKeyDictionary()  # the stores, by module compiled in place, else by a parameter that is read


def runner_of(module: object) -> Any:
    """Return what runs the calls of a view; None for anything else."""
    return getattr(type(module), "_fxamp_runner", None)


def graphs_of(module: nn.Module) -> list[Graph]:
    """Return the graphs of a module compiled in place, or of a part of one, in order; CaptureError if there is none."""
    found: Graphs | None = COMPILED.get(_root(module))
    if not found:
        inside = {id(p) for p in module.parameters()}
        found = Graphs()
        for each in COMPILED.values():
            found += (graph for graph in each if not inside.isdisjoint(graph.paths))
    if not found:
        raise CaptureError(_nothing(module))
    return found.distinct()


def _root(module: nn.Module) -> nn.Module:
    return original_of(module) or module


def is_compiled(module: nn.Module) -> bool:
    """Say whether this is what torch.compile returned, or a module compiled in place."""
    return compiled_call(module) is not None or original_of(module) is not None or runner_of(module) is not None


def _nothing(module: nn.Module) -> str:
    name, found = type(_root(module)).__name__, at_recompile_limit()
    if compiled_call(module) is not None and type(module).__module__.startswith("torch.nn"):
        return (
            f"nothing was captured yet. If it has been called, this torch's .compile() on a class of torch.nn itself, "
            f"such as {name}, captures nothing. Use compiled = torch.compile(model, backend='fxamp'), or "
            "fxamp.compile(model)."
        )
    if not is_compiled(module):
        return f"{name} was not converted by fxamp: pass what fxamp.convert or fxamp.compile returned."
    limits = f" In this process {', '.join(found)} reached the recompile limit: torch captures no more of that code."
    return (
        f"nothing was captured yet: {name} is captured at its first call. If it has been called, torch.compile "
        f"left all of it to Python: set TORCH_LOGS=graph_breaks to see why.{limits if found else ''}"
    )


def plan_of(module: nn.Module) -> Plan:
    """Return one plan over all graphs that were converted for a module, with module paths from its root."""
    found = graphs_of(module)
    paths = {id(p): name.removeprefix("_orig_mod.") for name, p in module.named_parameters()}
    plan = together([(_prefix(graph.paths, paths), graph.plan) for graph in found])
    store = COMPILED.get(_root(module), found)
    return replace(plan, notes=(*plan.notes, *coverage(module, found), *getattr(store, "notes", ())))


def together(parts: Sequence[tuple[str, Plan]]) -> Plan:
    """Return one plan for parts of a model, each with the prefix of its paths; the policy is that of the first."""
    decisions: list[Decision] = []
    for prefix, plan in parts:
        first = max((d.graph for d in decisions), default=-1) + 1
        decisions += [moved_to(d, prefix, first) for d in plan.decisions]
    plans = [plan for _, plan in parts]
    return replace(plans[0], decisions=tuple(decisions), states=(), **sums(plans))


def coverage(module: nn.Module, found: Sequence[Graph]) -> list[str]:
    """Describe how much of a model its graphs cover, unless one graph covers all of it."""
    inside = {i for graph in found for i in graph.paths}
    named = [(name.removeprefix("_orig_mod."), p) for name, p in module.named_parameters()]
    outside = [name for name, p in named if id(p) not in inside]
    if not outside and not any(graph.broke for graph in found):
        return []
    held = sum(p.numel() for _, p in named if id(p) in inside)
    share = held / max(sum(p.numel() for _, p in named), 1)
    ops = sum(len(graph.plan.decisions) for graph in found)
    left = f"; outside: {', '.join(outside[:5])}{' and more' if len(outside) > 5 else ''}" if outside else ""
    policy, between = found[0].plan.policy, "code between graphs runs unconverted, in the model's own dtypes"
    if all(graph.autocast for graph in found):
        plain = policy.level.is_autocasts and not policy.modules and not policy.ops
        between = f"code between graphs runs under autocast{'' if plain else ', as at O1 without overrides'}"
    return [
        f"{len(found)} graphs of {ops} floating-point ops hold {len(named) - len(outside)} of {len(named)} parameters "
        f"({share:.0%} of their elements){left}; {between}",
        *dict.fromkeys(f"graph break at {graph.broke}" for graph in found if graph.broke),
    ]


def _prefix(captured: dict[int, str], paths: dict[int, str]) -> str:
    """Return the path of the module whose forward was captured, as a prefix: "encoder." if its "fc" is "encoder.fc"."""
    found = [
        paths[i].removesuffix(path)
        for i, path in captured.items()
        if path and (paths.get(i) == path or paths.get(i, "").endswith(f".{path}"))
    ]
    return max(set(found), key=found.count, default="")
