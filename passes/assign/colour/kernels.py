"""Which operands of a node are cast, what the kernels of a device take, and how a choice is fitted to them.

`all_to` casts all operands to one dtype, `natural` casts only if the kernel rejects mixed dtypes, `keep` casts back to
the captured dtypes. If it is not known beforehand whether a device has a low kernel for an op, it is tried once, as
recurrent layers in FP16 are, which need a CPU with FP16 arithmetic, and custom ops. A choice gives the dtypes of the
results too: the op is run on fake tensors, with its operands cast as the choice says.

Before: add(a: bf16, b: f32)        After: all_to(bf16): b is cast; natural: none; keep, where a was f32: a is cast
Before: masked_fill(scores: bf16, mask, -3.4028e+38)        After: masked_fill(scores: bf16, mask, -3.3895e+38)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch import pytree
from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...contract.reasons import CAST, DEVIATIONS, Code, Reason
from ...form import Cast, Choice, Clamp, Replace, SetDtype, UnderAutocast
from ...graph.aliases import may_write, mutated_operands
from ...graph.notes import note_of
from ...graph.values import (
    ELIGIBLE,
    LOW_DTYPES,
    Dtypes,
    ValueDtype,
    concrete,
    described,
    dtype_reference,
    first_float,
    refuse_mixed,
    run_first_step,
)
from ...ops import numbers, ops
from ...ops.facts import lacks_low
from ...ops.rules import COMPOSITE, KEEP, LOW, Rule, is_registered, row_of
from .simulate import Simulation, Site


def operand_casts(
    dtypes: Dtypes, operands: Iterable[ops.Operand], wanted: Callable[[ops.Operand], ValueDtype]
) -> tuple[Cast, ...]:
    """Return the casts of the operands that do not have the dtype wanted of them; a wanted None leaves one as it is."""
    pairs = ((o, wanted(o)) for o in operands)
    return tuple(Cast(o.place, d) for o, d in pairs if isinstance(d, torch.dtype) and d != dtypes[o.node])


def all_to(run: Simulation, site: Site, dtype: torch.dtype, reason: Reason, *, final: bool = False) -> Choice:
    """Cast every castable operand that has another dtype."""
    operands = (o for o in site.floats if castable(run, o, site.row, dtype))
    casts = operand_casts(run.dtypes, operands, lambda o: dtype)
    return Choice(dtype, site.says(reason, final=final), casts)


def castable(run: Simulation, operand: ops.Operand, row: Rule, dtype: torch.dtype) -> bool:
    """Say whether a rule lets an operand be cast to a dtype."""
    return run.dtypes[operand.node] in ELIGIBLE and not (operand.name in row.uncast and dtype in LOW_DTYPES)


def natural(run: Simulation, site: Site, reason: Reason, *, final: bool = False) -> Choice:
    """Leave the operands as they are; if the kernel rejects mixed dtypes, cast all to the widest."""
    dtypes = [d for o in site.floats if isinstance(d := run.dtypes[o.node], torch.dtype)]
    widest = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    if len(set(dtypes)) > 1 and site.row.same_dtype and site.row.gives != "first":
        reason = site.says(reason).because(Code.WIDEST("the kernel rejects mixed operands"))
        return all_to(run, site, widest, reason, final=final)
    return Choice(widest, site.says(reason, final=final))


def keep(run: Simulation, site: Site, reason: Reason) -> Choice:
    """Cast the operands back to the dtypes that they had when the graph was captured."""
    single = [o for o in site.floats if isinstance(run.dtypes[o.node], torch.dtype)]
    casts = operand_casts(run.dtypes, single, lambda o: run.original[o.node])
    before = (d for o in site.floats if isinstance(d := run.original[o.node], torch.dtype))
    dtype = first_float(run.original[site.node]) or next(before, torch.float32)
    return Choice(dtype, site.says(reason, final=True), casts)


def lacks_low_kernel(run: Simulation, node: Node, row: Rule, low: torch.dtype) -> bool:
    """Say whether the device has no low kernel for an op: its row says so, or it fails where it is tried on zeros."""
    name = ops.name(node)
    if lacks_low(node, row, run.device):
        return True
    if not (row.tries_low or "::" in name) or not DEVICES[run.device].is_here():
        return False
    key = (name, low, repr(torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None)))
    if key not in run.lacking:
        runs = _runs(node, lambda n: low if run.dtypes.get(n) in ELIGIBLE else None)
        run.lacking[key] = not runs and _runs(node, lambda n: None)
    return run.lacking[key]


def refuse_untold_writes(graph: Graph, device: str) -> None:
    """Refuse an op with a registered rule that is seen to write to an operand: a cast would be written instead."""
    tried: set[Any] = set()
    for node in graph.nodes:
        name = ops.name(node)
        key = name, repr(torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None))
        if not is_registered(name) or key in tried or not DEVICES[device].is_here():
            continue
        tried.add(key)
        written = next((n for n in _written(node) if n not in may_write(node)), None)
        if written is not None:
            raise PolicyError(
                f"register_rule({name!r}): the op writes to its operand {written.name}, and its schema does not say "
                f"so: {described(node)}. Declare it, as with "
                "custom_op(..., mutates_args=...), so that what it writes to is not a cast."
            )


def _written(node: Node) -> list[Node]:
    """Return the operands that a call on numbers other than zero is seen to write to."""
    try:
        values = _values(node, lambda n: None, 0.5)
        before = {n: copy.deepcopy(value) for n, value in values.items()}
        _call(node, values)
    except Exception:  # whatever a kernel raises that does not take these numbers
        return []
    leaves = [(n, *p) for n in values for p in zip(*map(pytree.tree_leaves, (values[n], before[n])), strict=True)]
    return [n for n, a, b in leaves if isinstance(a, torch.Tensor) and not torch.equal(a, b)]


def _runs(node: Node, dtype_of: Callable[[Node], torch.dtype | None]) -> bool:
    try:
        _call(node, _values(node, dtype_of, 0))
    except Exception:  # whatever a kernel raises that does not take the dtype
        return False
    return True


def _values(node: Node, dtype_of: Callable[[Node], torch.dtype | None], number: float) -> dict[Node, object]:
    """Return operands for a call, of the sizes in the graph: floats hold this number, integers zeros."""

    def filled(value: Any, dtype: torch.dtype | None) -> Any:
        tensor = concrete(value, dtype)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return tensor.fill_(number) if tensor.is_floating_point() else tensor.zero_()

    return {n: pytree.tree_map(partial(filled, dtype=dtype_of(n)), n.meta["val"]) for n in node.all_input_nodes}


def _call(node: Node, values: dict[Node, object]) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        run_first_step(node, values.__getitem__)


def fit_kernel(run: Simulation, node: Node, choice: Choice) -> tuple[Choice, ValueDtype]:
    """Return a choice as the kernel of the op forces it to be, and the dtypes of the results.

    A kernel that rejects the operands gets them in their widest dtype, else in FP32, else in the captured dtypes. If
    nothing is cast, torch's promotion decides what the node runs in.
    """
    floats = [o for o in ops.operands(node) if run.dtypes[o.node] in ELIGIBLE]
    for fit in itertools.chain([choice], _wider(run, choice, floats)):
        try:
            results = _result_dtypes(run, node, fit)
        except Exception:  # whatever a kernel raises on its operands
            continue
        promotes = not fit.casts and not ops.name(node).endswith("_")
        return (replace(fit, dtype=first_float(results) or fit.dtype) if promotes else fit), results
    return (_captured(run, node, choice, floats) if floats else choice), run.original[node]


def _result_dtypes(run: Simulation, node: Node, choice: Choice) -> ValueDtype:
    """Return the dtypes of the results of a choice; raise what the kernel raises on its operands."""
    if choice.reason.kind == CAST or choice.has(SetDtype):
        return choice.dtype
    if choice.has(UnderAutocast):
        return _results_under_autocast(run, node) if run.reference is None else run.under_autocast(node)
    casts = choice.casts
    wanted = {o.node: casts[o.place] for o in ops.operands(node) if o.place in casts}
    keeps = choice.reason.kind in (KEEP, COMPOSITE)
    keeps &= all(run.original[n] == wanted.get(n, run.dtypes[n]) for n in node.all_input_nodes)
    if keeps or node.op == "call_module" or row_of(node).higher_order:
        return run.original[node]
    refuse_mixed(node, lambda n: wanted.get(n, run.dtypes[n]))
    return run.infer(node, lambda n: wanted.get(n, run.dtypes[n]))


def _results_under_autocast(run: Simulation, node: Node) -> ValueDtype:
    """Return the dtypes that a call gives under autocast: as capture saw them, or as its fake kernel has them."""
    observed: ValueDtype = note_of(node).autocast
    if observed is not None or row_of(node).higher_order:
        return run.original[node] if observed is None else observed
    here = DEVICES[run.device].is_here()
    try:
        with torch.autocast(run.device, run.low) if here else contextlib.nullcontext():
            return run.infer(node, run.dtypes.__getitem__)
    except Exception:  # whatever a kernel raises; autocast itself would fail
        return run.original[node]


def _wider(run: Simulation, choice: Choice, floats: list[ops.Operand]) -> Iterator[Choice]:
    """Yield a choice with all floats cast to the widest dtype of them, and one with all cast to FP32."""
    if not floats:
        return
    dtypes: list[Any] = [run.dtypes[o.node] for o in floats]
    widest = functools.reduce(torch.promote_types, dtypes)
    reasons = {widest: Code.WIDEST("the kernel rejects mixed operands")}
    reasons.setdefault(torch.float32, Code.KEEP(f"no kernel for {run.low} on this {run.device}"))
    for dtype, reason in reasons.items():
        casts = operand_casts(run.dtypes, floats, dict.fromkeys(floats, dtype).__getitem__)
        before = choice.reason
        final = before.final or before.kind == LOW or reason.code is Code.KEEP
        why = replace(before if before.code in DEVIATIONS else before.because(reason), final=final)
        yield replace(choice.edited(*casts, but=Cast), dtype=dtype, reason=why)


def _captured(run: Simulation, node: Node, choice: Choice, floats: list[ops.Operand]) -> Choice:
    """Return a choice with the operands in their captured dtypes, for an op that fake tensors cannot run."""
    before = {o: d if (d := run.original[o.node]) in ELIGIBLE else torch.float32 for o in floats}
    casts = operand_casts(run.dtypes, floats, before.__getitem__)
    why = (Code.KEEP if casts else Code.AS_WRITTEN)("fake tensors cannot run it")
    dtype = first_float(run.original[node]) or torch.float32
    return replace(choice.edited(*casts, but=Cast), dtype=dtype, reason=replace(choice.reason.because(why), final=True))


def fit_numbers(run: Simulation, site: Site, choice: Choice, dtypes: ValueDtype) -> tuple[Choice, ValueDtype]:
    """Replace a number that the low dtype cannot hold, or keep the node in FP32; return the results' dtypes too."""
    if choice.dtype not in LOW_DTYPES or choice.reason.kind in (KEEP, CAST):
        return choice, dtypes
    low, literals, constants = choice.dtype, list(numbers.numbers(site.node)), run.extremes.constants
    fills = {o: constants[o.node] for o in site.floats if o.node in constants}
    lowest = [o for o in site.floats if choice.reason.kind == LOW and o.node in run.extremes.lowest]
    clamped = [*lowest, *(o for o, x in fills.items() if numbers.is_extreme(x, low))]
    mended = numbers.mend([*literals, *fills.values()], low)
    unknown = any(o.node in run.extremes.unknown for o in site.floats)
    if mended is None or (run.policy.level.stores_low and (unknown or numbers.has_tiny(site.row, literals, low))):
        is_open = unknown or any(map(numbers.is_open, (*literals, *fills.values())))
        text = "a number that data decides, or a size, may not fit the low dtype" if is_open else Code.LITERAL.meaning
        return _in_fp32(run, site, choice, dtypes, Code.LITERAL(text))
    if mended or clamped:
        why = choice.reason.because(Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype"))
        fitting = (Replace(*pair) for pair in mended if pair[0] in literals)
        choice = choice.edited(*(Clamp(o.place) for o in clamped), *fitting)
        return replace(choice, reason=replace(why, final=True)), dtypes
    return choice, dtypes


def _in_fp32(run: Simulation, site: Site, choice: Choice, dtypes: ValueDtype, why: Reason) -> tuple[Choice, ValueDtype]:
    """Keep a node in FP32; if it writes in place, keep its target in FP32 from the next run on."""
    node = site.node
    if mutated_operands(node):
        run.pinned.add(run.aliases.find(mutated_operands(node)[0]))
        return choice, dtypes
    if run.original[node] in LOW_DTYPES and run.aliases.is_mutated(node):
        return choice, dtypes  # a low value of the user's: writes would not reach an FP32 copy
    whole = (e for e in choice.edits if isinstance(e, UnderAutocast))
    choice = all_to(run, site, torch.float32, choice.reason.because(why), final=True).edited(*whole)
    if dtype_reference(node) is not None:
        return choice.edited(SetDtype(torch.float32)), torch.float32
    return fit_kernel(run, node, choice)
