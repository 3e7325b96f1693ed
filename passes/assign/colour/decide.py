"""What decides on a node: the user's code, the policy, an autocast region, and last the rule of its op.

Casts, in-place writes and reads of bits in the user's code come first. Which of the others are asked, and in which
order, is a matter of the strategy: `AutocastRules` do what `torch.autocast` does, `PolicyRules` what a policy asks for.

Before: softmax(x: bf16), by a rule that runs it in FP32 as it is sensitive to rounding
After:  AutocastRules: in the dtype of the device's list; PolicyRules at O2: FP32
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...contract.policy import Level, module_override, op_override
from ...contract.reasons import AS_AUTOCAST, CAST, OVERRIDE, REGION, Code, Reason
from ...form import Choice, Clamp, SetDtype, UnderAutocast
from ...graph.aliases import is_in_place, may_alias, may_write, mutated_operands, out_operands
from ...graph.grad import requires_grad
from ...graph.islands import islands
from ...graph.notes import DECOMPOSE, note_of, region_on
from ...graph.values import ELIGIBLE, LOW_DTYPES, ValueDtype, described, dtype_reference, first_float, literal_dtype
from ...ops import numbers, ops
from ...ops.facts import accumulates, facts_of, lacks_low, rule_of
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, row_of
from .extremes import converts
from .kernels import all_to, castable, fit_kernel, fit_numbers, keep, lacks_low_kernel, natural, operand_casts
from .retained import retained
from .simulate import Simulation, Site
from .user_casts import meaning, observed, uncopied_without_grad


def site_of(run: Simulation, node: Node, floats: Iterable[ops.Operand]) -> Site:
    """Return a call with its row of the op table, and with the low dtype that applies to it."""
    row, kind = rule_of(node, run.device, run.low)
    region = region_on(node, run.device)
    low = (
        torch.float16
        if run.device in row.fp16_on and not run.policy.level.stores_low
        else (region and region[2]) or run.low
    )
    return Site(node, row, kind, tuple(floats), low)


def decide(run: Simulation, site: Site) -> Choice | None:
    """Return the dtype that a node runs in, and why; None if there is nothing to decide."""
    if site.row.is_cast:
        return _user_cast(run, site)
    choice = _as_read(run, site)
    if choice is None and (is_in_place(site.node) or out_operands(site.node)) and mutated_operands(site.node):
        return _in_place(run, site)
    return choice or run.rules.decide(run, site)


# The user's code.


def _user_cast(run: Simulation, site: Site) -> Choice | None:
    """Colour a user cast; a cast to a dtype that is not floating has no colour."""
    node = site.node
    forced = module_override(run.policy, run.stacks.get(node, ()))
    # What was read under autocast does not count if the policy forces FP32.
    read = None if forced is not None and forced.colour == "fp32" else note_of(node).read
    written = run.aliases.find(node) in run.pinned  # then a cast that was no copy must stay none
    exact = written or not run.policy.level.stores_low
    intent = meaning(node, run.original, run.dtypes, read, exact=exact)
    if intent.dtype is None or not intent.dtype.is_floating_point:
        return None
    if intent.literal and intent.dtype == torch.float32:
        run.upcast.add(node)
    baked = literal_dtype(node)
    edits = (SetDtype(intent.dtype),) if baked is not None and baked != intent.dtype else ()
    value = next(ops.operands(node))
    named = intent.literal and note_of(node).cast != "autocast"
    number = 0.0 if named else run.extremes.constants.get(value.node, 0.0)
    if intent.dtype not in LOW_DTYPES or not numbers.is_extreme(number, intent.dtype):
        reason = site.of_kind(FOLLOW if intent.free else CAST).says(intent.reason)
        return Choice(intent.dtype, reason, edits)
    if not numbers.is_lowest(number):
        reason = Reason(Code.LITERAL, Code.LITERAL.meaning, CAST)
        return Choice(torch.float32, reason, (SetDtype(torch.float32),))
    reason = Reason(Code.LITERAL, "finfo(float32).min becomes the minimum of the low dtype", CAST)
    return Choice(intent.dtype, reason, (*edits, Clamp(value.place)))


def _as_read(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that no rule fits as under autocast, and a factory as the dtype that the user's code read there."""
    read, whole = note_of(site.node).read, note_of(site.node).under_autocast
    choice = overridden(run, site) if read is not None or whole else None
    if read is not None and (choice is None or choice.dtype != torch.float32):
        why = Code.DTYPE_ARGUMENT(f"under autocast your code reads {read} here")
        return Choice(read, site.of_kind(FOLLOW).says(why, final=True), (SetDtype(read),))
    return choice or ((outside_autocast(run, site) or run.rules.whole(run, site)) if whole else None)


