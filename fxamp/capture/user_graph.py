"""Graphs that the user brings, a GraphModule or an ExportedProgram: they go straight to the compiler.

Their Python is frozen already, by whoever made them, so there is no Dynamo, and nothing is checked: the graph is the
truth. What comes back is a GraphModule over the same parameters and buffers, called as before.

Before: conv1 = conv1(x)                                       a module of torch.nn that tracing left whole
After:  conv2d(to(x, bfloat16), to(self.conv1.weight, bfloat16), to(self.conv1.bias, bfloat16), ...)
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx.graph import CodeGen
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from passes import compile_graph
from passes._torch import (
    SET_GRAD,
    FakeTensorMode,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    pytree,
    quiet_fakes,
    runs_its_forward_alone,
)
from passes.contract.costs import CostModel
from passes.contract.errors import CaptureError, PlanError
from passes.contract.plan import Plan
from passes.contract.plan_format import REMEDY
from passes.contract.policy import Policy
from passes.graph.bodies import origins_of
from passes.graph.grad import SWITCHES
from passes.graph.notes import Origins, is_inserted
from passes.legalize.inline import copy_body, put_in_place
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.regions import grad_mode
from passes.runtime.sizes import check_sizes

from .._torch import BatchNorm, codegen_of, flat_by, python_kernels, without_transforms
from ..errors import in_short
from .describe import regions_of
from .emitted import Emitted, is_writable, with_record
from .graph import attribute_of, copied
from .inputs import Inputs, resolve
from .one_step import fakes_of_one_step
from .parameters import opaque_parameters, refuse_low_parameters


def convert_graph(
    given: GraphModule | ExportedProgram, inputs: Inputs | None, policy: Policy, replayed: Plan | None = None, *,
    costs: CostModel | None = None,
) -> GraphModule:  # fmt: skip
    """Convert a graph, which is not changed; an ExportedProgram keeps the mode that it was exported in.

    Values get shapes and dtypes by the inputs where the graph has none. A plan that is replayed is carried out instead
    of deciding.

    Raises:
        CaptureError: values have no shapes, and there are no inputs; or the graph rejects the inputs.
        PlanError: the plan is of another graph.
        PolicyError: the policy does not fit the graph.
    """
    if replayed is not None and len(replayed.states) > 1:
        raise PlanError(f"the plan has {len(replayed.states)} states of a model, and a graph has one; {REMEDY}")
    made = _copied(given)
    _inline_modules(made)
    _fill(made, inputs)
    settled = resolve(policy, made, inputs)
    named = dict(made.named_parameters())
    notes = (*refuse_low_parameters(named.items(), made.training), *opaque_parameters(named.items()))
    attribute = functools.partial(attribute_of, made)
    origins = Origins(origins_of(made.graph, attribute))  # what an earlier conversion knew
    for node, region in regions_of(made.graph.nodes, None).items():
        origins.add(node, region=region)
    plan = compile_graph(
        made.graph, settled, attribute, origins, capture="graph", notes=notes, plan=replayed, costs=costs
    )
    if isinstance(given, ExportedProgram):
        _check_sizes_first(made, given)
    made.delete_all_unused_submodules()
    made.recompile()
    return with_record(made, plan, state="", number=0, **{"break": ""})


def store_low(made: GraphModule) -> None:
    """Store parameters low that are read low only, in place; the result is for inference.

    Before: linear(to(x, bfloat16), to(self.weight, bfloat16))     self.weight: float32
    After:  linear(to(x, bfloat16), self.weight)                   self.weight: bfloat16
    """
    for path, module in list(made.named_modules()):  # copies, of those that a trace shares with its model
        shared_module = type(module) is not nn.Module and not isinstance(module, GraphModule)
        if shared_module and made.get_submodule(path) is module:
            parent, _, name = path.rpartition(".")
            memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
            setattr(made.get_submodule(parent), name, copy.deepcopy(module, memo))
    reads: dict[str, list[Node]] = {}
    for node in made.graph.find_nodes(op="get_attr"):
        reads.setdefault(str(node.target), []).extend(node.users)
    shared: dict[int, list[str]] = {id(p): [] for p in made.parameters()}
    for path, p in made.named_parameters(remove_duplicate=False):
        shared[id(p)].append(path)
    for paths in shared.values():
        users = [user for path in paths for user in reads.get(path, ())]
        dtypes = {user.args[1] for user in users if is_inserted(user)}
        if len(dtypes) != 1 or not all(map(is_inserted, users)):
            continue
        low = nn.Parameter(attribute_of(made, paths[0]).detach().to(next(iter(dtypes))), requires_grad=False)
        for path in paths:
            owner, _, name = path.rpartition(".")
            setattr(made.get_submodule(owner), name, low)
        for cast in users:
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            made.graph.erase_node(cast)
    made.recompile()


def _copied(given: GraphModule | ExportedProgram) -> GraphModule:
    """Return a copy over the same tensors, whose graphs may be changed."""
    if isinstance(given, ExportedProgram):
        _refuse_unwritable(given)
    gm: Any = given.module(check_guards=False) if isinstance(given, ExportedProgram) else given
    made = copied(gm, Emitted)
    for node in made.graph.nodes:
        if isinstance(node.type, str):
            node.type = None  # an annotation that is not evaluated, with which a graph cannot be pickled
        # Where a model rebinds a buffer, an export copies into it; torch gives the copy the dtype of what is copied.
        like: Any = node.args[0] if node.target is torch.ops.aten.copy_.default else node
        if "val" in like.meta:
            node.meta["val"] = pytree.tree_map(without_transforms, like.meta["val"])
    inline_regions(made)
    return made


def _refuse_unwritable(given: ExportedProgram) -> None:
    for path in (*given.state_dict, *given.constants):
        if not all(map(is_writable, path.split("."))):
            raise CaptureError(
                f"torch.fx cannot write the name {path!r} into the code of a graph, where a module is named with a "
                "quote, a backslash, a line break or a keyword of Python: rename it, or convert the model itself."
            )


def inline_regions(gm: GraphModule) -> None:
    """Replace the exporter's grad-mode and autocast regions by their bodies, each between two switches of the mode.

    Before: wrap_with_set_grad_enabled(False, body, x)
    After:  a = grad_mode(); set_grad(False); ...; set_grad(a)
    """
    nodes = list(gm.graph.nodes)
    while nodes:
        if row_of(node := nodes.pop()).switches:
            nodes += _inline(gm, node)


def _inline(gm: GraphModule, node: Node) -> list[Node]:
    at = next(i for i, a in enumerate(node.args) if isinstance(a, Node))
    settings, holder, operands = node.args[:at], node.args[at], list(node.args[at + 1 :])
    assert isinstance(holder, Node)
    body: GraphModule = attribute_of(gm, str(holder.target))
    leave: Callable[..., Any]
    with gm.graph.inserting_before(node):
        if row_of(node).switches == "grad":
            leave, entered = SET_GRAD, gm.graph.call_function(grad_mode)
            gm.graph.call_function(SET_GRAD, settings)
        else:
            leave, entered = exit_autocast, gm.graph.call_function(enter_autocast, settings)
        copied, result = copy_body(gm.graph, body.graph, operands)
        gm.graph.call_function(leave, (entered,))
    for new in copied:
        if new.op == "get_attr":
            new.target = _held(gm, f"{holder.name}_{new.target}", attribute_of(body, str(new.target)))
    put_in_place(gm.graph, node, result)
    if not holder.users:
        gm.graph.erase_node(holder)
    return copied


def _held(gm: GraphModule, name: str, value: Any) -> str:
    name = name.replace(".", "_")
    while getattr(gm, name, value) is not value:
        name += "_"
    setattr(gm, name, value)
    return name


def _check_sizes_first(made: GraphModule, program: ExportedProgram) -> None:
    places = [n for n in made.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    sizes = tuple(tuple(s if isinstance(s, int) else str(s) for s in n.meta["val"].shape) for n in places)
    varying = {s for shape in sizes for s in shape if isinstance(s, str)}
    ranges = {str(s): r for s, r in program.range_constraints.items() if str(s) in varying}
    bounds = {  # the exporter takes every size for at least 2
        s: (int(r.lower) if r.lower > 2 else 0, int(r.upper) if r.upper.is_Integer else None) for s, r in ranges.items()
    }
    if places:
        with made.graph.inserting_after(made.graph.find_nodes(op="placeholder")[-1]):
            names = tuple(str(n.target) for n in places)
            dtypes = tuple(n.meta["val"].dtype for n in places)
            made.graph.call_function(check_sizes, (tuple(places), names, sizes, bounds, dtypes))


class _Through(Tracer):
    """Traces one module of torch.nn, of which nothing is left whole, with the arguments that are known."""

    proxy_buffer_attributes = True  # a write to a buffer is one of the graph's

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self.known = known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        run, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for i, value in enumerate(args):
            if isinstance(value, Proxy) and (name := str(value.node.target)) in self.known:
                self.graph.erase_node(value.node)
                args[i] = self.known[name]
        return run, args


def _inline_modules(made: GraphModule) -> None:
    """Replace calls of modules of torch.nn by the functions that they call, in place, but for those like an LSTM."""
    for node in made.graph.find_nodes(op="call_module"):
        path, module = str(node.target), made.get_submodule(str(node.target))
        stack = {**(node.meta.get("nn_module_stack") or {}), path: (path, type(module))}
        node.meta["nn_module_stack"] = stack
        bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        operands = bound.arguments
        known = {k: v for k, v in operands.items() if not any(isinstance(x, Node) for x in pytree.tree_leaves(v))}
        body = _body_of(module, known)
        if body is None:
            continue
        with made.graph.inserting_before(node):
            places = body.find_nodes(op="placeholder")
            copied, result = copy_body(made.graph, body, [operands[str(n.target)] for n in places])
        for new in copied:
            new.meta = {**node.meta, **new.meta, "nn_module_stack": stack}
            new.meta.pop("val", None)
            new.meta.pop("tensor_meta", None)
            if new.op == "get_attr":
                new.target = f"{path}.{new.target}"
        if isinstance(result, Node) and "val" in node.meta:
            result.meta["val"] = node.meta["val"]
        put_in_place(made.graph, node, result)


def _body_of(module: nn.Module, known: Mapping[str, Any]) -> Graph | None:
    if not type(module).__module__.startswith("torch.nn.modules") or not runs_its_forward_alone(module):
        return None
    if isinstance(module, BatchNorm):
        module = copy.copy(module)
        module.__dict__["_check_input_dim"] = lambda _: None  # a branch on the rank
    try:
        body = _Through(known).trace(module)
    except Exception:  # whatever a branch on a traced value raises
        return None
    simple = isinstance(body.output_node().args[0], (Node, tuple))
    return body if simple else None


def _fill(made: GraphModule, inputs: Inputs | None) -> None:
    """Give shapes and dtypes to values that have none, by running the graph on fake tensors."""
    nodes = [n for n in made.graph.nodes if n.op != "output"]
    for node in nodes:
        if "val" not in node.meta and "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
    lacking = [n for n in nodes if "val" not in n.meta and n.op != "get_attr" and _gives_value(n)]
    if not lacking:
        for node in made.graph.find_nodes(op="get_attr"):
            value = attribute_of(made, str(node.target)) if "val" not in node.meta else None
            if isinstance(value, torch.Tensor):
                node.meta["val"] = FakeTensorMode().from_tensor(value)
        return
    if inputs is None:
        raise CaptureError(
            f"values of this graph, '{lacking[0].name}' first, have no shapes and dtypes (meta['val']): give example "
            "inputs, fxamp.convert(graph, args, kwargs), which are propagated as fake tensors."
        )
    args, kwargs = inputs
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet_fakes():
        try:
            flat = flat_inputs(made, args, kwargs)
            fake = [mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in flat]
            _Propagation(made, mode).propagate_dont_convert_inputs(*fake)
        except CaptureError:
            raise
        except Exception as e:  # whatever an op raises for operands that it rejects
            raise CaptureError(f"the graph rejects the example inputs: {in_short(e)}") from e


def _gives_value(node: Node) -> bool:  # a switch of a mode and an assertion do not
    schema = ops.schema_of(node)
    return node.target not in SWITCHES and (schema is None or bool(schema.returns))


class _Propagation(FakeTensorProp):
    """Runs a graph, and those inside its higher-order ops, on fake tensors, without a write to a buffer."""

    def __init__(self, made: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(made, mode)
        shared = {id(p): p for p in made.parameters()}
        whole = {str(n.target) for n in made.graph.find_nodes(op="call_module")}
        self.whole = {path: copy.deepcopy(made.get_submodule(path), shared) for path in whole}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def inside(arg: Any) -> Any:
            return _Propagation(arg, self._mode).run if isinstance(arg, GraphModule) else arg

        args = pytree.tree_map(inside, args) if isinstance(target, HigherOrderOperator) else args
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        with fakes_of_one_step(), python_kernels():
            return self.whole[target](*args, **kwargs)


def flat_inputs(made: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the inputs of a graph, one for each placeholder, of those of a call; CaptureError if they do not fit."""
    codegen: Any = codegen_of(made.graph)
    if type(codegen) is CodeGen:
        return _bound(made, args, kwargs)
    return list(flat_by((args, kwargs), codegen.pytree_info.in_spec))


def _bound(made: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    places = made.graph.find_nodes(op="placeholder")
    rest = list(places[len(args) :])
    names = {str(n.target) for n in rest}
    missing = [str(n.target) for n in rest if str(n.target) not in kwargs and not n.args]
    extra = [name for name in kwargs if name not in names]
    if missing or extra or len(args) > len(places):
        what = f"lacks '{missing[0]}'" if missing else f"does not take '{extra[0]}'" if extra else "takes fewer inputs"
        raise CaptureError(f"the example inputs do not fit the graph: it {what}.")
    return [*args, *(kwargs.get(str(n.target), n.args[0] if n.args else None) for n in rest)]
