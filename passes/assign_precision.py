"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Two simulations run forwards over the graph. The first does what `torch.autocast` would do on this device: every node
gets its `autocast` dtype. The second obeys the policy: its pins, what the author's own casts say, and the level's
reading of each rule. Both keep, for every value, the dtype it will have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .errors import PolicyError
from .policy import Policy, check_used, module_override, op_override, type_names
from .rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, RULES, Rule, lookup
from .user_casts import Casts
from .values import ANY, ELIGIBLE, Aliases, Inference, SymbolicInference, is_floating, keys, module_path, module_stack, mutated_operands, source
from .values import LOW as LOW_DTYPES

Place = tuple[str, int]  # an operand: argument name, index in a list argument


@dataclass
class Colouring:
    """What was decided for one node.

    `casts` holds the operands that must be cast and to what; `set_dtype` is the new dtype argument of a user's relative
    cast; `literals` are Python numbers to replace (old, new).
    """

    dtype: torch.dtype
    kind: str
    reason: str
    casts: dict[Place, torch.dtype] = field(default_factory=dict)
    set_dtype: torch.dtype | None = None
    literals: tuple[tuple[float, float], ...] = ()
    causes: tuple[Node, ...] = ()


@dataclass
class Assignment:
    """The colours of a graph, the dtype every value will have, and the dtype autocast gives each node."""

    colours: dict[Node, Colouring]
    dtypes: dict[Node, Any]
    original: dict[Node, Any]
    autocast: dict[Node, torch.dtype]
    infer: Callable[[Node, Callable[[Node], Any]], Any]
    symbolic: bool


def assign_precision(graph: Graph, policy: Policy, original: dict[Node, Any]) -> Assignment:
    """Colour every node that touches a floating value.

    Args:
        graph: legalized, not changed.
        policy: with dtype and device filled in.
        original: the dtype of every value as captured.

    Raises:
        PolicyError: an override matches nothing or contradicts another; an op is banned or, with
            unknown_ops="error", unknown.
    """
    symbolic = any("val" not in n.meta for n in graph.nodes if n.op in ("placeholder", "call_function", "call_method") and original[n] is ANY)
    infer: Any = SymbolicInference() if symbolic else Inference()
    aliases = Aliases(graph)
    shared = (graph, original, infer, aliases)
    reference = Simulation(Policy("O1", dtype=policy.dtype, device=policy.device), *shared, autocast=True)
    reference.run()
    stacks = {n: [(p, type_names(_type(t))) for p, t in module_stack(n)] for n in graph.nodes if n.op.startswith("call")}
    if policy.level != "O0":
        check_used(policy, stacks.values(), (ops.name(n) for n in stacks))
    simulation = Simulation(policy, *shared, stacks=stacks)
    for _ in range(len(aliases.mutated) + 1):
        simulation.run()
        if not simulation.pin_conflicts():
            break
    autocast = {n: c.dtype for n, c in reference.colours.items()}
    return Assignment(simulation.colours, simulation.dtypes, original, autocast, infer, symbolic)


def _type(name: str) -> type | str:
    """Return the class of a qualified name, so that its bases match too; the name itself where it cannot be had."""
    module, _, attribute = name.rpartition(".")
    found = getattr(torch.nn, attribute, None) if module.startswith("torch.nn") else None
    return found if isinstance(found, type) else name


