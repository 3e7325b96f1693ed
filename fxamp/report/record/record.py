"""The record: what was decided for every node and what it costs, as data that other programs read.

`fxamp/schemas/record.json` is its JSON Schema (2020-12). Nothing in a record changes from one run to the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from passes.contract.errors import PlanError, PolicyError
from passes.contract.plan_format import strictly
from passes.contract.policy import dtype_name, nearest
from passes.graph.values import LOW_DTYPES

RECORD_VERSION = 3
# The totals that are saved with a plan, and that budgets limit: by a ceiling, or by a floor in percent.
CEILINGS, FLOORS = ("casts", "cast_bytes", "saved_bytes", "fp32_ops", "unknown_ops"), ("low_flops", "low_bytes")
TOTALS = CEILINGS + FLOORS
# The three classes of a colour, and what each looks like in every form that has colours.
LOW = tuple(map(dtype_name, LOW_DTYPES))
PALETTE = {"low": "#2f6fed", "fp32": "#e07a1f", "other": "#8b93a1"}


def style_of(dtype: str) -> str:
    """Return the class of a dtype: "low" for 16 bits, "fp32", or "other"."""
    return "low" if dtype in LOW else "fp32" if dtype == "float32" else "other"


class Cast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cast that was inserted in front of a node.

    Attributes:
        operand: key of the node whose value is cast, or the name of an input, a parameter or a buffer.
        before: dtype of the value.
        after: dtype that the node reads.
        bytes: bytes read and written by the cast; None if sizes are not known.
        shared: how many nodes read the result of the cast.
    """

    operand: str
    before: str
    after: str
    bytes: int | None
    shared: int


