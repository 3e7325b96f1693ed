"""What was decided, and why, as plain data: one `Decision` per node, one `Plan` per model.

A plan can be saved, diffed, kept in version control and replayed. Its JSON holds text and numbers only, and the same
plan always gives the same text.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from .errors import PlanError, PolicyError
from .policy import Policy

FORMAT_VERSION = 2
# Reasons for which a node may differ from what torch.autocast does, at O1. The list is complete.
DEVIATIONS = ("user_cast", "literal", "composite", "keep", "mutated")
REMEDY = "make the plan anew, with `fxamp report TARGET --save-plan FILE` or `fxamp.plan(model, ...).save(path)`"
_SURROGATE = re.compile("[\ud800-\udfff]")  # text that a path may hold and UTF-8 has not


@dataclass(frozen=True)
class Decision:
    """Say in which dtype one node runs, and why.

    Attributes:
        key: `module.path/op#ordinal`, stable across processes and across unrelated edits of the model.
        graph: Which graph of the plan the node is in.
        op: Canonical name of the op.
        module_path: Innermost module the node belongs to, "" for the root.
        source: `file.py:12` and the line of code there, where known.
        colour: Dtype the node runs in, such as "bfloat16".
        autocast_dtype: Dtype that torch.autocast gives it.
        kind: Kind of the rule that was applied.
        reason: A code, or `code: sentence`.
        causes: Keys of the decisions this one follows from.
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

    @property
    def code(self) -> str:
        """Return the reason's code, without its sentence."""
        return self.reason.partition(":")[0].strip()


@dataclass(frozen=True)
class Plan:
    """Hold the decisions over all graphs of a model, in graph order, and what they were made for.

    Attributes:
        decisions: One list over all graphs.
        policy: With dtype and device filled in.
        verified: "fake" when dtypes were recomputed on fake tensors, else "symbolic".
        capture: Front end: "fx", "export" or "jit".
        notes: Sentences for the report: specialisations, debris removed, composites kept.
        inserted_casts: Casts that colouring asked for.
        casts: Of those, the ones left after elimination.
        torch_version: The torch it was made with.
        states: Of a model with several graphs: the states of the model that each holds for, and the number of its first
            graph, as "12: evaluation". A decision that the first of them has too, for the same key, stands there alone.
        version: Version of the file format.
    """

    decisions: tuple[Decision, ...]
    policy: Policy
    verified: str = "symbolic"
    capture: str = "fx"
    notes: tuple[str, ...] = ()
    inserted_casts: int = 0
    casts: int = 0
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    states: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Refuse two decisions of one key: a plan that names a node twice cannot be replayed."""
        seen: set[tuple[int, str]] = set()
        for decision in self.decisions:
            if (decision.graph, decision.key) in seen:
                raise PlanError(f"two decisions have the key {decision.key!r} in graph {decision.graph}; {REMEDY}")
            seen.add((decision.graph, decision.key))

    @property
    def graphs(self) -> int:
        """How many graphs there are, those inside others counted."""
        return max((d.graph for d in self.decisions), default=0) + 1

    @property
    def deviations(self) -> tuple[Decision, ...]:
        """List the decisions that may differ from torch.autocast on purpose."""
        return tuple(decision for decision in self.decisions if decision.code in DEVIATIONS)

    def part(self, at: int) -> Plan:
        """Return the plan of one of several graphs: its own decisions, and of the first graph's those it may share."""
        if not self.states:
            return self
        firsts = [*self._firsts(), None]
        own = _between(self.decisions, firsts[at], firsts[at + 1])
        known = {(d.graph, d.key) for d in own}
        shared = _between(self.decisions, firsts[0], firsts[1]) if at else []
        return replace(
            self, decisions=(*own, *(d for d in shared if (d.graph, d.key) not in known)), states=(),
        )  # fmt: skip

    def own(self, at: int) -> frozenset[tuple[int, str]]:
        """Return what `part` has that is no other graph's: (graph, key)."""
        firsts = [*(self._firsts() or [0]), None]
        return frozenset((d.graph, d.key) for d in _between(self.decisions, firsts[at], firsts[at + 1]))

    def _firsts(self) -> list[int]:
        return [int(state.partition(":")[0]) for state in self.states]

    def to_json(self) -> str:
        """Write the plan as text, the same text for the same plan."""
        data = asdict(self) | {"policy": str(self.policy)}
        text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan") -> Plan:
        """Read a plan from text; `name` is what errors call it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{name}:{error.lineno}: not JSON, or cut short ({error.msg}); {REMEDY}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
            raise PlanError(f"{name}: not a plan ({error}); {REMEDY}") from error
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise PlanError(f'{name}: JSON, but not a plan (no "version"); {REMEDY}')
        if data["version"] < 1:
            raise PlanError(f"{name}: there is no plan format {data['version']}; {REMEDY}")
        if data["version"] > FORMAT_VERSION:
            raise PlanError(
                f"{name}: plan format {data['version']} is newer than {FORMAT_VERSION}, the newest this fxamp reads; "
                f"upgrade fxamp, or {REMEDY}"
            )
        if data["version"] == 1:  # which knew one graph alone
            data = {**data, "states": [], "version": FORMAT_VERSION}
        _check_shape(cls, data, name)
        decisions = []
        for index, row in enumerate(data["decisions"]):
            _check_shape(Decision, row, f"{name}: decisions[{index}]")
            decisions.append(Decision(**row | {"causes": tuple(row["causes"])}))
        try:
            policy = Policy.parse(data["policy"])
            read = {"decisions": tuple(decisions), "policy": policy, "notes": tuple(data["notes"])}
            return cls(**data | read | {"states": _states(data["states"], name)})
        except (PolicyError, PlanError) as error:
            raise PlanError(f"{name}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, all of it or nothing."""
        try:
            write_text(path, self.to_json())
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot write the plan to {os.fspath(path)!r}: {_why(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)}:1: not a plan (not UTF-8 text); {REMEDY}") from error
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {_why(error)}; {REMEDY}") from error
        return cls.from_json(text, name=os.fspath(path))


