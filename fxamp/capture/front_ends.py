"""One capture of a model in the state that it is in, by `torch.export` or by `torch.fx`.

By `torch.export` a model is captured twice: without `torch.autocast` and under it. If the two captures line up, the
first is annotated with what differs in the second (`relate.py`). If a low dtype makes the model's code take another
branch, the capture under autocast is compiled instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from passes._torch import pytree
from passes.contract.errors import CaptureError, FxampError, NotFaithfulError, RejectedError

from ..trust.check import rejected
from ..trust.later import caches
from ..trust.preserved import fresh, preserved
from . import capture_fx, export
from .model.call import CallSpec, both
from .model.captured import Autocast, Captured
from .model.dims import NOT_ABOUT_THE_MODEL, Dims
from .model.drawn import refuse_drawn_numbers
from .model.preflight import grad_mode_reads, refuse_assigned, refuse_constructs, refuse_lost_state
from .model.reads import Reads, Recorder
from .model.snapshot import untouched
from .model.tensors import held, kept
from .relate import relate, settle
from .rerun import rerun

Run = Callable[[], Captured]
ALONE = "the model runs only under torch.autocast, so the capture could not be compared with one without it: {}"


def by_export(
    model: nn.Module, call: CallSpec, flat: list[Any], dynamic_shapes: Any, autocast: Autocast | None,
    reads: Reads, *, again: bool = True,
) -> Run:  # fmt: skip
    """Return a function that captures a model by `torch.export`, as it is and under autocast.

    Args:
        model: in any state.
        call: how the example calls it.
        flat: the flat example inputs.
        dynamic_shapes: "auto", None, or as `torch.export.export` takes it.
        autocast: the autocast to capture under too; None to capture only without it.
        reads: records what forward() reads.
        again: export it under autocast too. False runs the exported graph under autocast, for code that reads no dtype.
    """
    dims = Dims(dynamic_shapes, call, flat)

    def run() -> Captured:
        try:
            plain = _export(model, call, flat, dims, None, reads)
        except RejectedError as e:
            low = None if autocast is None else _under_autocast(model, call, flat, dims, autocast, reads)
            if not isinstance(low, Captured):
                raise
            settle(low.graph, low.constants, [])
            return replace(low.noting(ALONE.format(str(e).splitlines()[0])), plain=False)
        if autocast is None:
            return plain
        low = None if again else rerun(plain, autocast)
        if low is None:
            low = _under_autocast(model, call, flat, dims, autocast, reads)
        if not isinstance(low, Captured):
            return plain.noting(f"captured without torch.autocast, under which the model fails: {low}")
        return _related(plain, low, autocast)

    return run


def _related(plain: Captured, low: Captured, autocast: Autocast) -> Captured:
    """Return the capture to compile: the plain one with notes, or, if the two differ, the one under autocast."""
    constants = dict(plain.constants)
    where = relate(plain.graph, constants, low.graph, low.constants, oracle=autocast.oracle)
    plain = replace(plain, constants=constants)
    call, reads = both(plain.call, low.call), tuple(dict.fromkeys((*plain.grad_reads, *low.grad_reads)))
    if not where and _same_outputs(plain.call, low.call):
        return replace(plain, call=call, grad_reads=reads)
    settle(low.graph, low.constants, list(plain.call.out_dtypes))
    note = f"under torch.autocast the model runs other ops: {where or 'it returns something else'}"
    if not autocast.oracle:
        note += f" (seen on the CPU, since this machine has no '{autocast.wanted}')"
    call = replace(call, out_spec=low.call.out_spec, out_constants=low.call.out_constants)
    notes = tuple(sorted({*plain.notes, *low.notes, note}))
    return replace(low, call=call, notes=notes, grad_reads=reads, without=plain)


def _same_outputs(a: CallSpec, b: CallSpec) -> bool:
    return a.out_spec == b.out_spec and a.out_constants == b.out_constants


def _under_autocast(
    model: nn.Module, call: CallSpec, flat: list[Any], dims: Dims, autocast: Autocast, reads: Reads
) -> Captured | str:
    """Return the capture under autocast, or why there is none."""
    try:
        return _export(model, call, flat, dims, autocast, reads)
    except CaptureError as e:
        return str(e).split("\n")[0]


def _export(
    model: nn.Module, call: CallSpec, flat: list[Any], dims: Dims, autocast: Autocast | None, reads: Reads
) -> Captured:
    try:
        with (
            kept(held(model).values()), refuse_constructs("export"), refuse_drawn_numbers("export"), untouched(model),
            grad_mode_reads() as asked,
        ):  # fmt: skip
            gm, spec, changed = dims.try_each(
                lambda d, limit: export.export(model, call, flat, d, autocast, limit, Recorder(model, reads, asked))
            )
    except (FxampError, *NOT_ABOUT_THE_MODEL):
        raise
    except Exception as e:
        if autocast is None:
            _refuse_inputs(model, call, flat)
        raise NotFaithfulError(export.explain(model, e)) from e
    again = reads.may_read(changed, model)
    refuse_lost_state(changed, again, model, "export", _caches(model, call, flat))
    reads.assigned |= set(changed)
    graph, constants = export.normalise(gm, model)
    lifted = {id(c) for c in constants.values()}
    refuse_assigned(changed, [name for name, t in held(model).items() if id(t) in lifted], "export")
    return Captured(
        graph, spec, "export", {}, constants, (*dims.notes, *_side_effects(changed)), grad_reads=tuple(asked),
        model=model, left=tuple(changed), again=again,
    )  # fmt: skip


def by_fx(model: nn.Module, call: CallSpec, flat: list[Any], reads: Reads) -> Run:
    """Return a function that captures a model by symbolic tracing; arguments as `by_export`."""

    def run() -> Captured:
        with (
            kept(held(model).values()), refuse_constructs("fx"), refuse_drawn_numbers("fx"),
            untouched(model) as changed, grad_mode_reads() as asked,
        ):  # fmt: skip
            graph, spec, leaves, constants = capture_fx.trace(model, call, flat, Recorder(model, reads, asked))
        again = reads.may_read(changed, model)
        refuse_lost_state(changed, again, model, "fx", _caches(model, call, flat))
        reads.assigned |= set(changed)
        for path, leaf in leaves.items():
            reads.add_opaque(path, leaf)
        notes = tuple(_side_effects(changed))
        return Captured(
            graph, spec, "fx", leaves, constants, notes, grad_reads=tuple(asked), model=model, left=tuple(changed),
            again=again,
        )  # fmt: skip

    return run


def _caches(model: nn.Module, call: CallSpec, flat: list[Any]) -> Callable[[list[str]], Collection[str]]:
    def found(names: list[str]) -> Collection[str]:
        known = names and call.in_spec is not None  # without inputs the model cannot be called
        return caches(model, *call.arguments(call.unflatten(flat)), names) if known else ()

    return found


def _side_effects(changed: Iterable[str]) -> list[str]:
    return [f"forward() sets '{name}', which the converted module does not" for name in sorted(changed)]


def _refuse_inputs(model: nn.Module, call: CallSpec, flat: list[Any]) -> None:
    """After a failed capture, raise RejectedError instead if the model itself rejects the example inputs."""
    args, kwargs = call.arguments(call.unflatten(flat))
    with untouched(model), preserved(model):
        try:
            model(*pytree.tree_map(fresh, args), **pytree.tree_map(fresh, kwargs))
        except Exception as e:
            raise rejected(model, call, flat, e) from e