class Simulation:
    """One run forwards over a graph. With `autocast` it does what torch does, without pins or deviations."""

    def __init__(
        self, policy: Policy, graph: Graph, original: dict[Node, Any], infer: Any, aliases: Aliases,
        *, autocast: bool = False, stacks: dict[Node, Any] | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.graph, self.original, self.infer, self.aliases = policy, graph, original, infer, aliases
        self.autocast, self.stacks = autocast, stacks or {}
        self.device = policy.device or "cpu"
        self.casts = Casts(original)
        self.pinned: set[Node] = set()  # representatives of alias sets that must stay FP32
        self.colours: dict[Node, Colouring] = {}
        self.dtypes: dict[Node, Any] = {}
        self.upcast: set[Node] = set()  # values the author has upcast, and moves of them
        self.extreme: set[Node] = set()  # values made with a number that the low dtype cannot hold

    def run(self) -> None:
        """Colour all nodes, in order."""
        self.colours, self.dtypes, self.upcast, self.extreme = {}, dict(self.original), set(), set()
        if self.policy.level == "O0":
            return
        for node in self.graph.nodes:
            if not node.op.startswith("call") or ops.name(node) in ("getitem", "getattr"):
                if node.op.startswith("call"):
                    self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
                    self._taint(node)
                continue
            floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node]) or self.dtypes[o.node] is ANY]
            if ops.name(node) in _ASKS or (not floats and not is_floating(self.original[node])):
                continue
            colouring = self._colour(node, floats)
            if colouring is None:
                continue
            self.colours[node] = colouring
            self.dtypes[node] = self._out(node, colouring)
            if is_floating(self.dtypes[node]) and colouring.kind not in (KEEP, "user_cast") and not colouring.casts:
                self._settle(node, colouring)
            colouring.causes = tuple(o.node for o in floats if o.node in self.colours)
            self._taint(node)

    def pin_conflicts(self) -> bool:
        """Pin every mutated alias set whose members came out in different dtypes; say whether there was a new one."""
        before = len(self.pinned)
        for root, members in self.aliases.sets().items():
            kinds = {self.dtypes[m] for m in members if isinstance(self.dtypes.get(m), torch.dtype) and self.dtypes[m].is_floating_point}
            if len(kinds) > 1:
                self.pinned.add(root)
        for node, colouring in self.colours.items():
            for written in mutated_operands(node):
                places = [(o.name, o.index) for o in ops.operands(node) if o.node is written]
                if any(p in colouring.casts for p in places):
                    self.pinned.add(self.aliases.find(written))
        return len(self.pinned) > before

    # What decides, in order.

    def _colour(self, node: Node, floats: list[ops.Operand]) -> Colouring | None:
        name = ops.name(node)
        low = self.policy.dtype
        region = node.meta.get("autocast_region")
        row, kind = lookup(name, self.device, low)
        in_place = bool(mutated_operands(node)) and (name.endswith("_") or "out" in node.kwargs or name == "setitem")
        if name in ("to", "type_as"):
            return self._user_cast(node)
        if in_place:
            return self._in_place(node, row, floats)
        if not self.autocast and self.aliases.find(node) in self.pinned:
            return self._all_to(torch.float32, node, row, floats, kind, "mutated: its storage is written and shared with FP32 values")
        if not self.autocast and not self._in_mutated_view(node):
            pinned = self._override(node, row, floats, name)
            if pinned is not None:
                return pinned
        if region is not None and region[0] == self.device:
            if not region[1]:
                return self._natural(node, row, floats, "region", "autocast_region: the model disables autocast here")
            low = region[2]
        return self._by_rule(node, name, row, kind, floats, low)

    def _by_rule(self, node: Node, name: str, row: Rule, kind: str, floats: list[ops.Operand], low: Any) -> Colouring:
        known = name in RULES or name.removesuffix("_") in RULES or row.reason != "unknown op"
        if any(self.dtypes[o.node] == torch.float64 for o in floats):
            return self._natural(node, row, floats, kind, "float64: left as it is")
        if not self.autocast:
            kind = self._by_level(node, name, row, kind, floats)
        if kind == LOW:
            return self._low(node, row, floats, low)
        if kind == FP32:
            return self._fp32(node, row, floats)
        if kind in (PROMOTE, FOLLOW):
            if not self.autocast and self.policy.level in ("O2", "O3") and self._lowers(node, row, floats):
                return self._all_to(low, node, row, floats, kind, f"{self.policy.level}_low: not sensitive, beside low operands")
            return self._natural(node, row, floats, kind, "promote: widest operand" if kind == PROMOTE else "follow: its operand's dtype")
        if kind == BANNED and not self.autocast:
            raise PolicyError(
                f"{name} ({source(node) or node.name}, module '{module_path(node)}') is unsafe in low precision, and autocast bans "
                f"it on {self.device}: use binary_cross_entropy_with_logits on the logits, or allow it with "
                f"Policy(ops={{'{name}': 'fp32'}})."
            )
        if not known and not self.autocast:
            if self.policy.unknown_ops == "error":
                raise PolicyError(
                    f"{name} ({source(node) or node.name}, module '{module_path(node)}') has no rule: register one with "
                    "fxamp.register_rule, or choose Policy(unknown_ops='keep')."
                )
            if self.policy.unknown_ops == "fp32":
                return self._all_to(torch.float32, node, row, floats, FP32, "unknown_op: FP32 by policy")
        kept = self._keep(node, floats, kind, "composite: kept whole" if kind == COMPOSITE else f"keep: {row.reason}")
        if known and kind == KEEP and not kept.casts:
            kept.reason = f"as_written: {row.reason}"
        return kept

    def _by_level(self, node: Node, name: str, row: Rule, kind: str, floats: list[ops.Operand]) -> str:
        """Return the kind as the level reads it: O2 runs low what is not sensitive, O3 what has a low kernel."""
        if self.policy.level not in ("O2", "O3") or kind in (LOW, KEEP, BANNED, COMPOSITE):
            return kind
        several = PROMOTE if kind == PROMOTE or len(floats) > 1 else FOLLOW
        if self.device in row.no_low:
            return FP32
        if self.policy.level == "O3":
            return LOW if row.out[0] in ("float", "first") and name not in _MADE else several
        if not row.sensitive:
            return FP32 if kind == FP32 and row.name in _LOSSES else (several if kind == FP32 else kind)
        if row.name not in _LOSSES and self._relieved(node, row):
            return several if kind == FP32 else kind
        return FP32

    def _relieved(self, node: Node, row: Rule) -> bool:
        """Say whether a sensitive op is harmless in low here: rounds once, and leaves no range that low has not."""
        from .facts import rounds_once

        if row.sensitive == "range" and self.policy.dtype is not torch.bfloat16:
            return False
        return rounds_once(node, row.name, self.device, self.policy.dtype)

    def _lowers(self, node: Node, row: Rule, floats: list[ops.Operand]) -> bool:
        """Say whether an op with mixed operands runs low: one is low, and none is a number that low cannot hold."""
        if row.out[0] in ("bool", "int", "complex") or self._in_mutated_view(node):
            return False
        held = {self.dtypes[o.node] for o in floats}
        mixed = any(d in LOW_DTYPES for d in held) and any(d not in LOW_DTYPES for d in held)
        return mixed and ANY not in held and not any(o.node in self.extreme for o in floats)

    def _override(self, node: Node, row: Rule, floats: list[ops.Operand], name: str) -> Colouring | None:
        found = module_override(self.policy, self.stacks.get(node, ())) if self.policy.modules else None
        found = found or (op_override(self.policy, name) if self.policy.ops else None)
        if found is None:
            return None
        reason = f"override: {found}"
        if found.colour == "keep":
            return self._keep(node, floats, "override", reason)
        dtype = self.policy.dtype if found.colour == "low" else torch.float32
        return self._all_to(dtype, node, row, floats, "override", reason)

    # What each kind means for a node.

    def _low(self, node: Node, row: Rule, floats: list[ops.Operand], low: Any) -> Colouring:
        castable = [o for o in floats if self._castable(o, row)]
        other = [o for o in castable if self.dtypes[o.node] in LOW_DTYPES and self.dtypes[o.node] != low]
        if other and not self.autocast:
            return self._all_to(torch.float32, node, row, floats, LOW, "user_cast: an operand is in the other low dtype")
        upcast = [o for o in floats if self.dtypes[o.node] == torch.float32]
        if not self.autocast and upcast and len(upcast) == len(floats) and all(o.node in self.upcast for o in upcast):
            return self._natural(node, row, floats, LOW, "user_cast: every operand was upcast by the author")
        if not castable:
            return self._natural(node, row, floats, LOW, "no_operand: nothing that is cast")
        return self._all_to(low, node, row, floats, LOW, f"low: {row.reason}")

    def _fp32(self, node: Node, row: Rule, floats: list[ops.Operand]) -> Colouring:
        explicit = ops.argument(node, "dtype")
        if row.dtype_arg and isinstance(explicit, torch.dtype):
            return self._natural(node, row, floats, FP32, f"dtype_argument: {explicit}")
        return self._all_to(torch.float32, node, row, floats, FP32, f"fp32: {row.reason}")

    def _in_place(self, node: Node, row: Rule, floats: list[ops.Operand]) -> Colouring | None:
        target = node.args[0] if "out" not in node.kwargs else node.kwargs["out"]
        dtype = self.dtypes.get(target) if isinstance(target, Node) else None
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return None
        casts: dict[Place, torch.dtype] = {}
        if row.same_dtype:
            for o in floats:
                held = self.dtypes[o.node]
                if o.node is not target and held != dtype and held in ELIGIBLE:
                    casts[o.name, o.index] = dtype
        return Colouring(dtype, PROMOTE, "in_place: its target's dtype", casts)

    def _keep(self, node: Node, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        casts = {}
        for o in floats:
            original, held = self.original[o.node], self.dtypes[o.node]
            if original is ANY and held in LOW_DTYPES:
                original = torch.float32
            if isinstance(held, torch.dtype) and isinstance(original, torch.dtype) and held != original:
                casts[o.name, o.index] = original
        dtype = _first_float(self.original[node]) or next((self.original[o.node] for o in floats if isinstance(self.original[o.node], torch.dtype)), None)
        if dtype is None:
            dtype = torch.float32
        return Colouring(dtype, kind, reason, casts)

    def _natural(self, node: Node, row: Rule, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        """Leave the operands as they are, unless the kernel rejects mixed ones: then all go to the widest."""
        held = [self.dtypes[o.node] for o in floats if isinstance(self.dtypes[o.node], torch.dtype)]
        widest = functools.reduce(torch.promote_types, held) if held else torch.float32
        mixed = len(set(held)) > 1
        ranks = [o.node.meta.get("val") for o in floats]
        if mixed and row.same_dtype and row.out[0] != "first":
            return self._all_to(widest, node, row, floats, kind, "widest: the kernel rejects mixed operands")
        if mixed and any(r is None for r in ranks) and kind == PROMOTE:
            return self._all_to(widest, node, row, floats, kind, "unknown_rank: captured without inputs")
        return Colouring(widest, kind, reason)

    def _all_to(self, dtype: Any, node: Node, row: Rule, floats: list[ops.Operand], kind: str, reason: str) -> Colouring:
        """Cast every castable operand; a number that does not fit the low dtype is mended, or keeps the node FP32."""
        literals: tuple[tuple[float, float], ...] = ()
        if dtype in LOW_DTYPES:
            mended = _mend(node, dtype)
            if mended is None:
                if not self.autocast:
                    return self._all_to(torch.float32, node, row, floats, kind, "literal: a number does not fit the low dtype")
            else:
                literals = mended
                reason = "literal: finfo(float32).min becomes the low dtype's own" if literals else reason
        casts = {}
        for o in floats:
            held = self.dtypes[o.node]
            if self._castable(o, row, dtype) and held != dtype and (held in ELIGIBLE or (held is ANY and kind == LOW)):
                casts[o.name, o.index] = dtype
        return Colouring(dtype, kind, reason, casts, literals=literals)

    def _castable(self, operand: ops.Operand, row: Rule, dtype: Any = None) -> bool:
        held = self.dtypes[operand.node]
        if held is ANY:
            return True
        if held not in ELIGIBLE or (row.casts and operand.name not in row.casts):
            return False
        return not (operand.name in row.uncast and dtype in (None, *LOW_DTYPES))

    def _user_cast(self, node: Node) -> Colouring | None:
        intent = self.casts.read(node, self.dtypes)
        if intent.dtype is None or not intent.dtype.is_floating_point:
            return None
        if intent.literal and intent.dtype == torch.float32 and not self.autocast:
            self.upcast.add(node)
        baked = self.casts.baked(node)
        return Colouring(
            intent.dtype, "user_cast", intent.reason, set_dtype=intent.dtype if baked is not None and baked != intent.dtype else None
        )

    # What comes out.

    def _out(self, node: Node, colouring: Colouring) -> Any:
        if colouring.kind == "user_cast":
            return colouring.dtype
        if colouring.kind in (KEEP, COMPOSITE) or node.op == "call_module" or "higher_order" in ops.name(node):
            return self.original[node]
        places = {(o.name, o.index, o.node) for o in ops.operands(node)}
        cast_to: dict[Node, Any] = {n: colouring.casts[name, i] for name, i, n in places if (name, i) in colouring.casts}
        try:
            return self.infer(node, lambda n: cast_to.get(n, self.dtypes[n]))
        except Exception:  # whatever a fake kernel raises on mixed operands: unify them, as P01 asks
            return self._unified(node, colouring)

    def _unified(self, node: Node, colouring: Colouring) -> Any:
        """Cast all floating operands to one dtype when the op rejects the ones it would get."""
        floats = [o for o in ops.operands(node) if self.dtypes[o.node] in ELIGIBLE]
        held = [self.dtypes[o.node] for o in floats]
        if not held:
            return self.original[node]
        widest = functools.reduce(torch.promote_types, held)
        colouring.casts = {(o.name, o.index): widest for o in floats if self.dtypes[o.node] != widest}
        colouring.dtype, colouring.reason = widest, "widest: the kernel rejects mixed operands"
        try:
            return self.infer(node, lambda n: widest if self.dtypes[n] in ELIGIBLE else self.dtypes[n])
        except Exception:  # fake tensors cannot run this op at all
            return self.original[node]

    def _settle(self, node: Node, colouring: Colouring) -> None:
        """Where nothing was cast, the node runs in the dtype that torch's promotion gave its output."""
        made = _first_float(self.dtypes[node])
        if made is not None and not ops.name(node).endswith("_"):
            colouring.dtype = made

    def _in_mutated_view(self, node: Node) -> bool:
        from .values import may_alias

        return may_alias(node) and self.aliases.is_mutated(node)

    def _taint(self, node: Node) -> None:
        """Carry over what the operands are known to be: upcast by the author, or out of the low dtype's range."""
        inputs = [o.node for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
        row = lookup(ops.name(node), self.device)[0]
        if inputs and row.commutes and all(i in self.upcast for i in inputs):
            self.upcast.add(node)
        if is_floating(self.dtypes[node]) and (_extreme(node, self.policy.dtype) or (row.out == ("float",) and row.name not in _BOUNDS and any(i in self.extreme for i in inputs))):
            self.extreme.add(node)


# What asks for a shape, a dtype or nothing: no arithmetic, no colour.
_ASKS = frozenset(
    "sym_size sym_stride sym_numel sym_storage_offset size stride dim numel shape is_floating_point is_complex element_size "
    "_assert_tensor_metadata device is_contiguous".split()
)
_LOSSES = frozenset(n for n, r in RULES.items() if r.reason.startswith("loss"))
_MADE = frozenset(n for n, r in RULES.items() if r.cpu == KEEP)
# Ops that bring a value of any size back into range.
_BOUNDS = frozenset("softmax _softmax _safe_softmax log_softmax sigmoid tanh erf sin cos hardsigmoid hardtanh layer_norm group_norm".split())


def _first_float(dtypes: Any) -> torch.dtype | None:
    if isinstance(dtypes, tuple):
        return next((d for d in map(_first_float, dtypes) if d is not None), None)
    return dtypes if isinstance(dtypes, torch.dtype) and dtypes.is_floating_point else None


def _numbers(node: Node) -> Iterable[float]:
    """Yield the floating Python numbers among a call's arguments."""
    for arg in (*node.args, *node.kwargs.values()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, float) and math.isfinite(item):
                yield item


def _extreme(node: Node, low: Any) -> bool:
    return low in LOW_DTYPES and any(abs(x) > torch.finfo(low).max for x in _numbers(node))


def _mend(node: Node, low: torch.dtype) -> tuple[tuple[float, float], ...] | None:
    """Return the numbers to replace so that all fit the low dtype; None when one does not fit and cannot be replaced."""
    out = []
    for x in _numbers(node):
        if abs(x) <= torch.finfo(low).max:
            continue
        if abs(x) != torch.finfo(torch.float32).max:
            return None
        out.append((x, math.copysign(torch.finfo(low).max, x)))
    return tuple(out)


def decision_keys(graph: Graph) -> dict[Node, str]:
    """Return the stable key of every call node."""
    return keys(graph)
