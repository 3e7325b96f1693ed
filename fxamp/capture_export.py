"""The `export` front end: `torch.export`, before decomposition, over flat tensor inputs and outputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule

from passes._torch import pytree
from passes.errors import CaptureError, FxampError

from .call import CallSpec, Leaf
from .dtype_reads import DtypeReads, drop_aliases

_PREFIX = "model."


class _Box:
    """Holds what the last trace returned; the exporter undoes assignments to module attributes."""

    def __init__(self) -> None:
        self.constants: tuple[tuple[int, Any], ...] = ()
        self.spec: Any = None


class _Flat(nn.Module):
    """The model behind flat tensor inputs and outputs, so that every container is ours to bind and to pack."""

    def __init__(self, model: nn.Module, call: CallSpec, flat: list[Any]) -> None:
        super().__init__()
        self.model = model
        self.call_spec = call
        self.flat = tuple(flat)
        self.box = _Box()

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = iter(tensors)
        flat = [next(leaves) if isinstance(value, torch.Tensor) else value for value in self.flat]
        values = dict(zip(self.call_spec.given, pytree.tree_unflatten(flat, self.call_spec.in_spec), strict=True))
        args: list[Any] = []
        for name in self.call_spec.names:  # up to the first optional that was left out
            if name not in values:
                break
            args.append(values.pop(name))
        args += values.pop(self.call_spec.var_positional, ())
        kwargs = values.pop(self.call_spec.var_keyword, {})
        out, spec = pytree.tree_flatten(self.model(*args, **values, **kwargs))
        kept = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        self.box.constants = tuple((i, o) for i, o in enumerate(out) if not isinstance(o, kept))
        self.box.spec = spec
        return tuple(o for o in out if isinstance(o, kept))


def example_call(call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Any]]:
    """Bind the example inputs; return the specification with what was given, and the flat leaves."""
    values = call._by_name(args, kwargs)
    given = [n for n in (*call.names, *call.keyword_only, call.var_positional, call.var_keyword) if n in values]
    flat, spec = pytree.tree_flatten(tuple(values[n] for n in given))
    return replace(call, given=tuple(n for n in given if n is not None), in_spec=spec), flat


def leaf_names(call: CallSpec, count: int) -> list[str]:
    """Name the leaves of the example inputs after their arguments ("batch['ids']")."""
    dummy = pytree.tree_unflatten(list(range(count)), call.in_spec)
    names = []
    for path, _ in pytree.tree_flatten_with_path(dummy)[0]:
        names.append(call.given[path[0].idx] + pytree.keystr(path[1:]))
    return names


def dynamic_dims(shapes: Any, call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any]) -> tuple[Any, ...]:
    """Return one dynamic-shape specification per tensor leaf."""
    if shapes == "auto":
        return tuple({i: Dim.AUTO for i in range(t.dim())} for t in flat if isinstance(t, torch.Tensor))
    if shapes is None:
        return tuple(None for t in flat if isinstance(t, torch.Tensor))
    values = call._by_name(args, kwargs)
    if isinstance(shapes, dict):
        unknown = sorted(set(shapes) - set(values))
        if unknown:
            raise CaptureError(f"dynamic_shapes names {unknown}, which are no inputs; the inputs are {list(values)}.")
        given = [shapes.get(n) for n in call.given]
    else:
        given = list(shapes)
    out: list[Any] = []
    for name, spec in zip(call.given, given, strict=True):
        _align(values[name], spec, out)
    return tuple(out)


def _align(value: Any, spec: Any, out: list[Any]) -> None:
    """Walk a value and its specification together; a missing specification means static."""
    if isinstance(value, torch.Tensor):
        out.append(spec)
    elif isinstance(value, dict):
        for key, item in value.items():
            _align(item, spec.get(key) if isinstance(spec, dict) else None, out)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _align(item, spec[i] if isinstance(spec, (list, tuple)) else None, out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log lines about specialised dimensions (they go into the plan) and its own warnings."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export")
    levels = {n: logging.getLogger(n).level for n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in names:
            logging.getLogger(n).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for n, level in levels.items():
                logging.getLogger(n).setLevel(level)


def export(model: nn.Module, call: CallSpec, flat: list[Any], dims: tuple[Any, ...]) -> tuple[GraphModule, CallSpec]:
    """Export a model in its present mode; return its graph module and the call specification with outputs filled in."""
    wrapper = _Flat(model, call, flat)
    wrapper.training = model.training
    tensors = tuple(t for t in flat if isinstance(t, torch.Tensor))
    with _quiet():
        try:
            with DtypeReads():
                program = torch.export.export(
                    wrapper, tensors, dynamic_shapes={"tensors": dims} if tensors else None, strict=False
                )
        except FxampError:
            raise
        except Exception as e:
            refused = _refusal_in(e)
            if refused is not None:
                raise refused from e
            raise CaptureError(_explain(model, e)) from e
        gm = program.module(check_guards=False)
    leaves = _leaves(call, flat, gm)
    outs = gm.graph.output_node().args[0]
    dtypes = tuple(o.meta["val"].dtype if isinstance(getattr(o, "meta", {}).get("val"), torch.Tensor) else None for o in outs)
    return gm, replace(call, leaves=leaves, out_spec=wrapper.box.spec, out_constants=wrapper.box.constants, out_dtypes=dtypes)


def _refusal_in(error: BaseException | None) -> FxampError | None:
    """Return the refusal that the exporter wrapped in an error of its own."""
    while error is not None:
        if isinstance(error, FxampError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _explain(model: nn.Module, error: Exception) -> str:
    text = str(error).split("\nThe error above occurred")[0].split("\n\nUser Stack")[0].strip()
    lines = [line for line in str(error).splitlines() if line.strip().startswith("File ")]
    where = f" The last line of the model on the way: {lines[-1].strip()}." if lines else ""
    return (
        f"torch.export cannot capture {type(model).__name__}: {type(error).__name__}: {text[:1500]}{where} Change that construct, "
        'or use fxamp.compile(model), which captures what it can.'
    )


def _leaves(call: CallSpec, flat: list[Any], gm: GraphModule) -> tuple[Leaf, ...]:
    placeholders = iter([n for n in gm.graph.nodes if n.op == "placeholder"])
    out = []
    for name, value in zip(leaf_names(call, len(flat)), flat, strict=True):
        if not isinstance(value, torch.Tensor):
            out.append(Leaf(name, False, value))
            continue
        val = next(placeholders).meta.get("val")
        shape = val.shape if isinstance(val, torch.Tensor) else value.shape
        static = tuple((i, int(s)) for i, s in enumerate(shape) if isinstance(s, int))
        out.append(Leaf(name, True, None, value.dtype, value.dim(), static))
    return tuple(out)


def normalise(gm: GraphModule, model: nn.Module) -> tuple[Graph, dict[str, Any]]:
    """Return the exported graph with targets at the model's own paths, and what was lifted into constants."""
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    constants: dict[str, Any] = {}
    graph = gm.graph
    graph.set_codegen(torch.fx.CodeGen())
    drop_aliases(graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "get_attr":
            value: Any = gm
            for atom in node.target.split("."):
                value = getattr(value, atom)
            path = node.target.removeprefix(_PREFIX)
            if path in tensors and tensors[path] is value:
                node.target = path
                continue
            name = node.target.replace(".", "_")
            constants[name] = value
            node.target = f"_fxamp.{name}"
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (path.removeprefix("model").removeprefix("."), kind)
                for key, (path, kind) in stack.items()
                if path.split(".")[0] == "model"  # neither the wrapper's own frame nor the exporter's placeholder for none
            }
    return graph, constants


def program_parts(program: ExportedProgram) -> nn.Module:
    """Return the module of an ExportedProgram, whose modes were baked when it was exported."""
    return program.module(check_guards=False)