class Read(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a node reads.

    Attributes:
        value: key of the node that computes it, or the name of an input, a parameter or a buffer.
        kind: which of these it is.
        cast: dtype that an inserted cast converts it to for this reader; "" for none.
    """

    value: str
    kind: Literal["node", "input", "attribute"]
    cast: str


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node: what it runs in and why, and what it costs at the example's sizes, None where that is not known.

    Attributes:
        key: `module.path/op#ordinal`.
        graph: number of the graph that it is in.
        op: canonical name.
        module: path of the innermost module.
        file: file of your line that made the node, relative to the working directory if it is below it.
        line: number of your line; 0 if it is not known.
        code: text of your line.
        torch_source: line inside torch that your line led to.
        colour: dtype that it runs in.
        autocast: dtype that torch.autocast gives it.
        original: dtype of its result without mixed precision; "" if that is not known.
        kind: kind of the rule that was applied.
        reason_code: one of `passes.contract.reasons.Code`.
        reason: a sentence.
        causes: keys of the decisions that it follows from.
        dtypes: dtypes of its results.
        shapes: shapes of its results; symbolic sizes by name.
        bytes: size of its results.
        flops: FLOPs of its forward, by torch's formulas.
        saved_bytes: size of the storages that it is the first to keep for backward.
        casts: casts inserted in front of it.
        reads: values that it reads.
    """

    key: str
    graph: int
    op: str
    module: str
    file: str
    line: int
    code: str
    torch_source: str
    colour: str
    autocast: str
    original: str
    kind: str
    reason_code: str
    reason: str
    causes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    bytes: int | None
    flops: int | None
    saved_bytes: int | None
    casts: tuple[Cast, ...]
    reads: tuple[Read, ...]


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over the nodes that one call in one state runs, None where they are not known.

    Attributes:
        nodes: number of nodes with a decision.
        low_ops: how many of these nodes run in a low dtype.
        fp32_ops: how many of them run in FP32.
        unknown_ops: how many of them have no rule.
        user_casts: how many of them are casts in the user's code.
        casts: number of inserted casts that are left after elimination.
        cast_bytes: bytes that these casts read and write.
        bytes: bytes of the floating results of all nodes.
        low_bytes: percentage of these bytes that low nodes produce.
        flops: FLOPs of the forward.
        low_flops: percentage of these FLOPs that low nodes compute.
        saved_bytes: bytes kept for backward.
        saved_bytes_fp32: the same without mixed precision.
        saved_bytes_autocast: the same under torch.autocast; None if its device is absent.
        deviations: number of nodes that may differ from torch.autocast for a reason other than the level or the policy.
    """

    nodes: int
    low_ops: int
    fp32_ops: int
    unknown_ops: int
    user_casts: int
    casts: int | None
    cast_bytes: int | None
    bytes: int | None
    low_bytes: float | None
    flops: int | None
    low_flops: float | None
    saved_bytes: int | None
    saved_bytes_fp32: int | None
    saved_bytes_autocast: int | None
    deviations: int


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call runs while the model is in one state: one graph, or several if capture breaks it.

    Attributes:
        name: such as "training" or "eval, no_grad"; "" if the model has no other state.
        totals: sums over the nodes that it runs, all of them planned: what the emitted graph costs when it runs as it
            is. A compiler behind it may fuse casts, and recompute what is counted as saved.
        nodes: their places among the nodes of the record; empty if the state is the only one, and runs all of them.
        output_casts: casts of its outputs, inserted after all nodes.
        compiler: the compiler behind its graphs; "" if they run as they are.
        kept_bytes: measured: bytes that the compiled graphs kept for backward at their first call with gradients,
            parameters excluded; None if there was none.
    """

    name: str
    totals: Totals
    nodes: tuple[int, ...]
    output_casts: tuple[Cast, ...]
    compiler: str = ""
    kept_bytes: int | None = None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known of a conversion.

    Attributes:
        version: version of this format.
        policy: the policy, as text.
        device: device that the decisions are for.
        capture: front end.
        verified: "fake" or "symbolic".
        torch: version of torch that made it.
        fxamp: version of fxamp that made it.
        states: states of the model, each with its totals; at least one.
        parameters: number of parameter elements of the model.
        nodes: nodes in the order of the graphs.
        notes: sentences on what was done differently from usual.
        inserted_casts: number of casts that were inserted into all graphs, before elimination.
    """

    version: int
    policy: str
    device: str
    capture: str
    verified: str
    torch: str
    fxamp: str
    states: tuple[State, ...]
    parameters: int | None
    nodes: tuple[NodeRecord, ...]
    notes: tuple[str, ...]
    inserted_casts: int = 0

    @property
    def totals(self) -> Totals:
        """The totals of the first state, which is training wherever the model has a graph for it."""
        return self.states[0].totals

    def of(self, state: State) -> tuple[NodeRecord, ...]:
        """Return the nodes that a state runs."""
        return tuple(self.nodes[place] for place in state.nodes) if len(self.states) > 1 else self.nodes

    @property
    def has_casts(self) -> bool:
        """Whether the places of casts are known. For a plan alone, or a compiled model, only their number is known."""
        outputs = any(state.output_casts for state in self.states)
        return self.totals.casts == 0 or outputs or any(n.casts for n in self.nodes)

    def casts_elsewhere(self, state: State) -> list[tuple[str, int]]:
        """Return (label, number) of the casts of a state that are in front of no listed node."""
        outputs = len(state.output_casts)
        inner = (state.totals.casts or 0) - outputs - sum(len(n.casts) for n in self.of(state))
        found = [("(outputs)", outputs), ("(inner graphs)", inner if self.has_casts else 0)]  # such as a loop's body
        return [(name, count) for name, count in found if count > 0]

    @property
    def stage(self) -> str:
        """What the totals are figures of."""
        planned = "planned: the emitted graphs as PyTorch runs them"
        by = self.states[0].compiler
        return f"{planned}; {by} behind them may fuse casts, and recompute what is saved" if by else planned

    def chosen(
        self, *, modules: Sequence[str] = (), ops: Sequence[str] = (), colours: Sequence[str] = (),
        reasons: Sequence[str] = (),
    ) -> list[NodeRecord]:  # fmt: skip
        """Return the nodes that pass all filters: by module (or one below it), op, colour and reason code.

        PolicyError if one of them matches no node, or no node passes all of them.
        """
        nodes = list(self.nodes)
        asked: list[tuple[str, Sequence[str], Callable[[NodeRecord], Sequence[str]]]] = [
            ("module", modules, _modules), ("op", ops, lambda n: (n.op,)), ("colour", colours, lambda n: (n.colour,)),
            ("reason", reasons, lambda n: (n.reason_code,)),
        ]  # fmt: skip
        for name, values, names_of in asked:
            known = dict.fromkeys(n for node in self.nodes for n in names_of(node) if n) if values else {}
            for value in values:
                if value not in known:
                    raise PolicyError(f"no node has the {name} {value!r}{nearest(value, list(known))}")
            nodes = [n for n in nodes if not values or not set(values).isdisjoint(names_of(n))]
        if not nodes and self.nodes:
            given = ", ".join(f"{name} {' or '.join(values)}" for name, values, _ in asked if values)
            raise PolicyError(f"no node passes all filters at once: {given}")
        return nodes

    def to_json(self) -> str:
        """Write the record as JSON; equal records give equal texts."""
        return json.dumps(msgspec.to_builtins(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "record") -> Record:
        """Read a record strictly; PlanError says where it is none."""
        try:
            made: Record = msgspec.convert(strictly(text, name, "record"), cls)
        except msgspec.ValidationError as e:
            raise PlanError(f"{name}: not a record of fxamp ({e})") from e
        if made.version != RECORD_VERSION:
            raise PlanError(f"{name}: record format {made.version}; this fxamp reads {RECORD_VERSION}")
        return made


def _modules(node: NodeRecord) -> list[str]:
    """Return the path of the module of a node, and those of all modules round it."""
    parts = node.module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
