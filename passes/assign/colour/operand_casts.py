"""Which operands of a node are cast, and to what: `operand_casts` says it, once the dtype of each is chosen.

`all_to` casts all operands to one dtype, `natural` casts only if the kernel rejects mixed dtypes, `keep` casts back to
the captured dtypes.

Before: add(a: bf16, b: f32)
After:  all_to(bf16): b is cast; natural: none; keep, where a was f32: a is cast
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ...contract.reasons import Code, Reason
from ...form import Cast, Choice
from ...graph.values import ELIGIBLE, LOW_DTYPES, Dtypes, ValueDtype, first_float
from ...ops import ops
from ...ops.rules import Rule
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
    if run.dtypes[operand.node] not in ELIGIBLE or (operand.name in row.uncast and dtype in LOW_DTYPES):
        return False
    return not row.cast_arguments or operand.name in row.cast_arguments


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
