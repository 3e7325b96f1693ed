"""Decisions and their reasons as plain data: one `Decision` per node, one `Plan` per model.

A plan can be saved, diffed, kept in version control and replayed. Its JSON holds text and numbers only, and the same
plan always gives the same text.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .errors import PlanError, PolicyError, public
from .plan_format import FORMAT_VERSION, LONGEST, REMEDY, check_shape, in_this_format, strictly, write_text
from .policy import Policy
from .reasons import DEVIATIONS

CERTIFICATE = "certificate"  # how a note of the certificate of a plan begins
_SURROGATE = re.compile("[\ud800-\udfff]")  # characters that a path may hold and UTF-8 cannot encode


@functools.cache
def installed() -> str:
    """Return the version of the fxamp that is installed, "" if it is not."""
    try:
        return importlib.metadata.version("fxamp")
    except importlib.metadata.PackageNotFoundError:
        return ""


@public
@dataclass(frozen=True)
class Decision:
    """The dtype that one node runs in, and the reason.

    Attributes:
        key: `module.path/op#ordinal`, stable across processes and across unrelated edits of the model.
        graph: Which graph of the plan the node is in.
        op: Canonical name of the op.
        module_path: Innermost module the node belongs to, "" for the root.
        source: `file.py:12` and the line of code there, where known.
        colour: Dtype the node runs in, such as "bfloat16".
        autocast_dtype: Dtype that torch.autocast gives it.
        kind: Kind of the rule that was applied.
        reason: `code: sentence`.
        causes: Keys of the decisions this one follows from.
        code: The code of the reason; by default the word before its colon.
        ranges: What buffers held that the low dtype cannot, as "mask: -1e+09", where that decided. A buffer that is
            written later may hold another number.

    Example:
        >>> first = fxamp.plan_of(converted).decisions[0]
        >>> first.key, first.op, first.colour, first.reason
        ('0/linear#0', 'linear', 'bfloat16', 'low: matrix product, accumulated in FP32')
    """

    key: str
    graph: int
    op: str
    module_path: str
    source: str
    colour: str
    autocast_dtype: str
    kind: str
    reason: str
    causes: tuple[str, ...] = ()
    code: str = ""
    ranges: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the code of a decision that was written by hand."""
        if not self.code:
            object.__setattr__(self, "code", self.reason.partition(":")[0].strip())

    def __str__(self) -> str:
        """Say why the node runs in its dtype: the reason, what it follows from, and the user's line.

        Example:
            >>> print(fxamp.plan_of(converted).find(op="relu")[0])
            1/relu#0 runs in bfloat16, as under autocast: follow: its operand's dtype
              from 0/linear#0
        """
        beside = "as under autocast" if self.colour == self.autocast_dtype else f"under autocast {self.autocast_dtype}"
        lines = [f"{self.key} runs in {self.colour}, {beside}: {self.reason}"]
        lines += [f"  from {', '.join(self.causes)}"] * bool(self.causes)
        lines += [f"  which buffers decided: {', '.join(self.ranges)}"] * bool(self.ranges)
        return "\n".join([*lines, *[f"  {self.source}"] * bool(self.source)])


@dataclass(frozen=True)
class Stored:
    """A value that a compiled step stores in 16 bits, where O1 stores FP32.

    Attributes:
        part: "saved" for backward, or handed on in "backward" by one kernel to a later one.
        name: Its name in the joint graph of forward and backward, which another torch may give otherwise.
        module: The path of the module that computes it, or whose backward does; "" for none, as for sums of gradients.
        line: The author's line that it comes from, as "net.py:12"; "" where torch does not know it.
        dtype: The dtype that it is stored in.
        graph: The place of the joint graph among those of a call: 0 unless something breaks the step's graph.
    """

    part: str
    name: str
    module: str
    line: str
    dtype: str
    graph: int = 0

    def __str__(self) -> str:
        return f"{self.part} {self.name} in {self.dtype}: {self.module or '(no module)'}, {self.line or '(no line)'}"


