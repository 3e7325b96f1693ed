"""Which dimensions of the example inputs are dynamic in a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from passes._torch import pytree
from passes.contract.errors import CaptureError, FxampError

from .call import CallSpec
from .limit import Limit, TooMuch

Result = TypeVar("Result")
# Errors that have nothing to do with the model: no memory, or a missing file.
NOT_ABOUT_THE_MODEL = (MemoryError, torch.OutOfMemoryError, OSError, ImportError)


class Dims:
    """Which dimensions are dynamic: as requested, or for "auto" as many as the exporter can handle within a limit.

    Attributes:
        notes: what was given up, and why.
    """

    LIMIT = Limit()  # of a capture with every dimension dynamic

    def __init__(self, shapes: Any, call: CallSpec, flat: list[Any]) -> None:
        self.notes: list[str] = []
        self._left = [dynamic_dims(shapes, call, flat)]
        tensors = [v for v in flat if isinstance(v, torch.Tensor)]
        if isinstance(shapes, str) and any(t.dim() > 1 for t in tensors):
            self._left.append(tuple({0: Dim.AUTO} if t.dim() else {} for t in tensors))

    def try_each(self, run: Callable[[tuple[Any, ...], Limit | None], Result]) -> Result:
        """Return what `run` returns for the first choice with which it neither raises nor takes too long."""
        while len(self._left) > 1:
            try:
                return run(self._left[0], self.LIMIT)
            except (FxampError, *NOT_ABOUT_THE_MODEL):
                raise
            except Exception as e:
                first = str(e).strip().splitlines()[0][:200] if str(e) else ""
                why = first if isinstance(e, TooMuch) else f"fails: {type(e).__name__}: {first}"
                note = f"only the first dimension of each input is dynamic: a capture with all dimensions dynamic {why}"
                result = run(self._left[1], None)
                del self._left[0]
                self.notes.append(note)
                return result
        return run(self._left[0], None)


def dynamic_dims(shapes: Any, call: CallSpec, flat: list[Any]) -> tuple[Any, ...]:
    """Return one dynamic-shape specification per tensor leaf.

    Raises:
        CaptureError: `shapes` is not what `torch.export.export` takes for these inputs.
    """
    tensors = [v for v in flat if isinstance(v, torch.Tensor)]
    if isinstance(shapes, str):
        if shapes != "auto":
            raise CaptureError(
                f"dynamic_shapes must be 'auto', None or what torch.export.export takes, got {shapes!r}."
            )
        return tuple(dict.fromkeys(range(t.dim()), Dim.AUTO) for t in tensors)
    if shapes is None:
        return (None,) * len(tensors)
    values = call.unflatten(flat)
    out: list[Any] = []
    for name, spec in zip(call.given, _by_input(shapes, call, values), strict=True):
        _align(values[name], spec, out)
    return tuple(out)


def _by_input(shapes: Any, call: CallSpec, values: dict[str, Any]) -> list[Any]:
    """Return the specification of each input that the example gives, from a dict by name or from a tuple."""
    if isinstance(shapes, dict):
        if call.var_keyword is not None and call.var_keyword not in shapes:  # torch.export takes extra keywords by name
            extra = {k: v for k, v in shapes.items() if k not in call.given and k in values.get(call.var_keyword, {})}
            shapes = {k: v for k, v in shapes.items() if k not in extra} | ({call.var_keyword: extra} if extra else {})
        unknown = sorted(set(shapes) - set(values))
        if unknown:
            raise CaptureError(
                f"dynamic_shapes names {unknown}, which are not inputs of forward(): it takes {list(values)}."
            )
        return [shapes.get(n) for n in call.given]
    if isinstance(shapes, (tuple, list)) and len(shapes) == len(call.given):
        return list(shapes)
    raise CaptureError(
        "dynamic_shapes must be a dict with the names of inputs as keys, or a tuple with one entry for each of the "
        f"inputs {list(values)}, got {shapes!r}."
    )


def _align(value: Any, spec: Any, out: list[Any]) -> None:
    """Walk a value and its specification together; a missing specification means static."""
    if isinstance(value, torch.Tensor):
        out.append(spec)
    elif isinstance(value, dict):
        for key, item in value.items():
            _align(item, spec.get(key) if isinstance(spec, dict) else None, out)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _align(item, spec[i] if isinstance(spec, (list, tuple)) and i < len(spec) else None, out)
    else:
        out += [None for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def program_dims(program: ExportedProgram) -> Any:
    """Return which dimensions an ExportedProgram was exported with as dynamic, as `torch.export.export` takes it."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    flat = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            value = values.get(getattr(spec.arg, "name", ""))
            sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else ()
            flat.append({d: Dim.AUTO for d, size in sizes if not isinstance(size, int)})
    assert program.call_spec.in_spec is not None
    args, kwargs = pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return (*args, *kwargs.values())