def _between(decisions: Sequence[Decision], first: int | None, end: int | None) -> list[Decision]:
    """Return the decisions on some graphs, counted from the first of these."""
    start = first or 0
    return [replace(d, graph=d.graph - start) for d in decisions if start <= d.graph and (end is None or d.graph < end)]


def joined(plans: Sequence[Plan], states: Sequence[str]) -> Plan:
    """Return one plan for all graphs of a model; what the first decides the same way stands there alone.

    Args:
        plans: of each graph.
        states: what each holds for.
    """
    if len(plans) == 1:
        return plans[0]
    decisions, firsts = list(plans[0].decisions), [0]
    shared = set(plans[0].decisions)
    for before, plan in itertools.pairwise(plans):
        firsts.append(firsts[-1] + before.graphs)
        decisions += [replace(d, graph=d.graph + firsts[-1]) for d in plan.decisions if d not in shared]
    named = tuple(f"{first}: {state}" for first, state in zip(firsts, states, strict=True))
    return replace(
        plans[0], decisions=tuple(decisions), states=named,
        notes=tuple(dict.fromkeys(n for p in plans for n in p.notes)),
        verified="symbolic" if any(p.verified == "symbolic" for p in plans) else "fake",
        inserted_casts=sum(p.inserted_casts for p in plans), casts=sum(p.casts for p in plans),
    )  # fmt: skip


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole: a reader sees the old file or the new one, never half of it, whoever else writes.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is none, or the text has characters that UTF-8 has not.
    """
    # A link keeps pointing where it points.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A directory says so here; a device or a pipe cannot be replaced, only written to.
        target.write_text(text, encoding="utf-8")
        return
    temporary = target.with_name(f".fxamp-{uuid.uuid4().hex}.tmp")  # short, for the target's own name may be long
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


# JSON types of the fields that are not text.
_FIELD_TYPES: dict[str, type[Any]] = {
    "graph": int,
    "inserted_casts": int,
    "casts": int,
    "version": int,
    "causes": list,
    "notes": list,
    "decisions": list,
    "states": list,
}


def _states(named: list[str], name: str) -> tuple[str, ...]:
    """Check the states of a plan: each with the number of its first graph, which rise."""
    firsts = [state.partition(":")[0] for state in named]
    numbers = [int(f) for f in firsts if f.isdecimal() and len(f) < 9]
    if len(numbers) < len(firsts) or numbers != sorted(set(numbers)):
        raise PlanError(f"{name}: 'states' has to give each state after the number of its first graph; {REMEDY}")
    return tuple(named)


def _check_shape(kind: type[Plan] | type[Decision], data: Any, where: str) -> None:
    """Refuse JSON data that does not have exactly the fields of `kind`, each of its type."""
    if not isinstance(data, dict):
        raise PlanError(f"{where}: expected an object, found {type(data).__name__}; {REMEDY}")
    names = {f.name for f in fields(kind)}
    for name in sorted(names ^ set(data)):
        problem = "is missing" if name in names else "is not a field of this format"
        raise PlanError(f"{where}: {name!r} {problem}; {REMEDY}")
    for name, value in data.items():
        expected = _FIELD_TYPES.get(name, str)
        # bool is an int to Python, but not in a plan.
        if not isinstance(value, expected) or isinstance(value, bool):
            raise PlanError(f"{where}: {name!r} is {reprlib.repr(value):.60}, expected {expected.__name__}; {REMEDY}")
        if isinstance(value, int) and value < 0:
            raise PlanError(f"{where}: {name!r} is negative, {value}; {REMEDY}")
        if name in ("causes", "notes", "states") and not all(isinstance(item, str) for item in value):
            raise PlanError(f"{where}: {name!r} holds something other than text; {REMEDY}")
