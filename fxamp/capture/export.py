"""The `export` front end: `torch.export`, before decomposition, over flat tensor inputs and outputs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from passes._torch import ExportTracer, drop_hooks, guards_of, pytree, without_transforms
from passes.contract.errors import INSTEAD, FxampError
from passes.ops.recurrent import run_low

from .casts import ExplicitCasts, drop_aliases
from .functions import Functions
from .model.call import CallSpec, Leaf, flatten_outputs
from .model.captured import Autocast
from .model.frames import Stacks, place_of
from .model.limit import Limit
from .model.patches import replaced, traced_here_alone
from .model.reads import Recorder
from .model.snapshot import untouched
from .regions import inline_regions

_PREFIX = "model."


class _Box:
    """Holds what the last trace returned, since the exporter would undo an assignment to the model."""

    constants: tuple[tuple[int, Any], ...] = ()
    spec: Any = None
    changed: dict[str, Any]


class _Flat(nn.Module):
    """The model with flat tensor inputs and outputs, so that fxamp handles all containers itself."""

    def __init__(self, model: nn.Module, call: CallSpec, flat: list[Any], recorder: Recorder) -> None:
        super().__init__()
        self.model = model
        self.recorder = recorder
        self.call_spec = call
        self.flat = tuple(None if isinstance(v, torch.Tensor) else v for v in flat)
        self.box = _Box()

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Call the model with the containers of the example call."""
        given = iter(tensors)
        flat = [next(given) if leaf.tensor else v for leaf, v in zip(self.call_spec.leaves, self.flat, strict=True)]
        args, kwargs = self.call_spec.arguments(self.call_spec.unflatten(flat))
        # Looked for here, since the exporter undoes assignments silently.
        with traced_here_alone(), untouched(self.model) as self.box.changed, self.recorder(tensors):
            output = self.model(*args, **kwargs)
        kept, self.box.constants, self.box.spec = flatten_outputs(output)
        return tuple(kept)


class _Stderr:
    """Standard error without the graph that the exporter prints when it fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, unless it is that graph."""
        by_exporter = sys._getframe(1).f_code.co_filename.endswith(os.path.join("export", "_trace.py"))
        return len(text) if by_exporter else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs and warnings of the exporter, since fxamp notes what was specialised, and raises its errors.

    Fake tensors log an error, with its traceback, where an op rejects its operands. Warnings of the model itself are
    still shown.
    """
    shown = {
        "torch.fx.experimental.symbolic_shapes": logging.ERROR, "torch._export": logging.ERROR,
        "torch.export": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL,
    }  # fmt: skip
    levels = {n: logging.getLogger(n).level for n in shown}
    with warnings.catch_warnings(), contextlib.redirect_stderr(_Stderr(sys.stderr)):
        warnings.filterwarnings("ignore", module=r"torch\.")
        for n, level in shown.items():
            logging.getLogger(n).setLevel(level)
        try:
            yield
        finally:
            for n, level in levels.items():
                logging.getLogger(n).setLevel(level)


def export(
    model: nn.Module, call: CallSpec, flat: list[Any], dims: tuple[Any, ...],
    autocast: Autocast | None, limit: Limit | None, recorder: Recorder,
) -> tuple[GraphModule, CallSpec, dict[str, Any]]:  # fmt: skip
    """Export a model in its present mode.

    Args:
        model: in any state.
        call: how the example calls it.
        flat: the flat example inputs.
        dims: one dynamic-shape specification per tensor.
        autocast: what to export it under; its casts are not in the graph, but every value has its dtype.
        limit: the limits of its cost; None for no limit.
        recorder: notes what forward() reads.

    Returns its graph module, the call specification with outputs filled in, and the attributes that forward() changes.

    Raises whatever `torch.export.export` raises, or the refusal inside it.
    """
    wrapper = _Flat(model, call, flat, recorder)
    wrapper.training = model.training
    tensors = _distinct([v for v in flat if isinstance(v, torch.Tensor)])
    functions = Functions()
    if autocast is not None:
        run_low(autocast.wanted, autocast.dtype)  # on real tensors, and remembered
    entered = contextlib.nullcontext() if autocast is None else autocast.context()
    with _quiet(), replaced(GraphModule, "recompile", _at_first_call):
        try:
            watch = limit.watch() if limit else None
            with (
                without_fused_layers(), entered, ExplicitCasts(autocast, watch), functions.kept(),
                replaced(ExportTracer, "create_node", _with_own_lines),
            ):  # fmt: skip
                program = torch.export.export(
                    wrapper, tensors, dynamic_shapes={"tensors": dims} if tensors else None, strict=False
                )
        except Exception as e:
            refused = _refusal_in(e)
            if refused is not None:
                raise refused from e
            raise
        try:
            gm = program.module(check_guards=False)
        except BaseException:
            functions.free()
            raise
    functions.restore(gm)
    for inside in gm.modules():
        if isinstance(inside, GraphModule) and inside is not gm:
            inside.recompile()
    vals = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    leaves, guards = _leaves(call, vals), _guards(program, vals)
    outs = gm.graph.output_node().args[0]
    box, dtypes = wrapper.box, tuple(getattr(_val(o), "dtype", None) for o in outs)  # type: ignore[union-attr]
    call = replace(call, leaves=leaves, guards=guards, out_dtypes=dtypes)
    return gm, replace(call, out_spec=box.spec, out_constants=box.constants), box.changed


def _with_own_lines(before: Callable[..., Node]) -> Callable[..., Node]:
    """Note on every node the lines of the model that it comes from.

    The exporter would look up every frame of the process for each node, which takes a sixth of its time, and keep only
    those of forward(), not of methods and functions that it calls.
    """
    stacks = Stacks(_Flat.forward.__code__)

    def created(tracer: Any, *args: Any, **kwargs: Any) -> Node:
        tracer.record_stack_traces = False
        node = before(tracer, *args, **kwargs)
        if node.op not in ("placeholder", "output") and not node.stack_trace and (lines := stacks()):
            node.stack_trace = lines
        return node

    return created


def _at_first_call(recompile: Callable[[GraphModule], object]) -> Callable[[GraphModule], None]:
    """Generate the code of a graph module at its first call.

    The exporter would spend a tenth of its time on generating the code of the whole model nine times, but run none.
    """

    def later(gm: GraphModule) -> None:
        def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
            recompile(self)
            return type(self).forward(self, *args, **kwargs)

        type(gm).forward = forward  # a graph module has a class of its own

    return later


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Keep attention layers from calling their fused kernel in eval mode: it rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _distinct(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the example tensors, copying repeated objects: the exporter would treat such inputs as one."""
    seen: set[int] = set()
    out = []
    for t in tensors:
        out.append(t.detach().requires_grad_(t.requires_grad) if id(t) in seen else t)
        seen.add(id(t))
    return tuple(out)


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _refusal_in(error: BaseException | None) -> FxampError | None:
    """Return fxamp's refusal, which the exporter has wrapped in another error."""
    while error is not None:
        if isinstance(error, FxampError):
            return error
        error = error.__cause__ or error.__context__
    return None


