"""The record: what was decided for every node and what it costs, as data that other programs read.

`schemas/record.json` is its JSON Schema (2020-12). Nothing in a record changes from one run to the next.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from passes.contract.errors import PlanError
from passes.contract.plan_format import strictly

RECORD_VERSION = 1
SCHEMA = Path(__file__).parents[2] / "schemas" / "record.json"


class Cast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cast that was inserted in front of a node.

    Attributes:
        operand: key of the node whose value is cast, or the name of an input, a parameter or a buffer.
        before: dtype of the value.
        after: dtype that the node reads.
        bytes: read and written by the cast; None where sizes are not known.
        shared: how many nodes read what the cast gives.
    """

    operand: str
    before: str
    after: str
    bytes: int | None
    shared: int


class Read(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a node reads.

    Attributes:
        value: key of the node that gives it, or the name of an input, a parameter or a buffer.
        kind: which of these.
        cast: dtype that an inserted cast gives it on the way; "" where there is none.
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
        file: of the author's line, relative to the working directory where it is below it.
        line: number of the author's line, 0 where it is not known.
        code: the author's line.
        torch_source: the line inside torch, where the author's called into it.
        colour: dtype that it runs in.
        autocast: dtype that torch.autocast gives it.
        original: dtype of what it gives without mixed precision; "" where that is not known.
        kind: of the rule that was applied.
        reason_code: one of `passes.contract.reasons.Code`.
        reason: a sentence.
        causes: keys of the decisions that it follows from.
        dtypes: of the tensors that it gives.
        shapes: of the tensors that it gives; symbolic sizes by name.
        bytes: of the tensors that it gives.
        flops: of its forward, by torch's formulas.
        saved_bytes: of the storages that it is the first to keep for backward.
        casts: inserted in front of it.
        reads: the values that it is given.
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
    """Sums over the nodes of all graphs, None where sizes are not known.

    Attributes:
        nodes: decided on.
        low_ops: of these, run in a low dtype.
        fp32_ops: of these, run in FP32.
        unknown_ops: of these, without a rule.
        user_casts: of these, casts of the author's.
        casts: inserted and left after elimination.
        cast_bytes: read and written by them.
        bytes: of floating values that nodes give.
        low_bytes: of these, of nodes that run low, in percent.
        flops: of the forward.
        low_flops: of these, of nodes that run low, in percent.
        saved_bytes: kept for backward.
        saved_bytes_fp32: likewise, without mixed precision.
        saved_bytes_autocast: likewise, under torch.autocast; None where its device is absent.
        deviations: nodes that may differ from torch.autocast on purpose.
    """

    nodes: int
    low_ops: int
    fp32_ops: int
    unknown_ops: int
    user_casts: int
    casts: int
    cast_bytes: int | None
    bytes: int | None
    low_bytes: float | None
    flops: int | None
    low_flops: float | None
    saved_bytes: int | None
    saved_bytes_fp32: int | None
    saved_bytes_autocast: int | None
    deviations: int


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known of a conversion.

    Attributes:
        version: of this format.
        policy: as text.
        device: that it was decided for.
        capture: front end.
        verified: "fake" or "symbolic".
        torch: version that it was made with.
        fxamp: version that it was made with.
        states: of the model that the graphs hold for.
        parameters: how many numbers the model has.
        totals: over all nodes.
        nodes: in the order of the graphs.
        notes: what was not done as usual.
        output_casts: casts of the outputs, inserted after all nodes.
    """

    version: int
    policy: str
    device: str
    capture: str
    verified: str
    torch: str
    fxamp: str
    states: tuple[str, ...]
    parameters: int | None
    totals: Totals
    nodes: tuple[NodeRecord, ...]
    notes: tuple[str, ...]
    output_casts: tuple[Cast, ...] = ()

    @property
    def has_casts(self) -> bool:
        """Whether the places of casts are known. For a plan alone, or a compiled model, only their number is known."""
        return self.totals.casts == 0 or bool(self.output_casts) or any(n.casts for n in self.nodes)

    @property
    def casts_elsewhere(self) -> int:
        """How many casts are in front of no listed node: in states that repeat decisions, or inside bodies."""
        listed = len(self.output_casts) + sum(len(n.casts) for n in self.nodes)
        return self.totals.casts - listed if self.has_casts else 0

    def to_json(self) -> str:
        """Write the record, the same text for the same record."""
        return json.dumps(msgspec.to_builtins(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "record") -> Record:
        """Read a record strictly.

        Raises:
            PlanError: it is not one; says where.
        """
        try:
            made: Record = msgspec.convert(strictly(text, name, "record"), cls)
        except msgspec.ValidationError as e:
            raise PlanError(f"{name}: not a record of fxamp ({e})") from e
        if made.version != RECORD_VERSION:
            raise PlanError(f"{name}: record format {made.version}; this fxamp reads {RECORD_VERSION}")
        return made


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a record."""
    made = json.loads(msgspec.json.encode(msgspec.json.schema(Record)))  # in which a default is as JSON has it
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fxamp precision record", **made}
