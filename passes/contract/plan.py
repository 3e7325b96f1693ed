"""What was decided, and why, as plain data: one `Decision` per node, one `Plan` per model.

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
import reprlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from .errors import PlanError, PolicyError
from .policy import Policy
from .reasons import DEVIATIONS, Code, Reason

FORMAT_VERSION = 4
REMEDY = "make the plan anew, with `fxamp report TARGET --save-plan FILE` or `fxamp.plan(model, ...).save(path)`"
LONGEST = 64 << 20  # characters; 50,000 nodes take 13 MB
_CODES = {code.value: code for code in Code}
_SURROGATE = re.compile("[\ud800-\udfff]")  # text that a path may hold and UTF-8 has not


@functools.cache
def _installed() -> str:
    try:
        return importlib.metadata.version("fxamp")
    except importlib.metadata.PackageNotFoundError:
        return ""


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
        reason: `code: sentence`.
        causes: Keys of the decisions this one follows from.
        code: The reason's code; left out, the word that the reason begins with.

    Example:
        >>> first = converted.plan.decisions[0]
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

    def __post_init__(self) -> None:
        """Fill in the code of a decision that was written by hand."""
        if not self.code:
            object.__setattr__(self, "code", self.reason.partition(":")[0].strip())

    @property
    def because(self) -> Reason:
        """Return the code and the sentence of the reason apart.

        Raises:
            PlanError: There is no such code.

        Example:
            >>> reason = converted.plan.decisions[0].because
            >>> str(reason.code), reason.detail
            ('low', 'matrix product, accumulated in FP32')
        """
        if self.code not in _CODES:
            raise PlanError(f"{self.key}: there is no reason code {self.code!r:.60}; {REMEDY}")
        return Reason(_CODES[self.code], self.reason.removeprefix(f"{self.code}: "))


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
        totals: What the graphs cost at the example's sizes, as `fxamp check` compares it; empty where nobody asked.
        fxamp_version: The fxamp it was made with; "" of a plan older than that is written down.
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
    capture: str = "fx"
    notes: tuple[str, ...] = ()
    inserted_casts: int = 0
    casts: int = 0
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    states: tuple[str, ...] = ()
    totals: Mapping[str, float] = field(default_factory=dict, compare=False)
    fxamp_version: str = field(default_factory=_installed, compare=False)
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
        """Return the plan of one of several graphs: its own decisions, and of the first graph's those it may share.

        Args:
            at: Number of the graph among `states`.

        Example:
            >>> converted.plan.part(0) == converted.plan  # there is one graph alone
            True
        """
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
        """Return what `part` has that is no other graph's: (graph, key).

        Args:
            at: Number of the graph among `states`.

        Example:
            >>> sorted(converted.plan.own(0))
            [(0, '0/linear#0'), (0, '1/relu#0'), (0, '2/linear#0')]
        """
        firsts = [*(self._firsts() or [0]), None]
        return frozenset((d.graph, d.key) for d in _between(self.decisions, firsts[at], firsts[at + 1]))

    def _firsts(self) -> list[int]:
        return [int(state.partition(":")[0]) for state in self.states]

    def to_json(self) -> str:
        """Write the plan as text, the same text for the same plan.

        Example:
            >>> fxamp.Plan.from_json(converted.plan.to_json()) == converted.plan
            True
        """
        data = asdict(self) | {"policy": str(self.policy)}
        text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan", newer: bool = False) -> Plan:
        """Read a plan from text.

        Args:
            text: As `to_json` writes it.
            name: What errors call it.
            newer: Of a newer format read what this fxamp knows of, for comparisons; a note says that there is more.

        Raises:
            PlanError: The text is no plan; the message says where.

        Example:
            >>> fxamp.Plan.from_json(converted.plan.to_json()).capture
            'export'
        """
        data = strictly(text, name, "plan")
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise PlanError(f'{name}: JSON, but not a plan (no "version"); {REMEDY}')
        if data["version"] < 1:
            raise PlanError(f"{name}: there is no plan format {data['version']}; {REMEDY}")
        if data["version"] > FORMAT_VERSION and newer:
            data = _known_part(data)
        if data["version"] > FORMAT_VERSION:
            raise PlanError(
                f"{name}: plan format {data['version']} is newer than {FORMAT_VERSION}, the newest this fxamp reads; "
                f"upgrade fxamp, or {REMEDY}"
            )
        data = _in_this_format(data)
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
        """Write the plan to a file, all of it or nothing.

        Raises:
            PlanError: The file cannot be written.

        Example:
            >>> converted.plan.save("net.plan.json")
        """
        try:
            write_text(path, self.to_json())
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot write the plan to {os.fspath(path)!r}: {_why(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, newer: bool = False) -> Plan:
        """Read a plan from a file, as `from_json` reads its text.

        Raises:
            PlanError: The file cannot be read, or holds no plan.

        Example:
            >>> converted.plan.save("net.plan.json")
            >>> again = fxamp.convert(model, (x,), plan=fxamp.Plan.load("net.plan.json"))
            >>> bool(fxamp.diff(converted, again))
            False
        """
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(LONGEST + 1)  # of a device that never ends, too
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)}:1: not a plan (not UTF-8 text); {REMEDY}") from error
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {_why(error)}; {REMEDY}") from error
        return cls.from_json(text, name=os.fspath(path), newer=newer)


def strictly(text: str, name: str, what: str) -> Any:
    """Read JSON in which nothing is said twice, and every number is one.

    Args:
        text: to read.
        name: what errors call it.
        what: it should be.

    Raises:
        PlanError: it is no such JSON, or longer than what any model needs.
    """
    if len(text) > LONGEST:
        raise PlanError(f"{name}: not a {what} (longer than {LONGEST >> 20} MB, which no model needs); {REMEDY}")
    try:
        return json.loads(text, object_pairs_hook=_said_once, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise PlanError(f"{name}:{error.lineno}: not JSON, or cut short ({error.msg}); {REMEDY}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise PlanError(f"{name}: not a {what} ({error}); {REMEDY}") from error


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{reprlib.repr(twice)} is there twice in one object")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _in_this_format(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of an older format in this one."""
    if data["version"] < 2:  # which knew one graph alone
        data = {**data, "states": []}
    if data["version"] < 3 and isinstance(data.get("decisions"), list):  # in which reasons began with their code
        data = {**data, "decisions": [
            {"code": row["reason"].partition(":")[0].strip(), **row}
            if isinstance(row, dict) and isinstance(row.get("reason"), str) else row
            for row in data["decisions"]
        ]}  # fmt: skip
    return {"totals": {}, "fxamp_version": "", **data, "version": FORMAT_VERSION}


def _known_part(data: dict[str, Any]) -> dict[str, Any]:
    """Return of a plan of a newer format the fields that this one has."""
    plan, decision = ({f.name for f in fields(kind)} for kind in (Plan, Decision))
    note = f"of plan format {data['version']}, newer than {FORMAT_VERSION}: what it has more is not read"
    known = {name: value for name, value in data.items() if name in plan} | {"version": FORMAT_VERSION}
    if isinstance(known.get("notes"), list):
        known["notes"] = [*known["notes"], note]
    if isinstance(known.get("decisions"), list):
        known["decisions"] = [
            {name: value for name, value in row.items() if name in decision} if isinstance(row, dict) else row
            for row in known["decisions"]
        ]  # fmt: skip
    return known


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
    "totals": dict,
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
        numbers = value.values() if isinstance(value, dict) else ()
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise PlanError(f"{where}: {name!r} holds something other than numbers; {REMEDY}")
        if name in ("causes", "notes", "states") and not all(isinstance(item, str) for item in value):
            raise PlanError(f"{where}: {name!r} holds something other than text; {REMEDY}")
