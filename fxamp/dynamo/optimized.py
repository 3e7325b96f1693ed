"""The result of `fxamp.compile`: torch's `OptimizedModule`, every call of which runs under autocast.

Inside the graphs autocast is off, since they contain their casts. It is on for the rest: Python between two graphs,
layers that Dynamo does not capture, calls beyond its recompile limit, and methods such as `generate`.

    compiled(x)               autocast on;  graph;  Python;  graph;  autocast off;  outputs in the model's own dtypes
    compiled.generate(ids)    autocast on;  the method of the model, as it is;  autocast off;  the same
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import OptimizedModule, dynamo_errors, pytree, storage_id
from passes.contract.devices import DEVICES
from passes.contract.errors import FxampError
from passes.contract.policy import Policy
from passes.graph.values import LOW_DTYPES

from . import compiled

logger = logging.getLogger("fxamp")

_OWN: Any = WeakIdKeyDictionary()  # the dtypes that values which left a graph have in the model itself
_CONTEXTS: dict[tuple[str, torch.dtype, bool], list[torch.autocast]] = {}  # for reuse; none is entered now


class CompiledModule(OptimizedModule):
    """A compiled module whose calls run under autocast, and whose outputs have the dtypes of the model itself."""

    _fxamp_policy: Policy | None = None  # OptimizedModule sets attributes that its class lacks on the model

    def _initialize(self) -> None:
        super()._initialize()
        self.forward = _guarded(self.forward, self._orig_mod, self._fxamp_policy)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        policy = self._fxamp_policy
        if policy is None or not policy.level.rounds or torch.compiler.is_compiling():
            return found
        if not isinstance(found, types.MethodType) or found.__self__ is not self._orig_mod or name.startswith("_"):
            return found
        return _method(found, self._orig_mod, policy)

    def __reduce__(self) -> Any:
        return _again, (self._orig_mod, self.dynamo_ctx, self._fxamp_policy)


def adopted(made: Any, policy: Policy) -> CompiledModule:
    """Return a module that `torch.compile` returned, with every call under the autocast of a policy."""
    module: CompiledModule = made
    made.__class__ = CompiledModule
    module._fxamp_policy = policy
    module._initialize()
    compiled.announce(module, policy)
    return module


def _again(model: nn.Module, dynamo: Any, policy: Policy) -> CompiledModule:
    """Make a copy of a compiled module, over a copy of its model."""
    return adopted(OptimizedModule(model, dynamo), policy)


def note_own(value: Tensor, dtype: torch.dtype) -> None:
    """Note which dtype a value that leaves a graph has in the model itself; under autocast it may have another."""
    _OWN[value] = dtype


def is_low_of_its_own(value: object, made_of_low: bool) -> bool:
    """Say whether a value is low in the model itself. A note from its graph decides, or else `made_of_low`."""
    if not isinstance(value, Tensor):
        return False
    return _OWN.get(value, value.dtype if made_of_low else None) in LOW_DTYPES


def is_low_throughout(model: nn.Module, inputs: Any) -> bool:
    """Say whether all parameters, buffers and inputs are low; values made outside of graphs then are, too."""
    held = itertools.chain(model.parameters(), model.buffers(), pytree.tree_leaves(inputs))
    floats = (t.dtype in LOW_DTYPES for t in held if isinstance(t, Tensor) and t.is_floating_point())
    return next(floats, False) and all(floats)


def _guarded(run: Callable[..., Any], model: nn.Module, policy: Policy | None) -> Callable[..., Any]:
    """Return the compiled forward of a model under autocast."""
    if policy is None:
        return run

    runs: bool | None = None  # whether it runs under autocast; None before the first call

    @functools.wraps(run, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        if torch.compiler.is_compiling():
            return _inside(run, model, policy, args, kwargs)
        if runs is False:
            return run(*args, **kwargs)
        try:
            with under_autocast(policy, model, args, kwargs) as low:
                outputs = run(*args, **kwargs)
        except (RuntimeError, dynamo_errors().TorchDynamoException) as e:
            _raise_ours(e)
            if runs and not isinstance(e, dynamo_errors().TorchDynamoException):
                raise  # it ran under autocast before, so the cause is another
            outputs = _without_autocast(e, run, args, kwargs)
            runs = False
            why = str(e).strip().partition("\n")[0]
            logger.warning("%s runs without autocast, under which it fails: %s", type(model).__name__, why)
            return outputs
        runs = True
        return _given_back(outputs, low, policy, model, (args, kwargs))

    return forward


def _inside(run: Callable[..., Any], model: nn.Module, policy: Policy, args: Any, kwargs: Any) -> Any:
    """Run the forward inside another compiled function, which captures it as a region of autocast."""
    device = policy.device or next((p.device.type for p in model.parameters()), "cpu")
    low = policy.dtype or torch.get_autocast_dtype(device)
    with torch.autocast(device, dtype=low, enabled=policy.level.rounds):
        outputs = run(*args, **kwargs)
    if not policy.level.rounds or policy.output_dtype != "original":
        return outputs
    return pytree.tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.dtype == low else t, outputs)


def _raise_ours(error: Exception) -> None:
    """Raise the error of fxamp that Dynamo has wrapped, if there is one."""
    found = error.inner_exception if isinstance(error, dynamo_errors().BackendCompilerFailed) else error
    if isinstance(found, FxampError):
        raise found from None


def _without_autocast(error: Exception, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call without autocast a model that fails under it: the cause may be dtypes that autocast mixes.

    Raises:
        Exception: the error under autocast, where the model fails without it too.
    """
    if isinstance(error, (torch.OutOfMemoryError, dynamo_errors().BackendCompilerFailed)):
        raise error
    try:
        return run(*args, **kwargs)
    except Exception:
        raise error from None


