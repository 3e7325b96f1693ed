"""Annotate a graph that TorchDynamo captured with what the compiler needs: what each value is, and where it was made.

Dynamo's graphs hold torch functions over flat placeholders, parameters among them, and every dtype that Python read is
a constant in them. If Dynamo traced under `torch.autocast`, those constants and the example values have autocast's
dtypes: the graph is the program that autocast runs, without the casts. The compiler needs the dtypes without autocast,
so they are inferred again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import enter_autocast, exit_autocast, pytree
from passes.contract.policy import Policy, module_override, type_names
from passes.graph.grad import sums_apart
from passes.graph.notes import CastMeaning, Origin, Origins, Region, provenance
from passes.graph.values import (
    ELIGIBLE,
    LOW_DTYPES,
    Inference,
    dtypes_of,
    is_floating,
    literal_dtype,
    refuse_mixed,
    retyped,
)
from passes.ops import ops
from passes.ops.facts import rule_of
from passes.ops.rules import COMPOSITE, row_of

from .._torch import is_transformed, without_transforms
from .graph import attribute_of
from .scope import Scope

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")


def ambient_dtype(graph: Graph, device: str) -> torch.dtype | None:
    """Return the ambient autocast's low dtype: of torch's state, else of a region round the whole graph, now erased."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    region = _whole_region(graph)
    if region is None:
        return None
    for node in reversed(region):
        graph.erase_node(node)
    kind, dtype, *_ = region[0].args
    return _low_of((device, True, dtype, True)) if kind == device else None  # type: ignore[arg-type]


def _whole_region(graph: Graph) -> tuple[Node, Node] | None:
    """Return the switches of an enabled autocast region that all ops are in, except casts of its outputs."""
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    if not calls or calls[0].target is not enter_autocast or not calls[0].args[2]:
        return None
    left = next((n for n in calls if n.target is exit_autocast and n.args[0] is calls[0]), None)
    if left is None or any(not (row_of(n).is_cast or row_of(n).asks == "item") for n in calls[calls.index(left) + 1 :]):
        return None
    return calls[0], left


def describe(
    gm: GraphModule, origins: Origins, *,
    ambient: bool, policy: Policy, scope: Scope | None, crossed: Set[Node], alone: Sequence[Any] | None, stays: bool,
) -> dict[int, bool]:  # fmt: skip
    """Annotate every node with what passes read: `val` and the module path; and add the rest to its origin, in place.

    A cast is "literal" if the user called `.float()` or a similar method, "autocast" if its dtype was seen in a trace
    under autocast, and "baked" if only its dtype without autocast is known. A dtype that was low in a trace under
    autocast is autocast's: the graph gets FP32, and the origin keeps the low dtype.

    Autocast was on while Dynamo traced if it is `ambient`; the `crossed` inputs are low by it alone, since they crossed
    a graph break. By the dtypes of the outputs in a trace without autocast, `alone`, it is told which are low then too;
    where there is none, what is low `stays` low. Returned are the places of the low outputs, and whether they are.
    """
    description = _Description(origins, gm.graph, ambient, policy, scope, crossed)
    description.of(gm)
    if scope is not None:
        _add_fused(gm.graph, origins, scope.root)
    if not ambient:
        return {}
    outputs: Any = gm.graph.output_node().args[0]
    if alone is not None and len(alone) != len(outputs):
        alone = None  # Dynamo returns a value once, and may tell fewer apart without the marks of what leaves
    own, low = description.without_autocast(gm.graph, crossed, stays), dict[int, bool]()
    for i, node in ((i, n) for i, n in enumerate(outputs) if isinstance(n, Node)):
        dtype = own.get(node) if alone is None or alone[i] not in ELIGIBLE else alone[i]
        if dtype in ELIGIBLE:
            origins.add(node, low_of_its_own=dtype if dtype in LOW_DTYPES else None, leaves_as=dtype)
        if {dtype, seen_dtypes(node)} & {*LOW_DTYPES}:
            low[i] = dtype in LOW_DTYPES
    return low


