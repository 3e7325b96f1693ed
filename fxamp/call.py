"""How a converted module is called: the original `forward`'s signature, bound to the graph's flat placeholders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from passes._torch import pytree
from passes.errors import CaptureError


@dataclass(frozen=True)
class Leaf:
    """One leaf of the example inputs: a tensor, or a constant that capture baked in.

    `static` holds the (dimension, size) pairs of a tensor that capture specialised.
    """

    name: str
    tensor: bool
    constant: Any = None
    dtype: torch.dtype | None = None
    ndim: int = 0
    static: tuple[tuple[int, int], ...] = ()

    def check(self, value: Any) -> None:
        """Raise CaptureError when a later call's value is not what the capture covers."""
        if not self.tensor:
            if type(value) is not type(self.constant) or not (value is self.constant or value == self.constant):
                raise CaptureError(
                    f"input '{self.name}' was captured as {self.constant!r} and is baked into the graph; this call gives "
                    f"{value!r}. Convert again with this value, or use fxamp.compile, which recompiles."
                )
            return
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"input '{self.name}' was captured as a tensor; this call gives {type(value).__name__}.")
        if value.dtype != self.dtype:
            raise CaptureError(
                f"input '{self.name}' was captured as {self.dtype}; this call gives {value.dtype}. Cast it, or convert "
                "with an example of this dtype."
            )
        if value.dim() != self.ndim:
            raise CaptureError(f"input '{self.name}' was captured with {self.ndim} dimensions; this call gives {value.dim()}.")
        for dim, size in self.static:
            if value.shape[dim] != size:
                hint = " Give an example batch of at least 2." if size == 1 else ""
                raise CaptureError(
                    f"dimension {dim} of input '{self.name}' was specialised to {size} by capture; this call gives "
                    f"{value.shape[dim]}.{hint}"
                )


@dataclass(frozen=True)
class CallSpec:
    """The signature of the original forward, what the example gave, and the containers of inputs and outputs.

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
    out_spec: Any = None
    out_constants: tuple[tuple[int, Any], ...] = ()
    out_dtypes: tuple[torch.dtype | None, ...] = field(default=())

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the graph's flat inputs for a call, or raise TypeError (as Python would) or CaptureError."""
        values = self._by_name(args, kwargs)
        for name in list(values):
            if name not in self.given:
                if name in self.defaults and values[name] is self.defaults[name]:
                    del values[name]
                    continue
                raise CaptureError(
                    f"optional input '{name}' was left out of the example inputs, so the graph does not take it. Convert "
                    "with an example that has it, or use fxamp.compile, which handles both."
                )
        for name in self.given:
            if name not in values:
                raise CaptureError(
                    f"input '{name}' was given in the example inputs and is missing from this call. Pass it, or use "
                    "fxamp.compile, which handles both."
                )
        bound = [values[name] for name in self.given]
        if self.in_spec is None:
            return bound
        flat, spec = pytree.tree_flatten(tuple(bound))
        if spec != self.in_spec:
            raise CaptureError(f"the inputs have the structure {spec}, the example had {self.in_spec}.")
        for leaf, value in zip(self.leaves, flat, strict=True):
            leaf.check(value)
        return [value for leaf, value in zip(self.leaves, flat, strict=True) if leaf.tensor]

    def pack(self, flat: tuple[Any, ...]) -> Any:
        """Return the graph's flat outputs in the container the original returns."""
        values = list(flat)
        for index, value in self.out_constants:
            values.insert(index, value)
        return pytree.tree_unflatten(values, self.out_spec)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
