"""How a converted module is called: the original `forward`'s signature, bound to the graph's flat placeholders."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from passes._torch import GUARD_NAMES, pytree
from passes.contract.errors import CaptureError
from passes.graph.values import LOW_DTYPES

_REGISTER = "register it once with torch.export.register_dataclass (or torch.utils._pytree.register_pytree_node)"
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format)
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type, *_TORCH_VALUES)


@dataclass(frozen=True)
class Leaf:
    """One leaf of the example inputs: a tensor, or a constant that capture baked in.

    `ndim` is None where the graph takes any rank; `static` holds the (dimension, size) pairs that capture specialised.
    """

    name: str
    tensor: bool
    constant: Any = None
    dtype: torch.dtype | None = None
    ndim: int | None = None
    static: tuple[tuple[int, int], ...] = ()

    def check(self, value: Any) -> None:
        """Raise CaptureError if the value of a later call is not covered by the capture."""
        if not self.tensor:
            if not same_constant(value, self.constant):
                raise CaptureError(
                    f"input '{self.name}' was captured as {self.constant!r} and is baked into the graph; this call "
                    f"gives {value!r}. Convert again with this value."
                )
            return
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"input '{self.name}' was captured as a tensor; this call gives {type(value).__name__}. Convert again "
                "with an example of that type."
            )
        if value.dtype != self.dtype:
            trainer = value.dtype in LOW_DTYPES and self.dtype == torch.float32
            raise CaptureError(
                f"input '{self.name}' was captured as {self.dtype}; this call gives {value.dtype}. Cast it, or convert "
                "with an example of this dtype."
                + " Where a trainer casts inputs (Fabric's precision='bf16-mixed'), ask it for full precision "
                "('32-true'): a converted module does its own casts." * trainer
            )
        if self.ndim is not None and value.dim() != self.ndim:
            raise CaptureError(
                f"input '{self.name}' was captured with {self.ndim} dimensions; this call gives {value.dim()}. Convert "
                f"again with an example of {value.dim()} dimensions."
            )
        for dim, size in self.static:
            if value.shape[dim] != size:
                raise CaptureError(
                    f"dimension {dim} of input '{self.name}' was specialised to {size} by capture; this call gives "
                    f"{value.shape[dim]}. {_for_other_sizes(dim, size)}"
                )


def _for_other_sizes(dim: int, size: int) -> str:
    """Return advice for a call with another size in a dimension that capture has specialised."""
    if size != 1:
        return "Convert again with that size."
    if dim == 0:
        return "Give an example batch of at least 2."
    # This is usually a channel dimension, for which the model accepts only one size.
    return (
        "Pass a size of 1, or, if the model takes larger ones, convert with an example of at least 2 in that dimension."
    )


@dataclass(frozen=True)
class CallSpec:
    """The signature of the original forward, the example's leaves, and the containers of inputs and outputs.

    Without example inputs (`in_spec` None) every given argument is one placeholder.
    """

    names: tuple[str, ...]  # positional parameters of forward, in order
    keyword_only: tuple[str, ...]
    var_positional: str | None
    var_keyword: str | None
    defaults: Mapping[str, Any]
    given: tuple[str, ...]
    in_spec: Any = None
    leaves: tuple[Leaf, ...] = ()
    guards: tuple[str, ...] = ()  # conditions on sizes: Python over args[i], the i-th tensor
    out_spec: Any = None
    out_constants: tuple[tuple[int, Any], ...] = ()
    out_dtypes: tuple[torch.dtype | None, ...] = field(default=())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "in_spec": _spec_to_data(self.in_spec), "out_spec": _spec_to_data(self.out_spec)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        specs = {name: _spec_from_data(state[name]) for name in ("in_spec", "out_spec")}
        vars(self).update({**state, **specs})

    def signature(self) -> inspect.Signature:
        """Return what `forward` takes, in Python's form; without annotations, which may be anything."""
        kinds = inspect.Parameter
        variadic = ((self.var_positional, kinds.VAR_POSITIONAL), (self.var_keyword, kinds.VAR_KEYWORD))
        found = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=self.defaults.get(n, kinds.empty)) for n in self.names]
        found += [kinds(n, kinds.KEYWORD_ONLY, default=self.defaults.get(n, kinds.empty)) for n in self.keyword_only]
        found += [kinds(n, kind) for n, kind in variadic if n is not None]
        return inspect.Signature(sorted(found, key=lambda p: p.kind))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the graph's flat inputs for a call, or raise TypeError (as Python would) or CaptureError."""
        values = self.by_name(args, kwargs)
        for name in list(values):
            if name not in self.given:
                if name in self.defaults and same_constant(values[name], self.defaults[name]):
                    del values[name]
                    continue
                raise CaptureError(
                    f"optional input '{name}' was left out of the example inputs, so the graph does not take it. "
                    "Convert with an example that has it."
                )
        bound = [values[name] if name in values else self._left_out(name) for name in self.given]
        if self.in_spec is None:
            return bound
        flat: list[Any] = []
        for name, value, spec in zip(self.given, bound, self.in_spec.children(), strict=True):
            leaves, found = pytree.tree_flatten(_ordered(value, spec))
            if found != spec:
                raise CaptureError(
                    f"input '{name}' has another structure than the example: {_outline(found)} instead of "
                    f"{_outline(spec)}. Convert again with an example of the structure that you want to pass."
                )
            flat += leaves
        for leaf, value in zip(self.leaves, flat, strict=True):
            leaf.check(value)
        return [value for leaf, value in zip(self.leaves, flat, strict=True) if leaf.tensor]

    def _left_out(self, name: str) -> Any:
        """Return the value of an argument that only the example gave: its default, if capture baked that."""
        if name in (self.var_positional, self.var_keyword):
            return () if name == self.var_positional else {}
        if name not in self.defaults:
            raise TypeError(f"forward() missing 1 required argument: '{name}'")
        if self.in_spec is not None and self.in_spec.children()[self.given.index(name)].is_leaf():
            at = sum(s.num_leaves for s in self.in_spec.children()[: self.given.index(name)])
            if not self.leaves[at].tensor:
                return self.defaults[name]
        raise CaptureError(
            f"optional input '{name}' was given in the example inputs and is missing from this call. Pass it, or "
            "convert with an example that leaves it out."
        )

    def arguments(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments that give `forward` these values."""
        rest = dict(values)
        args: list[Any] = []
        for name in self.names:  # up to the first optional that was left out
            if name not in rest:
                break
            args.append(rest.pop(name))
        if self.var_positional is not None:
            args += rest.pop(self.var_positional, ())
        extra = rest.pop(self.var_keyword, {}) if self.var_keyword is not None else {}
        return args, {**rest, **extra}

    def unflatten(self, flat: list[Any]) -> dict[str, Any]:
        """Return the given arguments by name for the flat leaves of the example."""
        return dict(zip(self.given, pytree.tree_unflatten(flat, self.in_spec), strict=True))

    def pack(self, flat: tuple[Any, ...]) -> Any:
        """Return the graph's flat outputs in the container the original returns."""
        values = list(flat)
        for index, value in self.out_constants:
            values.insert(index, value)
        if self.out_spec is not None and _has_size(self.out_spec):
            return _with_sizes(iter(values), self.out_spec)
        return pytree.tree_unflatten(values, self.out_spec)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a call's values by parameter, or raise TypeError as Python would.

        Written by hand: `inspect.Signature.bind` takes three times as long, and this runs at every call.
        """
        values: dict[str, Any] = dict(zip(self.names, args, strict=False))
        rest = args[len(self.names) :]
        if rest:
            if self.var_positional is None:
                raise TypeError(f"forward() takes {len(self.names)} positional arguments but {len(args)} were given")
            values[self.var_positional] = tuple(rest)
        extra: dict[str, Any] = {}
        for key, value in kwargs.items():
            if key in values:
                raise TypeError(f"forward() got multiple values for argument '{key}'")
            if key in self.names or key in self.keyword_only:
                values[key] = value
            elif self.var_keyword is not None:
                extra[key] = value
            else:
                raise TypeError(f"forward() got an unexpected keyword argument '{key}'")
        if extra and self.var_keyword is not None:
            values[self.var_keyword] = extra
        return values

    def guard_function(self) -> Callable[..., list[bool]] | None:
        """Return a function of the flat tensors that returns which guards hold; None if there are no guards."""
        if not self.guards:
            return None
        namespace: dict[str, Any] = dict(GUARD_NAMES)
        exec(f"def guards(*args):\n    return [{', '.join(self.guards)}]", namespace)
        made: Callable[..., list[bool]] = namespace["guards"]
        return made

    def refuse_sizes(self, holds: list[bool], tensors: list[Any]) -> None:
        """Raise CaptureError naming the first guard that does not hold."""
        guard = self.guards[holds.index(False)]
        names = [leaf.name for leaf in self.leaves if leaf.tensor]
        for i in reversed(range(len(names))):
            guard = guard.replace(f"args[{i}]", names[i])
        sizes = ", ".join(f"'{n}' {tuple(t.shape)}" for n, t in zip(names, tensors, strict=True) if n in guard)
        raise CaptureError(
            f"the model was captured for sizes that satisfy {guard}; this call gives {sizes}. Convert again with an "
            "example of these sizes, if the model takes them."
        )


def signature_of(forward: Callable[..., Any]) -> CallSpec:
    """Read a forward's signature into an empty CallSpec."""
    names, keyword_only, defaults = [], [], {}
    var_positional = var_keyword = None
    for p in inspect.signature(forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            var_positional = p.name
        elif p.kind is p.VAR_KEYWORD:
            var_keyword = p.name
        elif p.kind is p.KEYWORD_ONLY:
            keyword_only.append(p.name)
        else:
            names.append(p.name)
        if p.default is not p.empty:
            defaults[p.name] = p.default
    return CallSpec(tuple(names), tuple(keyword_only), var_positional, var_keyword, defaults, ())


def example_call(call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Any]]:
    """Bind the example inputs; return the specification with what was given, and the flat leaves.

    Raises:
        TypeError: `forward` does not take these arguments, in Python's words.
        CaptureError: an input is a container that cannot be looked into.
    """
    values = call.by_name(args, kwargs)
    required = [n for n in (*call.names, *call.keyword_only) if n not in values and n not in call.defaults]
    if required:
        raise TypeError(f"forward() missing {len(required)} required argument(s): {', '.join(map(repr, required))}")
    order = (*call.names, *call.keyword_only, call.var_positional, call.var_keyword)
    given = tuple(n for n in order if n is not None and n in values)
    flat, spec = pytree.tree_flatten(tuple(values[n] for n in given))
    call = replace(call, given=given, in_spec=spec)
    names = leaf_names(call, len(flat))
    for name, value in zip(names, flat, strict=True):
        refuse_unknown_container(value, f"input '{name}'")
    leaves = tuple(
        Leaf(n, True, None, v.dtype) if isinstance(v, torch.Tensor) else Leaf(n, False, v)
        for n, v in zip(names, flat, strict=True)
    )
    return replace(call, leaves=leaves), flat


def both(one: CallSpec, other: CallSpec) -> CallSpec:
    """Return the first of two specifications of one call, with the conditions on inputs of both."""
    leaves = tuple(
        replace(a, static=tuple(sorted({*a.static, *b.static}))) for a, b in zip(one.leaves, other.leaves, strict=True)
    )
    return replace(one, leaves=leaves, guards=tuple(dict.fromkeys((*one.guards, *other.guards))))


def leaf_names(call: CallSpec, count: int) -> list[str]:
    """Name the leaves of the example inputs after their arguments ("batch['ids']")."""
    numbered = pytree.tree_unflatten(list(range(count)), call.in_spec)
    paths: list[Any] = [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
    return [call.given[path[0].idx] + pytree.keystr(path[1:]) for path in paths]


def refuse_unknown_container(value: Any, what: str) -> None:
    """Raise CaptureError for an object with tensors inside that is not registered as a container."""
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *CONSTANTS)):
        return
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    holds = any(isinstance(v, (torch.Tensor, torch.fx.Proxy)) for v in pytree.tree_leaves(list(inside)))
    if dataclasses.is_dataclass(value) or holds:
        name = type(value).__qualname__
        raise CaptureError(f"{what} is a {name}, a container that capture cannot look into; {_REGISTER}.")