def explain(model: nn.Module, error: Exception) -> str:
    """Return the message of our error for an error of the exporter."""
    text = str(error).strip().split("\n\n")[0]  # what follows is advice for the exporter's own users
    where = place_of(error)
    return (
        f"torch.export cannot capture {type(model).__name__}: {type(error).__name__}: {text[:1500]}"
        f"{f' At {where}.' if where else ''} {INSTEAD}."
    )


def _leaves(call: CallSpec, vals: list[Any]) -> tuple[Leaf, ...]:
    """Fill in rank and specialised sizes of the tensors."""
    left = iter(vals)
    out = []
    for leaf in call.leaves:
        val = next(left) if leaf.tensor else None
        if isinstance(val, torch.Tensor):
            static = tuple((i, int(s)) for i, s in enumerate(val.shape) if isinstance(s, int))
            leaf = replace(leaf, ndim=val.dim(), static=static)
        out.append(leaf)
    return tuple(out)


def _guards(program: ExportedProgram, vals: list[Any]) -> tuple[str, ...]:
    """Return capture's assumptions on sizes: branches taken, dimensions found equal, and the user's own bounds."""
    found = dict.fromkeys(re.sub(r"L\['tensors'\]\[(\d+)\]", r"args[\1]", guard) for guard in guards_of(program))
    first: dict[Any, str] = {}
    for i, val in enumerate(vals):
        sizes: tuple[Any, ...] = tuple(val.shape) if isinstance(val, torch.Tensor) else ()
        for dim, size in enumerate(sizes):
            if not isinstance(size, torch.SymInt):
                continue
            here, symbol = f"args[{i}].size()[{dim}]", size.node.expr
            if first.setdefault(symbol, here) != here:
                found.setdefault(f"{first[symbol]} == {here}")
            bounds = program.range_constraints.get(symbol)
            if bounds is not None and bounds.upper.is_Integer:
                found.setdefault(f"{here} <= {int(bounds.upper)}")
            if (
                bounds is not None and bounds.lower.is_Integer and bounds.lower > 2
            ):  # the exporter assumes at least 2 of any dimension
                found.setdefault(f"{here} >= {int(bounds.lower)}")
    return tuple(found)


def normalise(gm: GraphModule, model: nn.Module) -> tuple[Graph, dict[str, Any]]:
    """Return the exported graph, regions inlined and targets at the model's own paths, and the lifted constants."""
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    constants: dict[str, Any] = {}
    graph = gm.graph
    graph.set_codegen(CodeGen())
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
    inline_regions(graph, constants)
    drop_aliases(graph)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(without_transforms, node.meta["val"])
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (path.removeprefix("model").removeprefix("."), kind)
                for key, (path, kind) in stack.items()
                if path.split(".")[0]
                == "model"  # drops the wrapper's own frame, and the exporter's placeholder for no module
            }
    return graph, constants


def program_module(program: ExportedProgram) -> nn.Module:
    """Return the module of an ExportedProgram, whose mode was baked when it was exported."""
    module = program.module(check_guards=False)
    drop_hooks(module)  # the exporter's check of the inputs; the call specification has ours
    return module
