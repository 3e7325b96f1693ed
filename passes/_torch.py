"""The private names of torch that the compiler uses and nothing public replaces, in one place.

Each is used by PyTorch's own documentation or by its downstream projects, and each is tested against the oldest and
the newest supported torch: fake tensors (shapes and dtypes without data), the dispatcher's own list of autocast rules,
autocast regions as two calls, and the guards of symbolic numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._jit_internal import boolean_dispatched as boolean_dispatched
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode as TorchFunctionMode

from .contract.devices import DEVICES

pytree = torch.utils._pytree
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS = (int, float, *SYMBOLS)
TENSOR_OF: Any = torch._refs.tensor  # what Dynamo calls in the place of `torch.tensor`, where a number is an input
enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
FunctionContext = torch.autograd.function.BackwardCFunction  # one is made at every `apply`
in_transform = torch._C._are_functorch_transforms_active  # whether a transform of `torch.func`, as vmap, is running
SET_GRAD = torch._C._set_grad_enabled  # what `set_grad_enabled` is in an exported graph
INFERENCE = torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode  # in a graph
DATA_OF = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # what `tensor.data` is in a graph of Dynamo
VF = torch._VF  # the kernels of recurrent layers


def own_schema(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an overload, or of another operator that a dispatch mode gets in its place."""
    return op._schema


def qualified_name(packet: OpOverloadPacket) -> str:
    """Return the name of an op with its namespace: "aten::add"."""
    return str(packet._qualified_op_name)


def is_composite(op: OpOverload) -> bool:
    """Say whether torch decomposes an op before autograd sees it (CompositeImplicitAutograd)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def runs_its_forward_alone(module: torch.nn.Module) -> bool:
    """Say whether a call of a module runs its `forward` and no hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks)


# What a call is made of. A change of its arguments gives a node new objects for them. The public properties `args` and
# `kwargs` are written in Python, and took most of the time of a look at a node.
parts_of: Callable[[torch.fx.Node], tuple[Any, ...]] = operator.attrgetter("op", "target", "_args", "_kwargs")


def contexts_of_checkpoint(body: torch.fx.GraphModule) -> Callable[[], Any] | None:
    """Return the `context_fn` of a checkpoint, which Dynamo keeps on the graph of its body."""
    return body.meta.get("_checkpoint_context_fn")


def autocast_registrations(device: str) -> frozenset[str]:
    """Return the names of ops (`namespace::op[.overload]`) with an autocast kernel for a device, users' too."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(DEVICES[device].autocast))


def registered_autocast_dtype(name: str, device: str) -> torch.dtype | None:
    """Return the dtype that PyTorch's `register_autocast` was given for an op; None if it was not used."""
    namespace, _, op = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), op).default
    definition: Any = _maybe_get_opdef(overload)
    if definition is None:
        key = getattr(torch._C.DispatchKey, DEVICES[device].autocast)
        kernel = overload.py_kernels.get(key)
        return inspect.getclosurevars(kernel).nonlocals.get("cast_inputs") if kernel else None
    if hasattr(definition, "_autocast_dtype"):
        return definition._autocast_dtype.get(device)  # type: ignore[no-any-return]
    return getattr(definition, f"_autocast_{device}_dtype", None)  # before torch 2.13


def example_sizes(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> dict[Any, Any]:
    """Return the value that each symbol for an input size has in the example."""
    env = size.node.shape_env
    known = getattr(env, "backed_var_to_val", None)
    return dict(env.var_to_val if known is None else known)  # the older name


def example_of(number: Any) -> Any:
    """Return the value that a symbolic number has in the example; a constant as it is."""
    return number.node.hint if isinstance(number, SYMBOLS) else number


def varies(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Say whether a symbolic number depends on inputs or on data, and no guard has made it a constant."""
    return number.node.is_nested_int() or bool(number.node.expr.free_symbols)


def is_of_data(number: Any) -> bool:
    """Say whether data decides a symbolic number, as what `.item()` of a tensor gives; no guard can ask that."""
    symbolic = isinstance(number, SYMBOLS) and not number.node.is_nested_int()  # the size of a jagged dimension
    return symbolic and bool(free_unbacked_symbols(number))


def is_guarded(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Say whether what is asked of a symbolic number becomes a guard: Dynamo captures it, and has not ended that."""
    context: Any = torch._guards.TracingContext.try_get()
    mode, env = context and context.fake_mode, number.node.shape_env
    return mode is not None and mode.shape_env is env and not env.frozen and not is_of_data(number)


def is_known(condition: torch.SymBool, otherwise: bool) -> bool:
    """Say whether a condition holds for all that its symbols may be; `otherwise` where it holds for some alone."""
    if otherwise:
        return not statically_known_true(torch.sym_not(condition))
    return bool(statically_known_true(condition))


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silence the logs and warnings of fake tensors when an op rejects its operands, since callers test for that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # another level would clear what every logger remembers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before