def flatten_outputs(output: Any) -> tuple[list[Any], tuple[tuple[int, Any], ...], Any]:
    """Return an output's traced leaves, its constant leaves with their positions, and its container."""
    flat, spec = pytree.tree_flatten(output)
    traced = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.Proxy)
    for value in flat:
        if not isinstance(value, torch.fx.Proxy):
            refuse_unknown_container(value, "the output")
    kept = [o for o in flat if isinstance(o, traced)]
    return kept, tuple((i, o) for i, o in enumerate(flat) if not isinstance(o, traced)), spec


def same_constant(a: Any, b: Any) -> bool:
    """Say whether two constants are the same; anything but a plain value by identity."""
    return a is b or (type(a) is type(b) and isinstance(a, CONSTANTS) and bool(a == b))


def _has_size(spec: Any) -> bool:
    return not spec.is_leaf() and (spec.type is torch.Size or any(map(_has_size, spec.children())))


def _with_sizes(leaves: Iterator[Any], spec: Any) -> Any:
    """Return leaves in their containers; torch itself makes a tuple of a torch.Size."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_with_sizes(leaves, part) for part in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(parts)
    leaf = pytree.tree_structure(0)
    return pytree.tree_unflatten(parts, pytree.TreeSpec(spec.type, spec.context, [leaf] * len(parts)))


def _ordered(value: Any, spec: Any) -> Any:
    """Return a value with its dictionaries in the order of the example."""
    if spec.is_leaf():
        return value
    parts = spec.children()
    if isinstance(value, dict) and spec.type is type(value) and isinstance(spec.context, list):
        if set(value) == set(spec.context) and type(value) is dict:
            return {k: _ordered(value[k], s) for k, s in zip(spec.context, parts, strict=True)}
    elif type(value) in (list, tuple) and len(value) == len(parts):
        return type(value)(_ordered(v, s) for v, s in zip(value, parts, strict=True))
    return value


def _spec_to_data(spec: Any) -> Any:
    """Return a container's structure as plain data, which survives torch: () for a leaf, else its parts."""
    if spec is None:
        return None
    return () if spec.is_leaf() else (spec.type, spec.context, [_spec_to_data(s) for s in spec.children()])


def _spec_from_data(data: Any) -> Any:
    if data is None:
        return None
    if not data:
        return pytree.tree_structure(0)
    kind, context, parts = data
    return pytree.TreeSpec(kind, context, [_spec_from_data(part) for part in parts])


def _outline(spec: Any) -> str:
    """Show a structure in short: {'ids': *, 'mask': (*, *)}."""
    if spec.is_leaf():
        return "*"
    parts = [_outline(s) for s in spec.children()]
    if spec.type is dict:
        return "{" + ", ".join(f"{k!r}: {p}" for k, p in zip(spec.context, parts, strict=True)) + "}"
    name = "" if spec.type in (tuple, list) else spec.type.__name__
    return f"{name}({', '.join(parts)})"