def _method(method: types.MethodType, model: nn.Module, policy: Policy) -> Callable[..., Any]:
    """Return a method of the model under autocast; the parts of the model that it calls are not compiled."""

    @functools.wraps(method, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with under_autocast(policy, model, args, kwargs) as low:
            outputs = method(*args, **kwargs)
        return _given_back(outputs, low, policy, model, (args, kwargs))

    return call


@contextlib.contextmanager
def under_autocast(policy: Policy, model: nn.Module, args: Any, kwargs: Any) -> Iterator[torch.dtype | None]:
    """Run with the autocast of a policy: on, except at O0. Yields the low dtype, or None if nothing is low.

    Ambient autocast gives the dtype that the policy leaves open.
    """
    device = policy.device or _device(model, args, kwargs)
    if device not in DEVICES or not DEVICES[device].is_here():
        yield None
        return
    on, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    low, wanted = policy.dtype or before, policy.level.rounds
    if on == wanted and (not on or low == before):
        yield low if wanted else None
        return
    free = _CONTEXTS.setdefault((device, low, wanted), [])
    context = free.pop() if free else torch.autocast(device, dtype=low, enabled=wanted)
    try:
        with context:
            yield low if wanted else None
    finally:
        free.append(context)


def _device(model: nn.Module, args: Any, kwargs: Any) -> str:
    """Return the kind of device of the parameters, else of the inputs, else the CPU."""
    found: Tensor | None = next(model.parameters(), None)
    if found is None:
        found = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
    return found.device.type if found is not None and found.device.type != "meta" else "cpu"


def _given_back(outputs: Any, low: torch.dtype | None, policy: Policy, model: nn.Module, inputs: Any) -> Any:
    """Return outputs in the model's own dtypes, unless nothing was low, or the policy asks for other dtypes."""
    if low is None or policy.output_dtype != "original":
        return outputs
    return restored(outputs, low, functools.partial(_is_given, model, inputs))


def restored(
    outputs: Any, low: torch.dtype, is_given: Callable[[Tensor], bool], made: dict[int, Any] | None = None
) -> Any:
    """Return outputs with low values cast to FP32, unless the model itself makes them low or was given them.

    Containers that pytree does not know, except dataclasses, are left unchanged, so a cache keeps low values.
    An output that is returned twice stays one tensor: `made` maps the identity of each output to what was made of it.
    """
    made = {} if made is None else made
    leaves, spec = pytree.tree_flatten(outputs)
    for leaf in leaves:
        if id(leaf) in made:
            continue
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            made[id(leaf)] = _restored_fields(leaf, low, is_given, made)
        elif isinstance(leaf, Tensor) and leaf in _OWN:
            made[id(leaf)] = leaf.to(_OWN[leaf])
        elif isinstance(leaf, Tensor) and leaf.dtype == low and not is_given(leaf):
            made[id(leaf)] = leaf.float()
    changed = [made.get(id(leaf), leaf) for leaf in leaves]
    same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return outputs if same else pytree.tree_unflatten(changed, spec)


def _is_given(model: nn.Module, inputs: Any, value: Tensor) -> bool:
    """Say whether a value is a parameter, shares memory with an input, or is of a model given low values alone."""
    given = (storage_id(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    if isinstance(value, nn.Parameter) or storage_id(value) in given:
        return True
    return is_low_throughout(model, inputs)


def _restored_fields(value: Any, low: torch.dtype, is_given: Callable[[Tensor], bool], made: dict[int, Any]) -> Any:
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    changed = {name: new for name, old in held.items() if (new := restored(old, low, is_given, made)) is not old}
    if not changed:
        return value
    out = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(out, name, new)
    return out
