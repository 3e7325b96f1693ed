"""One run forwards over a graph: what every node would run in, operand by operand, and what comes out.

`Simulation(..., autocast=True)` does what torch's dispatcher does under autocast. Without it, the policy's pins, the
author's casts and the level decide first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Graph, Node

from . import literals, ops
from .bodies import Body, Border
from .colouring import Colouring as Colouring
from .colouring import Place as Place
from .errors import PolicyError
from .extremes import Extremes
from .islands import islands
from .kernels import runs_in
from .levels import by_level
from .policy import Policy, module_override, op_override
from .rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, Rule, lookup
from .user_casts import Casts, observed
from .values import (
    ANY,
    ELIGIBLE,
    Aliases,
    dtype_reference,
    is_floating,
    may_alias,
    module_path,
    module_types,
    mutated_operands,
    original_dtypes,
    source,
)
from .values import LOW as LOW_DTYPES

# What asks for a shape, a dtype or nothing: no arithmetic, no colour.
_ASKS = frozenset(
    """getitem getattr sym_size sym_stride sym_numel sym_storage_offset size stride dim numel shape is_floating_point
    is_complex element_size _assert_tensor_metadata device is_contiguous by_mode""".split()  # noqa: SIM905
)


class Simulation:
    """The state of one run."""

    def __init__(
        self, policy: Policy, graph: Graph, original: dict[Node, Any], infer: Any, aliases: Aliases,
        *, autocast: bool = False, stacks: dict[Node, Any] | None = None, border: Border | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.graph, self.original, self.infer, self.aliases = policy, graph, original, infer, aliases
        self.autocast, self.stacks, self.border = autocast, stacks or {}, border or Border()
        self.device = policy.device or "cpu"
        self.low: Any = policy.dtype
        self.casts = Casts(original)
        # Representatives of alias sets that must stay FP32.
        self.pinned = {aliases.find(v) for v in observed(graph) if original[v] in (torch.float32, ANY)}
        self.colours: dict[Node, Colouring] = {}
        self.dtypes: dict[Node, Any] = {}
        self.upcast: set[Node] = set()  # values the author has upcast, and moves of them
        self.aggressive = not autocast and policy.level in ("O2", "O3")
        self.islands = islands(graph) if self.aggressive else frozenset()

    def run(self) -> None:
        """Colour all nodes, in order."""
        self.colours, self.dtypes, self.upcast = {}, dict(self.original), set()
        self.extremes, self._pinned_before = Extremes(self.graph, self.low), len(self.pinned)
        self.dtypes.update(self.border.inputs)
        if self.policy.level == "O0":
            return
        for node in self.graph.nodes:
            if not node.op.startswith("call"):
                continue
            name = ops.name(node)
            floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node]) or self.dtypes[o.node] is ANY]
            if name in _ASKS:
                if name == "getitem":
                    self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
            elif any(b.first is not None for b in self.border.bodies.get(node, ())):
                self._enter(node, self.border.bodies[node][0])
            elif floats or is_floating(self.original[node]):
                self._visit(node, name, floats)
            if not self.autocast:
                self._learn(node, name)

    @property
    def extreme(self) -> set[Node]:
        """Return the values that the low dtype cannot hold."""
        return self.extremes.values

    def returned(self) -> dict[Node, Any]:
        """Return the dtype that each output of the graph must have."""
        held = self.original if self.border.restore_outputs else self.dtypes
        return {n: held[n] for n in self.graph.output_node().all_input_nodes}

    def pin_conflicts(self) -> bool:
        """Pin every mutated alias set whose members came out in different dtypes; say whether there was a new one."""
        for root, members in self.aliases.sets().items():
            held = {self.dtypes.get(m) for m in members}
            if len({d for d in held if isinstance(d, torch.dtype) and d.is_floating_point}) > 1:
                self.pinned.add(root)
        for node, colouring in self.colours.items():
            written = mutated_operands(node)
            if any(o.node in written and (o.name, o.index) in colouring.casts for o in ops.operands(node)):
                self.pinned.update(self.aliases.find(w) for w in written)
        return len(self.pinned) > self._pinned_before

    def _enter(self, node: Node, body: Body) -> None:
        """Run through the body of a higher-order op with the dtypes that its operands have here."""
        border = Border({p: self.dtypes[v] for p, v in body.operands(node).items()}, False, body.bodies())
        original = original_dtypes(body.graph, body.attribute)
        inside = Simulation(
            self.policy, body.graph, original, self.infer, Aliases(body.graph), autocast=self.autocast,
            stacks=module_types(body.graph), border=border,
        )  # fmt: skip
        inside.run()
        while not self.autocast and inside.pin_conflicts():
            inside.run()
        self.dtypes[node] = body.dtypes(inside.dtypes)
        dtype = _first_float(self.dtypes[node]) or torch.float32
        self.colours[node] = Colouring(dtype, "body", "body: rewritten inside, between the dtypes it has here")

    def _visit(self, node: Node, name: str, floats: list[ops.Operand]) -> None:
        colouring = self._colour(node, name, floats)
        if colouring is None:
            return
        self.dtypes[node] = self._out(node, colouring)
        if not self.autocast and _has_unknown(self.dtypes[node]) and self._runs_low(floats, colouring):
            colouring = self._keep(node, floats, KEEP, "keep: what it gives cannot be told without shapes")
            self.dtypes[node] = self._out(node, colouring)
        if not self.autocast:
            colouring = self._fit_numbers(node, name, floats, colouring)
        self.colours[node] = colouring
        colouring.causes = tuple(o.node for o in floats if o.node in self.colours)

    def _runs_low(self, floats: list[ops.Operand], colouring: Colouring) -> bool:
        return any(colouring.casts.get((o.name, o.index), self.dtypes[o.node]) in LOW_DTYPES for o in floats)

    # What decides, in order.

    def _colour(self, node: Node, name: str, floats: list[ops.Operand]) -> Colouring | None:
        row, kind = lookup(name, self.device, self.low)
        if name in ("to", "type_as"):
            return self._user_cast(node)
        if mutated_operands(node) and (name.endswith("_") or "out" in node.kwargs or name == "setitem"):
            return self._in_place(node, row, floats)
        if not self.autocast and self.aliases.find(node) in self.pinned:
            why = "mutated: its storage is written, and shared with FP32 values"
            if not self.aliases.is_mutated(node):
                why = "keep: the program reads its bits, or how many it has"
            return self._all_to(torch.float32, row, floats, kind, why)
        moves_written = may_alias(node) and self.aliases.is_mutated(node)
        if not self.autocast and not moves_written and (pinned := self._override(node, name, row, floats)):
            return pinned
        low, region = self.low, node.meta.get("autocast_region")
        if region is not None and region[0] == self.device:
            if not region[1]:
                return self._natural(row, floats, "region", "autocast_region: the model disables autocast here")
            low = region[2] or low
        if any(self.dtypes[o.node] == torch.float64 for o in floats):
            return self._natural(row, floats, kind, "float64: left as it is")
        if self.autocast:
            return self._by_kind(node, name, row, kind, floats, low)
        if node in self.islands:
            return self._fp32(node, row, floats, "island: a norm written by hand is FP32 throughout")
        if self.aggressive:
            held = [o.node for o in floats]
            by_rule, kind = kind, by_level(self.policy, node, row, kind, held, any(n in self.extreme for n in held))
            if kind == LOW != by_rule and any(self.dtypes[n] is ANY for n in held):
                kind = PROMOTE  # what has an unknown dtype may be complex, or an index
        if kind in (PROMOTE, FOLLOW) and not moves_written and self._lowers(row, floats):
            return self._all_to(low, row, floats, kind, f"{self.policy.level}_low: not sensitive, beside low operands")
        return self._by_kind(node, name, row, kind, floats, low)

    def _by_kind(self, node: Node, name: str, row: Rule, kind: str, floats: list[ops.Operand], low: Any) -> Colouring:
        if kind == LOW and not self.autocast and not runs_in(node, low, self.device, self.dtypes.get):
            return self._all_to(torch.float32, row, floats, KEEP, f"keep: no kernel for {low} on this {self.device}")
        if kind == LOW:
            return self._low(row, floats, low)
        if kind == FP32:
            return self._fp32(node, row, floats)
        if kind == PROMOTE:
            return self._natural(row, floats, kind, "promote: widest operand")
        if kind == FOLLOW or self.autocast:
            return self._natural(row, floats, kind, "follow: its operand's dtype")
        if kind == BANNED:
            raise PolicyError(
                f"{name} ({source(node) or node.name}, module '{module_path(node)}') is unsafe in low precision, and "
                f"autocast bans it on {self.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
                f"with Policy(ops={{'{name}': 'fp32'}})."
            )
        known = row.reason != "unknown op"
        if not known and self.policy.unknown_ops == "error":
            raise PolicyError(
                f"{name} ({source(node) or node.name}, module '{module_path(node)}') has no rule: register one with "
                "fxamp.register_rule, or choose Policy(unknown_ops='keep')."
            )
        if not known and self.policy.unknown_ops == "fp32":
            return self._all_to(torch.float32, row, floats, FP32, "unknown_op: FP32 by policy")
        if kind == KEEP and (reference := dtype_reference(node)) is not None:
            dtype = _first_float(self.dtypes[reference]) or torch.float32
            return Colouring(dtype, FOLLOW, "follow: made with the dtype of its reference")
        kept = self._keep(node, floats, kind, "composite: kept whole" if kind == COMPOSITE else f"keep: {row.reason}")
        if known and kind == KEEP and not kept.casts:
            kept.reason = f"as_written: {row.reason}"
        return kept

    def _lowers(self, row: Rule, floats: list[ops.Operand]) -> bool:
        """Say whether an op with mixed operands runs low at O2: one is low, none is a number that low cannot hold."""
        if not self.aggressive or row.out[0] in ("bool", "int", "complex"):
            return False
        held = {self.dtypes[o.node] for o in floats}
        mixed = any(d in LOW_DTYPES for d in held) and any(d not in LOW_DTYPES for d in held)
        return mixed and ANY not in held and not any(o.node in self.extreme for o in floats)

    def _override(self, node: Node, name: str, row: Rule, floats: list[ops.Operand]) -> Colouring | None:
        found = module_override(self.policy, self.stacks.get(node, ())) if self.policy.modules else None
        found = found or (op_override(self.policy, name) if self.policy.ops else None)
        if found is None:
            return None
        reason = f"override: {found}"
        if found.colour == "keep":
            return self._keep(node, floats, "override", reason)
        return self._all_to(self.low if found.colour == "low" else torch.float32, row, floats, "override", reason)

    # What each kind means for a node.

    def _low(self, row: Rule, floats: list[ops.Operand], low: Any) -> Colouring:
        castable = [o for o in floats if self._castable(o, row, low)]
        if not castable:
            return self._natural(row, floats, LOW, "no_operand: nothing that is cast")
        if not self.autocast and any(
            self.dtypes[o.node] in LOW_DTYPES and self.dtypes[o.node] != low for o in castable
        ):
            return self._all_to(torch.float32, row, floats, LOW, "user_cast: an operand is in the other low dtype")
        if not self.autocast and all(o.node in self.upcast for o in floats):
            return self._natural(row, floats, LOW, "user_cast: every operand was upcast by the author")
        extremes = self.extremes
        if (
            self.aggressive
            and all(o.node in extremes.fixed for o in floats)
            and any(o.node in extremes.values for o in floats)
        ):
            return self._natural(row, floats, LOW, "position: made of integers and buffers alone")
        return self._all_to(low, row, floats, LOW, f"low: {row.reason}")

    def _fp32(self, node: Node, row: Rule, floats: list[ops.Operand], why: str = "") -> Colouring:
        explicit = ops.argument(node, "dtype")
        if row.dtype_arg and isinstance(explicit, torch.dtype):
            return self._natural(row, floats, FP32, f"dtype_argument: {explicit}")
        return self._all_to(torch.float32, row, floats, FP32, why or f"fp32: {row.reason}")

    def _in_place(self, node: Node, row: Rule, floats: list[ops.Operand]) -> Colouring | None:
        target = node.kwargs.get("out", node.args[0] if node.args else None)
        dtype = self.dtypes.get(target) if isinstance(target, Node) else None
        strict = row.same_dtype or ops.name(node) == "setitem"  # index_put, where an index is a tensor
        if dtype is ANY and strict:
            why = "unknown_rank: captured without inputs, so its target's dtype is not known"
            return self._keep(node, [o for o in floats if o.node is not target], PROMOTE, why)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return None
        sources = [o for o in floats if strict and o.node is not target and self.dtypes[o.node] in ELIGIBLE]
        casts = {(o.name, o.index): dtype for o in sources if self.dtypes[o.node] != dtype}
        return Colouring(dtype, PROMOTE, "in_place: its target's dtype", casts)

    def _keep(self, node: Node, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        casts: dict[Place, torch.dtype] = {}
        before = []
        for o in floats:
            original, held = self.original[o.node], self.dtypes[o.node]
            if original is ANY and held in LOW_DTYPES:
                original = torch.float32
            if isinstance(original, torch.dtype):
                before.append(original)
                if isinstance(held, torch.dtype) and held != original:
                    casts[o.name, o.index] = original
        dtype = _first_float(self.original[node]) or next(iter(before), torch.float32)
        return Colouring(dtype, kind, reason, casts)

    def _natural(self, row: Rule, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        """Leave the operands as they are, unless the kernel rejects mixed ones: then all go to the widest."""
        held = [self.dtypes[o.node] for o in floats if isinstance(self.dtypes[o.node], torch.dtype)]
        widest = functools.reduce(torch.promote_types, held) if held else torch.float32
        mixed = len(set(held)) > 1
        if mixed and row.same_dtype and row.out[0] != "first":
            return self._all_to(widest, row, floats, kind, "widest: the kernel rejects mixed operands")
        unknown = any(self.dtypes[o.node] is ANY for o in floats) and any(d in LOW_DTYPES for d in held)
        ranks_known = all("val" in o.node.meta for o in floats)
        if kind == PROMOTE and not ranks_known and (mixed or unknown):
            return self._all_to(torch.float32, row, floats, kind, "unknown_rank: captured without inputs")
        return Colouring(widest, kind, reason)

    def _all_to(self, dtype: Any, row: Rule, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        """Cast every castable operand that has another dtype."""
        casts = {}
        for o in floats:
            held = self.dtypes[o.node]
            if self._castable(o, row, dtype) and held != dtype and (held is not ANY or dtype in LOW_DTYPES):
                casts[o.name, o.index] = dtype
        return Colouring(dtype, kind, reason, casts)

    def _castable(self, operand: ops.Operand, row: Rule, dtype: Any) -> bool:
        held = self.dtypes[operand.node]
        if held is not ANY and held not in ELIGIBLE:
            return False
        if row.casts and operand.name not in row.casts:
            return False
        return not (operand.name in row.uncast and dtype in LOW_DTYPES)

    def _user_cast(self, node: Node) -> Colouring | None:
        forced = module_override(self.policy, self.stacks.get(node, ())) if self.policy.modules else None
        observed = None if forced is not None and forced.colour == "fp32" else node.meta.get("read")
        intent = self.casts.read(node, self.dtypes, observed)
        if intent.dtype is None or not intent.dtype.is_floating_point:
            return None
        if intent.literal and intent.dtype == torch.float32:
            self.upcast.add(node)
        baked = self.casts.baked(node)
        changed = intent.dtype if baked is not None and baked != intent.dtype else None
        value = next(ops.operands(node))
        number = 0.0 if intent.literal else self.extremes.constants.get(value.node, 0.0)
        if not self.autocast and intent.dtype in LOW_DTYPES and literals.is_extreme(number, intent.dtype):
            if abs(number) != literals.FP32_MAX:
                why = "literal: a number does not fit the low dtype"
                return Colouring(torch.float32, "cast", why, set_dtype=torch.float32)
            why = "literal: finfo(float32).min becomes the low dtype's own"
            return Colouring(intent.dtype, "cast", why, set_dtype=changed, clamped=((value.name, value.index),))
        return Colouring(intent.dtype, "cast", intent.reason, set_dtype=changed)

    def _fit_numbers(self, node: Node, name: str, floats: list[ops.Operand], colouring: Colouring) -> Colouring:
        """Mend a number that the low dtype cannot hold, or keep the node FP32."""
        if colouring.dtype not in LOW_DTYPES or colouring.kind in (KEEP, "cast"):
            return colouring
        low, numbers, constants = colouring.dtype, list(literals.numbers(node)), self.extremes.constants
        held = {o: constants[o.node] for o in floats if o.node in constants}
        lowest = [o for o in floats if colouring.kind == LOW and o.node in self.extremes.lowest]
        clamped = [*lowest, *(o for o, x in held.items() if literals.is_extreme(x, low))]
        mended = literals.mend([*numbers, *held.values()], low)
        if mended is None or (self.aggressive and literals.has_tiny(name, numbers, low)):
            if mutated_operands(node):
                self.pinned.add(self.aliases.find(mutated_operands(node)[0]))
                return colouring
            row = lookup(name, self.device, self.low)[0]
            why = "literal: a number does not fit the low dtype"
            colouring = self._all_to(torch.float32, row, floats, colouring.kind, why)
            if dtype_reference(node) is not None:
                colouring.set_dtype = torch.float32
            self.dtypes[node] = torch.float32 if colouring.set_dtype else self._out(node, colouring)
        elif mended or clamped:
            colouring.literals = tuple(pair for pair in mended if pair[0] in numbers)
            colouring.clamped = tuple((o.name, o.index) for o in clamped)
            colouring.reason = "literal: finfo(float32).min becomes the low dtype's own"
        return colouring

    # What comes out.

    def _out(self, node: Node, colouring: Colouring) -> Any:
        """Return the output's dtypes; where nothing was cast, the node runs in the dtype torch's promotion gives."""
        name = ops.name(node)
        if colouring.kind == "cast":
            return colouring.dtype
        kept = colouring.kind in (KEEP, COMPOSITE) and not self.autocast
        if kept or node.op == "call_module" or name.startswith("higher_order::"):
            return self.original[node]
        casts = colouring.casts
        wanted = {o.node: casts[o.name, o.index] for o in ops.operands(node) if (o.name, o.index) in casts}
        try:
            made = self.infer(node, lambda n: wanted.get(n, self.dtypes[n]))
        except Exception:  # whatever a kernel raises on mixed operands: they are unified
            return self._unified(node, colouring)
        if not colouring.casts and not name.endswith("_"):
            colouring.dtype = _first_float(made) or colouring.dtype
        return made

    def _unified(self, node: Node, colouring: Colouring) -> Any:
        """Cast all floating operands to the widest when the op rejects the dtypes it would get."""
        floats = [o for o in ops.operands(node) if self.dtypes[o.node] in ELIGIBLE]
        if not floats:
            return self.original[node]
        widest = functools.reduce(torch.promote_types, [self.dtypes[o.node] for o in floats])
        colouring.casts = {(o.name, o.index): widest for o in floats if self.dtypes[o.node] != widest}
        colouring.dtype, colouring.reason = widest, "widest: the kernel rejects mixed operands"
        try:
            return self.infer(node, lambda n: widest if self.dtypes[n] in ELIGIBLE else self.dtypes[n])
        except Exception:  # fake tensors cannot run this op at all
            return self.original[node]

    def _learn(self, node: Node, name: str) -> None:
        """Carry over what the operands are known to be: upcast by the author, or nothing that low can hold."""
        row = lookup(name, self.device, self.low)[0]
        self.extremes.visit(node, name, row, self.dtypes)
        if not is_floating(self.dtypes[node]):
            return
        inputs = [o.node for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
        if inputs and (row.commutes or name == "getitem") and all(i in self.upcast for i in inputs):
            self.upcast.add(node)


def _has_unknown(dtypes: Any) -> bool:
    return dtypes is ANY or (isinstance(dtypes, tuple) and any(map(_has_unknown, dtypes)))


def _first_float(dtypes: Any) -> torch.dtype | None:
    if isinstance(dtypes, tuple):
        return next((d for d in map(_first_float, dtypes) if d is not None), None)
    return dtypes if isinstance(dtypes, torch.dtype) and dtypes.is_floating_point else None