class _Description:
    """Describes a graph and the bodies of the higher-order ops in it."""

    def __init__(
        self, origins: Origins, graph: Graph, ambient: bool, policy: Policy, scope: Scope | None, crossed: Set[Node]
    ) -> None:  # fmt: skip
        self.origins = origins
        self.by_meta = {id(n.meta): n for n in graph.nodes}  # Dynamo shares that of a value with an input of a body
        self.ambient, self.policy, self.scope, self.infer = ambient, policy, scope, Inference()
        low = (seen_dtypes(n) for n in graph.find_nodes(op="placeholder") if n not in crossed)
        self.authors = {*low} & {*LOW_DTYPES}  # of tensors that the model holds or is given
        self.by_regions: set[torch.dtype] = set()  # the low dtypes of the author's own regions
        self.of_regions: dict[Region, Inference] = {}  # what ops give in the author's own regions

    def of(self, gm: GraphModule, *, call: Node | None = None) -> None:
        """Describe one graph, in place: the whole, or the body of the call of a higher-order op."""
        nodes, held, inside = list(gm.graph.nodes), dict[Node, Any](), call is not None
        for node, region in regions_of(nodes, None if call is None else self.origins[call].region).items():
            self.origins.add(node, region=region)
        regions = {r for n in nodes if (r := self.origins[n].region) is not None and r[1]}
        self.by_regions |= {*map(_low_of, regions)} & {*LOW_DTYPES}
        for node in nodes:
            _as_cast(node)
            if inside and node.op == "placeholder":
                self._enter(node, call)
            _describe_place(node, self.scope)
            body = attribute_of(gm, str(node.target)) if node.op == "get_attr" else None
            if isinstance(body, GraphModule) and not all(map(self._runs_under_autocast, node.users)):
                self.of(body, call=next(iter(node.users)))
            if ops.name(node) == "to":
                self.origins.add(node, cast="literal" if _is_method(node) else "autocast" if self.ambient else "baked")
        for node in nodes:
            value = pytree.tree_map(without_transforms, node.meta.get("example_value", node.meta.get("val")))
            if value is not None:
                node.meta["val"] = value = self._described(node, value, held, inside)
                held[node] = dtypes_of(value)
        for node in nodes:
            self.origins.setdefault(node, Origin())

    def _enter(self, place: Node, call: Node | None) -> None:
        """Give an input of a body a meta of its own, and the origin of the outer value that it shared its meta with."""
        outer = self.by_meta.get(id(place.meta))
        place.meta = dict(place.meta)
        if outer is not None:
            self.origins[place] = self.origins[outer]
        if call is not None and sums_apart(call):
            self.origins.add(place, role=self.origins[place].role or "leaf")

    def without_autocast(self, graph: Graph, crossed: Set[Node], stays: bool) -> dict[Node, Any]:
        """Return the dtypes that values have without autocast, where inputs that `crossed` a break are not low.

        If what is low `stays`, what an op gives that rejects its operands then, and a dtype that was read, are as they
        were traced, as what is read in a region of the author's own; else they are autocast's.
        """
        own: dict[Node, Any] = {}
        for node in graph.nodes:
            if (value := node.meta.get("val")) is None:
                continue
            own[node], region = dtypes_of(value), self.origins[node].region
            as_seen = stays or (region is not None and region[1])
            if node in crossed:
                own[node] = without_low(own[node])
            elif self.origins[node].read is not None:
                own[node] = seen_dtypes(node) if as_seen else without_low(own[node])
            elif row_of(node).higher_order:
                own[node] = seen_dtypes(node) if as_seen else own[node]
            elif node.op.startswith("call"):
                try:
                    own[node] = self._in_the_model(node, own.get)
                except Exception:  # whatever a fake kernel raises
                    own[node] = seen_dtypes(node) if stays else without_low(own[node])
        return own

    def _in_the_model(self, node: Node, dtype_of: Callable[[Node], Any]) -> Any:
        """Return the dtypes that a node gives without autocast, but for the author's own regions; raise as the op."""
        region = self.origins[node].region
        if region is None or not region[1]:
            refuse_mixed(node, dtype_of)
            return self.infer(node, dtype_of)
        device, _, dtype, _ = region
        with torch.autocast(device, dtype, cache_enabled=False):
            return self.of_regions.setdefault(region, Inference())(node, dtype_of)

    def _described(self, node: Node, value: Any, held: dict[Node, Any], inside: bool) -> Any:
        """Return a value as the model would compute it without autocast; the meaning of a cast is noted on it."""
        call = node.op.startswith("call")
        if call and is_floating(dtypes_of(value)):
            self._describe_cast(node, held)
        if call and self._runs_under_autocast(node):
            self.origins.add(node, autocast=dtypes_of(value), under_autocast=_is_opaque(node))
        if self.ambient and call:
            return retyped(value, self._inferred(node, value, held))
        if self.ambient and inside and node.op == "placeholder":
            return retyped(value, without_low(dtypes_of(value), {self.policy.dtype, *self.by_regions}))
        return value

    def _runs_under_autocast(self, node: Node) -> bool:
        """Say whether a call is to be what it was in this trace under autocast."""
        # An op on jagged tensors is, or under torch.vmap, whose batching rules cast otherwise: a linear gives FP32. If
        # the policy asks for it, so are an op without a rule, and a recurrent layer, which is not to be unrolled.
        asked = self.policy.unknown_ops == "autocast"
        row, kind = rule_of(node, str(self.policy.device))
        whole = row.recurrent and kind == COMPOSITE
        traced = self.ambient and self.policy.level.rounds
        return traced and (_is_opaque(node) or (asked and (not row.known or whole)))

    def _inferred(self, node: Node, value: Any, held: dict[Node, Any]) -> Any:
        """Return the dtypes of a node's outputs without autocast, even if fake tensors reject its operands."""
        if row_of(node).higher_order:
            made = without_low(dtypes_of(value), {self.policy.dtype, *self.by_regions})
            return _named_in_body(node, made) or made
        try:
            return self.infer(node, lambda n: held.get(n))
        except Exception:  # whatever a fake kernel raises
            low = any(held.get(n) in LOW_DTYPES for n in node.all_input_nodes)
            return dtypes_of(value) if low else without_low(dtypes_of(value))

    def _describe_cast(self, node: Node, held: dict[Node, Any]) -> None:
        """Note the meaning of a cast, or of another `dtype=`, and replace one that is low because of autocast."""
        given, fp32 = literal_dtype(node), self._is_fp32(node)
        low = self.ambient and given == self.policy.dtype and not _is_method(node)  # the code names all other dtypes
        if not low:
            return
        if given in self.authors or (given in self.by_regions and not fp32):
            self.origins.add(node, read=given if ops.name(node) == "to" else None)
            return
        row, operand, read = row_of(node), next((o.node for o in ops.operands(node)), None), None if fp32 else given
        if ops.name(node) == "to":
            _settle(node, torch.float32)
            self.origins.add(node, cast="baked" if fp32 else "autocast", read=read)
        elif (row.converts_first or row.never_narrows) and operand is not None and is_floating(held.get(operand)):
            # Autocast's lists do not apply to a call that names its dtype.
            self.origins.add(node, dtype_argument=given)
            cast = _without_read(node, operand)
            cast.meta["val"] = retyped(operand.meta["val"], torch.float32)
            held[cast] = torch.float32
            meaning: CastMeaning = "baked" if fp32 else "autocast"
            self.origins[cast] = Origin(region=self.origins[node].region, cast=meaning, read=read)
        else:  # a factory: numbers that it makes in FP32 and casts may be others
            _settle(node, torch.float32)
            self.origins.add(node, read=read)

    def _is_fp32(self, node: Node) -> bool:
        if not self.policy.level.rounds:
            return True
        stack = node.meta.get("nn_module_stack", {}).values() if self.policy.modules else ()
        found = module_override(self.policy, [(str(path), type_names(kind)) for path, kind in stack])
        return found is not None and found.colour == "fp32"