@public
@dataclass(frozen=True)
class Plan:
    """The decisions on all nodes of a model, in graph order, and the policy and versions that they were made with.

    Attributes:
        decisions: The decisions of all graphs, in one tuple.
        policy: With dtype and device filled in.
        verified: "fake" if torch recomputed all dtypes on fake tensors, which needs example inputs; else "symbolic".
        capture: "dynamo" for a module, "graph" for a GraphModule or an ExportedProgram; in plans of an older format the
            front end.
        notes: Sentences for the report: sizes that capture fixed, nodes left by capture that were removed, composite
            ops kept.
        inserted_casts: How many casts were inserted.
        casts: How many inserted casts are left after elimination.
        torch_version: The torch it was made with.
        states: One entry per state, as "NUMBER: NAME", where NUMBER is that of its first graph; empty if the same is
            decided in all states. Each state lists all of its decisions.
        edits: How often each rewrite of the passes fired, as "pass/rewrite"; empty in plans of an older format.
        totals: The costs of the graphs at the example's sizes, as `fxamp check` compares them; empty if not computed.
        certificate: For a plan of `fxamp.tune`: its tolerance, the error that was predicted and the error that was
            measured, of how many batches; empty for others. The notes say of which kind each is.
        fxamp_version: The fxamp it was made with; "" in plans of an older format.
        machine: The machine on which the kernel facts behind the plan were measured, as "cpu AVX512, torch 2.13"; "" in
            plans of an older format.
        timings: With cost="measured", the nanoseconds of each distinct call that the cut weighed, forward and backward
            together, by the text of the call; else empty.
        complete: False where graphs are missing: the model breaks its graph, and what follows could not be captured
            without running the model.
        stored: What a compiled step stores in 16 bits beside, from `TrainStep.plan`: the decisions then are those of
            O1. A compiled step that carries the plan out stores exactly these values; others follow the decisions.
        version: Version of the file format.

    Example:
        >>> plan = fxamp.plan(model, (x,), policy="O1,dtype=bf16")
        >>> [(decision.op, decision.colour) for decision in plan.decisions]
        [('linear', 'bfloat16'), ('relu', 'bfloat16'), ('linear', 'bfloat16')]
        >>> plan.graphs, plan.casts, plan.deviations
        (1, 6, ())
    """

    decisions: tuple[Decision, ...]
    policy: Policy
    verified: str = "symbolic"
    capture: str = "graph"
    notes: tuple[str, ...] = ()
    inserted_casts: int = 0
    casts: int = 0
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    states: tuple[str, ...] = ()
    edits: Mapping[str, int] = field(default_factory=dict, compare=False)
    totals: Mapping[str, float] = field(default_factory=dict, compare=False)
    certificate: Mapping[str, float] = field(default_factory=dict, compare=False)
    fxamp_version: str = field(default_factory=installed, compare=False)
    machine: str = field(default="", compare=False)
    timings: Mapping[str, int] = field(default_factory=dict, compare=False)
    complete: bool = True
    stored: tuple[Stored, ...] = ()
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Refuse two decisions of one key: a plan that names a node twice cannot be replayed."""
        seen: set[tuple[int, str]] = set()
        for decision in self.decisions:
            if (decision.graph, decision.key) in seen:
                raise PlanError(f"two decisions have the key {decision.key!r} in graph {decision.graph}; {REMEDY}")
            seen.add((decision.graph, decision.key))

    def __repr__(self) -> str:
        """Return the policy, and how much was decided."""
        decided = f"{len(self.decisions)} decisions on {self.graphs} graph{'s' * (self.graphs > 1)}"
        return f"<fxamp plan: {self.policy}, {decided}, {self.casts} casts>"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickled plan; fields that an older fxamp did not write get their defaults."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def never_fired(self) -> tuple[str, ...]:
        """List the rules of the passes that found nothing to do, as "pass/rule".

        Example:
            >>> "legalize/composite" in fxamp.plan_of(converted).never_fired
            True
        """
        return tuple(rule for rule, count in sorted(self.edits.items()) if not count)

    @property
    def graphs(self) -> int:
        """The number of graphs; a graph inside another one, such as the body of a loop, counts too."""
        return max((d.graph for d in self.decisions), default=0) + 1

    @property
    def deviations(self) -> tuple[Decision, ...]:
        """List the decisions that may differ from torch.autocast for a reason other than the level or the policy."""
        return tuple(decision for decision in self.decisions if decision.code in DEVIATIONS)

    def find(
        self, module: str | None = None, op: str | None = None, colour: str | None = None, reason: str | None = None
    ) -> tuple[Decision, ...]:
        """Return the decisions that fit everything asked for, in graph order.

        Args:
            module: The path of a module: nodes of it and of the modules below it.
            op: Canonical name of an op.
            colour: "fp32", or "low" for either 16-bit dtype, or a dtype's name such as "bfloat16".
            reason: The code of a reason, such as "literal".

        Example:
            >>> [decision.key for decision in fxamp.plan_of(converted).find(op="linear", colour="low")]
            ['0/linear#0', '2/linear#0']
        """
        colours = {"low": ("bfloat16", "float16"), "fp32": ("float32",)}.get(colour or "", (colour,))
        return tuple(
            d for d in self.decisions
            if (module is None or f"{d.module_path}.".startswith(f"{module}." if module else ""))
            and op in (None, d.op) and (colour is None or d.colour in colours) and reason in (None, d.code)
        )  # fmt: skip

    def of_graph(self, index: int) -> Plan:
        """Return the plan with the decisions on only one graph, by its number.

        Example:
            >>> fxamp.plan_of(converted).of_graph(0).decisions == fxamp.plan_of(converted).decisions
            True
        """
        return replace(self, decisions=tuple(d for d in self.decisions if d.graph == index))

    def from_graph(self, first: int) -> Plan:
        """Return the plan without the graphs before the one of a number, which gets the number 0.

        Example:
            >>> fxamp.plan_of(converted).from_graph(0).decisions == fxamp.plan_of(converted).decisions
            True
        """
        return replace(self, decisions=_between(self.decisions, first, self.graphs), states=())

    def part(self, at: int) -> Plan:
        """Return the plan of one state, by its place among `states`; its first graph gets the number 0.

        Example:
            >>> fxamp.plan_of(converted).part(0) == fxamp.plan_of(converted)  # there is only one state
            True
        """
        if not self.states:
            return self
        firsts = [*(int(state.partition(":")[0]) for state in self.states), self.graphs]
        return replace(self, decisions=_between(self.decisions, firsts[at], firsts[at + 1]), states=())

    def to_json(self) -> str:
        """Return the plan as JSON; equal plans give equal text.

        Example:
            >>> fxamp.Plan.from_json(fxamp.plan_of(converted).to_json()) == fxamp.plan_of(converted)
            True
        """
        data = asdict(self) | {"policy": str(self.policy)}
        text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan") -> Plan:
        """Read a plan from text.

        Args:
            text: As `to_json` writes it.
            name: The name of the plan in errors.

        Raises:
            PlanError: The text is not a plan; the message says where it is wrong.

        Example:
            >>> fxamp.Plan.from_json(fxamp.plan_of(converted).to_json()).capture
            'dynamo'
        """
        data = strictly(text, name, "plan")
        if not isinstance(data, dict) or type(data.get("version")) is not int:
            raise PlanError(f'{name}: JSON, but not a plan (no "version"); {REMEDY}')
        if data["version"] < 1:
            raise PlanError(f"{name}: there is no plan format {data['version']}; {REMEDY}")
        if data["version"] > FORMAT_VERSION:
            raise PlanError(
                f"{name}: plan format {data['version']} is newer than {FORMAT_VERSION}, the newest this fxamp reads; "
                f"upgrade fxamp, or {REMEDY}"
            )
        data = in_this_format(data)
        check_shape(cls, data, name)
        decisions = []
        for index, row in enumerate(data["decisions"]):
            check_shape(Decision, row, f"{name}: decisions[{index}]")
            decisions.append(Decision(**row | {"causes": tuple(row["causes"]), "ranges": tuple(row["ranges"])}))
        for index, row in enumerate(data["stored"]):
            check_shape(Stored, row, f"{name}: stored[{index}]")
        try:
            policy = Policy.parse(data["policy"])
            read = {"decisions": tuple(decisions), "policy": policy, "notes": tuple(data["notes"])}
            read["stored"] = tuple(Stored(**row) for row in data["stored"])
            return cls(**data | read | {"states": _checked_states(data["states"], name)})
        except (PolicyError, PlanError) as error:
            raise PlanError(f"{name}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically.

        Raises:
            PlanError: The file cannot be written.

        Example:
            >>> fxamp.plan_of(converted).save("net.plan.json")
        """
        try:
            write_text(path, self.to_json())
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot write the plan to {os.fspath(path)!r}: {_why(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file, as `from_json` reads its text.

        Raises:
            PlanError: The file cannot be read, or holds no plan.

        Example:
            >>> fxamp.plan_of(converted).save("net.plan.json")
            >>> again = fxamp.convert(model, (x,), plan=fxamp.Plan.load("net.plan.json"))
            >>> bool(fxamp.diff(converted, again))
            False
        """
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(LONGEST + 1)  # no more: a device file may never end
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)}:1: not a plan (not UTF-8 text); {REMEDY}") from error
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {_why(error)}; {REMEDY}") from error
        return cls.from_json(text, name=os.fspath(path))


def _between(decisions: Sequence[Decision], first: int, end: int) -> tuple[Decision, ...]:
    """Return the decisions on some graphs; the first of these graphs gets the number 0."""
    return tuple(replace(d, graph=d.graph - first) for d in decisions if first <= d.graph < end)


def _checked_states(named: list[str], name: str) -> tuple[str, ...]:
    """Check the states of a plan: each begins with the number of its first graph, in rising order."""
    firsts = [state.partition(":")[0] for state in named]
    numbers = [int(f) for f in firsts if f.isdecimal() and len(f) < 9]
    if len(numbers) < len(firsts) or numbers != sorted(set(numbers)):
        raise PlanError(
            f"{name}: each of 'states' must begin with the number of its first graph, in rising order; {REMEDY}"
        )
    return tuple(named)


def joined(plans: Sequence[Plan], states: Sequence[str]) -> Plan:
    """Return one plan for a model with several states, from the plan of each and their names."""
    if len(plans) == 1:
        return plans[0]
    decisions, firsts = list(plans[0].decisions), [0]
    for before, plan in itertools.pairwise(plans):
        firsts.append(firsts[-1] + before.graphs)
        decisions += [replace(d, graph=d.graph + firsts[-1]) for d in plan.decisions]
    named = tuple(f"{first}: {state}" for first, state in zip(firsts, states, strict=True))
    return replace(
        plans[0], decisions=tuple(decisions), states=named,
        verified="symbolic" if any(p.verified == "symbolic" for p in plans) else "fake", **sums(plans),
    )  # fmt: skip


def sums(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the fields of a plan for several graphs that are sums over its parts."""
    rules = sorted({rule for plan in plans for rule in plan.edits})
    return {
        "notes": tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        "complete": all(plan.complete for plan in plans),
        "inserted_casts": sum(plan.inserted_casts for plan in plans),
        "casts": sum(plan.casts for plan in plans),
        "timings": {call: taken for plan in plans for call, taken in plan.timings.items()},
        "edits": {rule: sum(plan.edits.get(rule, 0) for plan in plans) for rule in rules},
    }


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