def _in_place(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that writes to a tensor, `out=` or else its first argument: the dtype of that tensor decides."""
    first, out = site.node.args[0] if site.node.args else None, out_operands(site.node)
    targets = out or [t for t in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(t, Node)]
    dtype = next((d for t in targets if first_float(d := run.dtypes[t])), None)
    if not isinstance(dtype, torch.dtype):
        return None
    strict = site.row.same_dtype or (bool(out) and not site.row.casts_out)  # what is written must have its dtype
    sources = [o for o in site.floats if strict and o.node not in targets and run.dtypes[o.node] in ELIGIBLE]
    casts = operand_casts(run.dtypes, sources, lambda o: dtype)
    return Choice(dtype, site.of_kind(PROMOTE).says(Code.IN_PLACE("its target's dtype")), casts)


# The policy, regions and storage.


def pinned(run: Simulation, site: Site) -> Choice | None:
    """Keep the dtype of a value that shares storage with a written one, or whose bits or gradients depend on it."""
    node = site.node
    if run.aliases.find(node) not in run.pinned:
        return None
    why = Code.MUTATED(Code.MUTATED.meaning)
    if not run.aliases.is_mutated(node):
        why = Code.KEEP(
            "your code reads its bits or element size, writes numbers into it that depend on its dtype, or casts it "
            "where gradients are off"
        )
    elif may_alias(node):
        # A cast before a view makes a copy, which writes would not reach.
        return natural(run, site, why, final=True)
    # Not FP32: a cast of a value that the user made low is a copy, which writes would not reach.
    return keep(run, site, why)


def overridden(run: Simulation, site: Site) -> Choice | None:
    """Return the policy's override of a node itself, of the module that it was made in, or else of its op."""
    if moves_written(run, site):
        return None
    policy = run.policy
    override = op_override(policy, run.named.get(site.node, ""))
    override = override or module_override(policy, run.stacks.get(site.node, ()))
    override = override or op_override(policy, ops.name(site.node))
    if override is None:
        return None
    if override.colour == "low" and lacks_low_kernel(run, site.node, site.row, site.low):
        whole = "" if override.kind == "op" else ", which the override of its module covers: name narrower modules, or"
        raise PolicyError(
            f"{override}: {described(site.node)} has no kernel for {site.low} on this {run.device}{whole or ';'} "
            "leave it FP32."
        )
    reason = Reason(Code.OVERRIDE, str(override), OVERRIDE)
    if override.colour == "keep":
        return keep(run, site, reason)
    return all_to(run, site, run.low if override.colour == "low" else torch.float32, reason)


def outside_autocast(run: Simulation, site: Site) -> Choice | None:
    """Leave an op as it is where the model disables autocast, or whose operands are on another device."""
    region, away = region_on(site.node, run.device), {o.node in run.elsewhere for o in site.floats} == {True}
    if (region is None or region[1]) and not away:
        return None
    why = Code.AUTOCAST_REGION("the model disables autocast here")
    why = Code.AS_WRITTEN("autocast casts nothing on its device") if away else why
    return natural(run, site.of_kind(REGION), why)


def beside_float64(run: Simulation, site: Site) -> Choice | None:
    """Leave an op with a float64 operand as it is, unless it is an FP32 op that also reads low values."""
    dtypes = {run.dtypes[o.node] for o in site.floats}
    if torch.float64 not in dtypes or (site.kind == FP32 and not dtypes.isdisjoint(LOW_DTYPES)):
        return None
    return natural(run, site, Code.FLOAT64("left as it is"), final=True)


def moves_written(run: Simulation, site: Site) -> bool:
    """Say whether the result of a node shares storage that some node writes."""
    return may_alias(site.node) and run.aliases.is_mutated(site.node)


# The rule: what each kind means.


def without_kernel(run: Simulation, site: Site) -> Choice:
    """Run an op without a low kernel in FP32, unless its operands have their dtypes from before conversion."""
    why = f"no kernel for {site.low} on this {run.device}"
    if all(run.dtypes[o.node] == run.original[o.node] for o in site.floats):
        return keep(run, site.of_kind(KEEP), Code.AS_WRITTEN(why))
    return all_to(run, site.of_kind(KEEP), torch.float32, Code.KEEP(why))


def _low(run: Simulation, site: Site) -> Choice:
    """Colour a `low` op low, if it has an operand that may be cast."""
    if not any(castable(run, o, site.row, site.low) for o in site.floats):
        return natural(run, site, Code.NO_OPERAND("no operand is cast"), final=True)
    return all_to(run, site, site.low, Code.LOW(site.row.reason))


def fp32(run: Simulation, site: Site, why: Reason | None = None) -> Choice:
    """Colour an op that runs in FP32, unless its `dtype=` argument decides."""
    explicit = note_of(site.node).dtype_argument or ops.argument(site.node, "dtype")
    if site.row.dtype_arg and isinstance(explicit, torch.dtype):
        return natural(run, site.of_kind(FP32), Code.DTYPE_ARGUMENT(str(explicit)), final=True)
    return all_to(run, site.of_kind(FP32), torch.float32, why or Code.FP32(site.row.reason))


def _promote(run: Simulation, site: Site) -> Choice:
    choice = natural(run, site, Code.PROMOTE("widest operand"))
    widens = DEVICES[run.device].lists in site.row.widens
    return all_to(run, site, choice.dtype, choice.reason) if widens else choice


def _follow(run: Simulation, site: Site) -> Choice:
    return natural(run, site, Code.FOLLOW("its operand's dtype"))


def _banned(run: Simulation, site: Site) -> Choice:
    raise PolicyError(
        f"{described(site.node)} is unsafe in low precision, and "
        f"autocast bans it on {run.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
        f"with Policy(ops={{'{ops.name(site.node)}': 'fp32'}})."
    )


def _kept(run: Simulation, site: Site) -> Choice:
    """Colour an op that keeps its dtypes, because its rule says so or because it has no rule."""
    if not site.row.known:
        return _unknown(run, site)
    like = _like_its_reference(run, site)
    if like is not None:
        return like
    explicit = ops.argument(site.node, "dtype") if site.row.exact else None
    why = Code.DTYPE_ARGUMENT(str(explicit)) if isinstance(explicit, torch.dtype) else Code.KEEP(site.row.reason)
    choice = keep(run, site, why)
    written = choice.reason.because(Code.AS_WRITTEN(site.row.reason))
    return choice if choice.casts else replace(choice, reason=written)


def _like_its_reference(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that makes a value with the dtype of another value; None for any other op."""
    reference = dtype_reference(site.node)
    if reference is None:
        return None
    dtype = first_float(run.dtypes[reference]) or torch.float32
    return Choice(dtype, site.of_kind(FOLLOW).says(Code.FOLLOW("made with the dtype of its reference")))


def _unknown(run: Simulation, site: Site) -> Choice:
    """Colour an op without a rule, according to the policy's `unknown_ops`."""
    if run.policy.unknown_ops == "error":
        raise PolicyError(
            f"{described(site.node)} has no rule: register one with fxamp.register_rule, or choose another "
            "unknown_ops: 'autocast' gives it what torch.autocast would, 'keep' the dtypes that it had."
        )
    if run.policy.unknown_ops == "fp32":
        return all_to(run, site.of_kind(FP32), torch.float32, Code.UNKNOWN_OP("FP32 by policy"))
    return _like_its_reference(run, site) or keep(run, site, Code.KEEP(site.row.reason))


def casts_again(run: Simulation, node: Node) -> bool:
    """Say whether autocast casts an input of a recurrence several times, and sums gradients of these casts in FP32."""
    row = row_of(node)
    if not row.recurrent or not ops.argument(node, row.casts_again):
        return False
    value = node.all_input_nodes[0]
    return run.dtypes[value] == torch.float32 and value in requires_grad(run.graph)


def runs_whole(site: Site) -> bool:
    """Say whether no rule covers a call that can be given a region of autocast, of known results."""
    if site.kind != COMPOSITE and site.row.known:
        return False
    seen = note_of(site.node).autocast is not None
    if site.row.higher_order:
        return seen and not site.row.known
    inside = note_of(site.node).made_by == DECOMPOSE and site.row.gives == "first"  # whose dtype is known
    if inspect.isfunction(site.node.target):  # the tracer calls it as it is, as it does `torch.masked.softmax`
        return seen
    return ops.operator_of(site.node) is not None and (seen or inside or site.kind != COMPOSITE)


def _composite(run: Simulation, site: Site) -> Choice:
    """Colour a composite op that could not be decomposed, and is kept whole."""
    why = Code.COMPOSITE("kept whole")
    choice = keep(run, site, why)
    dtypes = {choice.casts.get(o.place, run.dtypes[o.node]) for o in site.floats}
    if site.node.op == "call_function" and len(dtypes & {*ELIGIBLE}) > 1:
        return all_to(run, site, torch.float32, why)  # autocast would give them one dtype, but the graph runs without
    return choice


KINDS: dict[str, Callable[[Simulation, Site], Choice]] = {
    LOW: _low, FP32: fp32, PROMOTE: _promote, FOLLOW: _follow, KEEP: _kept, BANNED: _banned, COMPOSITE: _composite,
}  # fmt: skip


_WHOLE = Reason(Code.AS_AUTOCAST, "runs under torch.autocast, on operands in autocast's dtypes", AS_AUTOCAST)


def _region(run: Simulation, node: Node) -> UnderAutocast:
    """Return the region that a call gets in which it runs as under autocast."""
    region = region_on(node, run.device)
    return UnderAutocast(run.device, (region and region[2]) or run.low)


class AutocastRules:
    """What torch's dispatcher does under autocast: it knows neither policy nor level, and looks at no number."""

    def settle(self, run: Simulation) -> None:
        """Run over a graph, as often as it takes."""
        run.run()

    def visit(self, run: Simulation, node: Node, floats: list[ops.Operand]) -> None:
        """Decide on a call, if there is anything to decide, and set its choice and the dtypes of its results."""
        site = site_of(run, node, floats)
        choice = decide(run, site)
        if choice is not None:
            choice, run.dtypes[node] = self.fit(run, site, choice)
            causes = tuple(o.node for o in floats if o.node in run.colours)
            run.colours[node] = replace(choice, reason=replace(choice.reason, causes=causes))

    def decide(self, run: Simulation, site: Site) -> Choice:
        """Return the choice for a call that is neither a user cast nor a write."""
        choice = outside_autocast(run, site) or beside_float64(run, site)
        if choice is None and site.kind in (KEEP, BANNED, COMPOSITE):
            choice = self.whole(run, site) if runs_whole(site) else None
            return choice or KINDS[FOLLOW](run, site.of_kind(FOLLOW))
        return choice or KINDS[site.kind](run, site)

    def whole(self, run: Simulation, site: Site) -> Choice | None:
        """Return the choice to run a call under autocast as it is; None if its operands cannot be as they are there."""
        choice = natural(run, site, _WHOLE).edited(_region(run, site.node))
        return replace(choice, dtype=first_float(note_of(site.node).autocast) or choice.dtype)

    def fit(self, run: Simulation, site: Site, choice: Choice) -> tuple[Choice, ValueDtype]:
        """Return a choice as kernel and numbers force it to be, and the dtypes of the results."""
        return fit_kernel(run, site.node, choice)

    def learn(self, run: Simulation, node: Node, floats: Sequence[ops.Operand]) -> None:
        """Take in what the numbers of a graph say of a value that has now been decided on."""


@dataclass(frozen=True)
class PolicyRules(AutocastRules):
    """What a policy asks for at a level: pins and overrides first; O2 and O3 read rules in their own way."""

    level: Level

    def settle(self, run: Simulation) -> None:
        """Run until no alias set that is written has members of different dtypes."""
        low, graph, find = self.level.stores_low, run.graph, run.aliases.find
        uncopied = uncopied_without_grad(graph, run.original) if low else ()
        run.islands = islands(graph) if low else frozenset()
        run.retained = retained(run) if low and not self.level.rounds_sensitive else {}
        run.pinned = {find(v) for v in observed(graph) if run.original[v] == torch.float32}
        run.pinned |= {find(v) for v in uncopied if run.under_autocast(v) == run.original[v]}
        while True:
            before = len(run.pinned)
            run.run()
            run.pinned |= {*map(find, self._conflicts(run))}
            if len(run.pinned) == before:
                break

    def decide(self, run: Simulation, site: Site) -> Choice:
        """Return the choice for a call: by a pin, the policy, a region of the model's own, or the rule at the level."""
        for decider in (pinned, overridden, outside_autocast, beside_float64):
            choice = decider(run, site)
            if choice is not None:
                return choice
        if site.node in run.islands:
            return fp32(run, site, Code.ISLAND("a norm written by hand is FP32 throughout"))
        if site.node in run.retained:
            return fp32(run, site, run.retained[site.node])
        if self.level.stores_low:
            site = site.of_kind(self._kind(run, site))
            if site.kind in (PROMOTE, FOLLOW) and not moves_written(run, site) and _lowers(run, site):
                code = Code.O3_LOW if self.level.rounds_sensitive else Code.O2_LOW
                return all_to(run, site, site.low, code("not sensitive, and an operand is low"))
        reads = site.kind in (PROMOTE, FOLLOW) and any(run.dtypes[o.node] in LOW_DTYPES for o in site.floats)
        if (site.kind == LOW or reads) and lacks_low_kernel(run, site.node, site.row, site.low):
            return without_kernel(run, site)
        kept = site.kind in (KEEP, BANNED, COMPOSITE) and run.policy.unknown_ops == "autocast"
        kept |= site.kind == LOW and self.level.is_autocasts and casts_again(run, site.node)
        whole = self.whole(run, site) if kept and (site.kind == LOW or runs_whole(site)) else None
        return whole or (self._exempt(run, site) if site.kind == LOW else None) or KINDS[site.kind](run, site)

    def _exempt(self, run: Simulation, site: Site) -> Choice | None:
        """Leave a `low` op FP32 whose operands the user upcast, or that reads nothing but numbers out of range."""
        cast = [o for o in site.floats if castable(run, o, site.row, site.low)]
        if not cast:
            return None
        if site.low == run.low and any(_is_cast_to_the_other(run, o.node, site.low) for o in cast):
            why = Code.USER_CAST("your code casts an operand to the other low dtype")  # and no region asks for it
            return all_to(run, site, torch.float32, why, final=True)
        if all(o.node in run.upcast for o in site.floats):
            return natural(run, site, Code.USER_CAST("your code casts every operand up"), final=True)
        extremes, values = run.extremes, [o.node for o in site.floats]
        fixed = all(n in extremes.fixed for n in values) and any(n in extremes.values for n in values)
        if self.level.stores_low and fixed:
            return natural(run, site, Code.POSITION("computed from nothing but integers and buffers"), final=True)
        return None

    def whole(self, run: Simulation, site: Site) -> Choice | None:
        """Cast the operands to the dtypes that they have under autocast, under which the call then runs.

        Return None where those dtypes are not known, or where a cast would be of a value that the call may write to;
        and where they are several, which the backward of an op rejects that gives the first one's.
        """
        mixed = len({run.under_autocast(o.node) for o in site.floats}) > 1
        if mixed and site.row.same_dtype and site.row.gives == "first":
            return None
        written = set(may_write(site.node))
        changed = [o for o in site.floats if run.under_autocast(o.node) != run.dtypes[o.node]]
        if any(not isinstance(run.under_autocast(o.node), torch.dtype) or o.node in written for o in changed):
            return None
        casts = operand_casts(run.dtypes, changed, lambda o: run.under_autocast(o.node))
        dtype = first_float(run.under_autocast(site.node)) or torch.float32
        return Choice(dtype, _WHOLE, (*casts, _region(run, site.node)))

    def fit(self, run: Simulation, site: Site, choice: Choice) -> tuple[Choice, ValueDtype]:
        """Fit a choice to the numbers that an op reads too; what makes complex numbers of 16 bits keeps its dtypes."""
        node, (choice, results) = site.node, fit_kernel(run, site.node, choice)
        # Complex numbers of 16 bits are made of FP16, from torch 2.15 on of BF16 too.
        halves = isinstance(results, torch.dtype) and results.is_complex and results.itemsize == 4
        dtypes = (choice.casts.get(o.place, run.dtypes[o.node]) for o in site.floats)
        if halves and results != run.original[node] and any(d in LOW_DTYPES for d in dtypes):
            kept = keep(run, site.of_kind(KEEP), Code.KEEP("complex numbers are not rounded"))
            choice, results = fit_kernel(run, node, kept)
        return fit_numbers(run, site, choice, results)

    def learn(self, run: Simulation, node: Node, floats: Sequence[ops.Operand]) -> None:
        """Take in its range, and whether it is what the user has upcast, moved."""
        if not node.op.startswith("call"):
            run.extremes.hold(node)
            return
        row = row_of(node)
        run.extremes.visit(node, row, run.dtypes)
        if row.commutes and floats and all(o.node in run.upcast for o in floats):
            run.upcast.add(node)

    def _kind(self, run: Simulation, site: Site) -> str:
        """Return the kind of a call at a level beyond autocast."""
        node, row, kind, values = site.node, site.row, site.kind, [o.node for o in site.floats]
        # All of it may be in the other low dtype, which the user chose: then there are no bytes to save.
        other = bool(values) and all(run.dtypes[n] in LOW_DTYPES and run.dtypes[n] != site.low for n in values)
        if other or kind in (LOW, KEEP, BANNED, COMPOSITE):
            return kind
        if lacks_low(node, row, run.device) or row.no_low_backward:
            return FP32
        several = PROMOTE if kind == PROMOTE or len(site.floats) > 1 else FOLLOW
        extreme = any(n in run.extremes.values for n in values) or converts(node, run.dtypes)
        if self.level.rounds_sensitive and not extreme:
            return LOW if row.gives in ("float", "first") and not row.commutes else several
        if row.loss:  # FP32, except a loss that only selects values
            return FOLLOW if facts_of(node, run.device, run.low).commutes_forward else FP32
        if accumulates(node, row) or (row.sensitive and not _is_safe(run, site)) or _is_square(run, site):
            return FP32
        return several if kind == FP32 else kind

    def _conflicts(self, run: Simulation) -> Iterator[Node]:
        """Yield a value of every mutated alias set whose members got different dtypes: it has to keep its own."""
        for root, members in run.aliases.sets().items():
            # A cast to or from 64 bits is a copy at every level.
            several = len({run.dtypes.get(m) for m in members} & {*ELIGIBLE}) > 1
            if several or (self.level.stores_low and any(_changes_a_copy(run, m) for m in members)):
                yield root
                yield from _references_of_new_copies(run, members) if self.level.stores_low else ()
        for node, choice in run.colours.items():
            written = may_write(node)
            low = any(run.dtypes[w] in LOW_DTYPES and run.original[w] == torch.float32 for w in written)
            sums_low = self.level.keeps_sums_fp32 and low and accumulates(node, row_of(node))
            if sums_low or any(o.node in written and o.place in choice.casts for o in ops.operands(node)):
                yield from written


def _is_safe(run: Simulation, site: Site) -> bool:
    """Say whether a sensitive op is safe in low: its errors are those of a rounding, and low has the range it needs."""
    if site.row.sensitive == "range" and run.low is not torch.bfloat16:
        return False
    facts = facts_of(site.node, run.device, run.low)
    return facts.rounds_once and facts.scatters and (not facts.sums_low or bool(site.row.affine))  # see `SplitNorms`


def _is_square(run: Simulation, site: Site) -> bool:
    """Say whether a call multiplies a value with itself, which leaves the range of FP16 as a power does."""
    product = "product" in site.row.in_norm and run.low is not torch.bfloat16
    factors = {str((o.node.target, o.node.args, o.node.kwargs)) for o in site.floats if product}
    return len(site.floats) > 1 and len(factors) == 1


def _lowers(run: Simulation, site: Site) -> bool:
    """Say whether an op with mixed operands runs low at O2: one is in this low dtype, and all of them fit it."""
    dtypes = {run.dtypes[o.node] for o in site.floats}
    mixed = dtypes.intersection(LOW_DTYPES) == {site.low} != dtypes
    fits = not any(o.node in run.extremes.values for o in site.floats)
    return mixed and fits and site.row.gives in ("float", "first")


def _is_cast_to_the_other(run: Simulation, value: Node, low: object) -> bool:
    """Say whether a cast of the user's put a value, or what it is computed from, in the other low dtype."""
    visited, front = set[Node](), [value]
    while front:
        node = front.pop()
        if node in visited or run.dtypes[node] not in LOW_DTYPES or run.dtypes[node] == low:
            continue
        if row_of(node).is_cast:
            return True
        visited.add(node)
        front += node.all_input_nodes
    return False


def _references_of_new_copies(run: Simulation, members: Sequence[Node]) -> list[Node]:
    """Return the values that are low only beyond O1, and so turn a cast that did nothing into a copy."""
    known = filter(None, (dtype_reference(m) for m in members if row_of(m).is_cast))
    return [_indexed(r) for r in known if run.dtypes[r] != run.original[r] == run.under_autocast(r)]


def _indexed(value: Node) -> Node:
    """Return the container that an item was taken from, or the value itself, since only the container has a colour."""
    while row_of(value).asks == "item" and isinstance(value.args[0], Node):
        value = value.args[0]
    return value


def _changes_a_copy(run: Simulation, node: Node) -> bool:
    """Say whether a copy ends, or begins, the sharing of a written storage because a value is low beyond O1."""
    value = node.args[0] if row_of(node).is_cast else None
    if isinstance(value, Node) and isinstance(run.dtypes[node], torch.dtype):
        # A dtype that may have been read under autocast says nothing of what is a copy without it.
        runs = (run.under_autocast,) if note_of(node).read else (run.original.get, run.under_autocast)
        if any(of(value) != of(node) for of in runs) and run.dtypes[value] == run.dtypes[node]:
            return True
    if run.dtypes[node] not in LOW_DTYPES or run.under_autocast(node) != torch.float32:
        return False
    readers = (r for r in node.users if r in run.colours and run.colours[r].reason.kind == LOW)
    last = run.aliases.epoch(node, run.graph.output_node())
    return any(run.aliases.epoch(node, r) < last for r in readers)