def seen_dtypes(node: Node) -> Any:
    """Return the dtypes that a value had while Dynamo traced."""
    return dtypes_of(node.meta.get("example_value"))


def without_low(dtypes: Any, low: Container[torch.dtype | None] = LOW_DTYPES) -> Any:
    """Return dtypes with FP32 in the place of low ones, or of those given."""
    if isinstance(dtypes, tuple):
        return tuple(without_low(d, low) for d in dtypes)
    return torch.float32 if dtypes in low else dtypes


def _as_cast(node: Node) -> None:
    """Write `as_tensor(x, dtype)` of a tensor as the cast that it is, which returns its operand where it can."""
    first, arguments = node.args[:1], dict(zip(("dtype", "device"), node.args[1:], strict=False)) | node.kwargs
    tensor = bool(first) and isinstance(first[0], Node) and isinstance(first[0].meta.get("example_value"), torch.Tensor)
    row = row_of(node)
    made_of_it = row.dtype_arg and row.may_alias == "first" and not row.is_cast
    if made_of_it and tensor and not arguments.keys() - {"dtype", "device"}:
        node.op, node.target, node.args = "call_method", "to", first
        node.kwargs = {k: v for k, v in arguments.items() if v is not None}


def _named_in_body(node: Node, like: Any) -> Any:
    """Return the dtypes that the one body of a higher-order op gives, which is described already; None if unlike."""
    gm: Any = node.graph.owning_module
    held = [attribute_of(gm, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr" and gm is not None]
    bodies = [body for body in held if isinstance(body, GraphModule)]
    outputs: Any = bodies[0].graph.output_node().args[0] if len(bodies) == 1 else None
    if not isinstance(like, tuple) or not isinstance(outputs, (tuple, list)) or len(like) != len(outputs):
        return None
    return tuple(dtypes_of(getattr(n, "meta", {}).get("val")) for n in outputs)


def _is_opaque(node: Node) -> bool:
    values = pytree.tree_leaves([n.meta.get("example_value") for n in (node, *node.all_input_nodes)])
    return any(isinstance(v, torch.Tensor) and (v.is_nested or is_transformed(v)) for v in values)


def _is_method(node: Node) -> bool:  # called by the user: `.float()`, `.half()`
    return node.op == "call_method" and str(node.target) in ops.CAST_METHODS


def _describe_place(node: Node, scope: Scope | None) -> None:
    if scope is not None:
        node.meta["nn_module_stack"] = scope.stack(node)
    elif stack := node.meta.get("nn_module_stack"):
        node.meta["nn_module_stack"] = {k: (_ROOT.sub("", path), kind) for k, (path, kind) in stack.items()}


def _add_fused(graph: Graph, origins: Origins, model: nn.Module) -> None:
    """Say of each call whether eager evaluation without gradients runs it inside the fused kernel of an attention.

    That rounds in other places. What makes torch choose it is read off the module; masks and inputs are not looked at.
    The fused kernel of `nn.TransformerEncoderLayer` is captured by Dynamo itself.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return
    modules = {path: m for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    fused = {path for path, m in modules.items() if _may_be_fused(m)}
    for node in graph.nodes if fused else ():
        stack = node.meta.get("nn_module_stack", {}).values()
        if node.op.startswith("call") and any(path in fused for path, _ in stack):
            origins.add(node, fused=True)


def _may_be_fused(attention: nn.MultiheadAttention) -> bool:
    if attention.training or (torch.is_grad_enabled() and any(p.requires_grad for p in attention.parameters())):
        return False
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    whole = attention.in_proj_weight is not None and attention.in_proj_bias is not None
    return plain and whole and attention.batch_first and attention.num_heads % 2 == 0


def _low_of(region: Region) -> torch.dtype:
    device, _, dtype, _ = region
    return dtype or torch.get_autocast_dtype(device)


def regions_of(nodes: Iterable[Node], outside: Region | None) -> dict[Node, Region]:
    """Return the innermost autocast region that each call in one lies in; the graph itself lies in `outside`."""
    out: dict[Node, Region] = {}
    regions: list[tuple[Node | None, Region]] = [] if outside is None else [(None, outside)]
    for node in nodes:
        if node.target is enter_autocast:
            settings: Any = node.args
            kind, dtype, enabled, cached = settings
            regions.append((node, (str(kind), bool(enabled), dtype, cached is not False)))
        elif node.target is exit_autocast:
            regions = [r for r in regions if r[0] is not node.args[0]]
        elif regions and node.op.startswith("call"):
            out[node] = regions[-1][1]
    return out


def _settle(node: Node, dtype: torch.dtype | None) -> None:
    given = literal_dtype(node)
    node.args, node.kwargs = pytree.tree_map(lambda a: dtype if a is given else a, (node.args, node.kwargs))


def _without_read(node: Node, operand: Node) -> Node:
    """Remove from an op a `dtype=` that is low because of autocast; return an FP32 cast of its operand instead.

    Before: softmax(x, 1, dtype=bfloat16)        After: softmax(to(x, float32), 1)
    """
    _settle(node, None)
    with node.graph.inserting_before(node):
        cast = node.graph.call_method("to", (operand, torch.float32))
    node.replace_input_with(operand, cast)
    cast.meta = provenance(node)
    return cast
