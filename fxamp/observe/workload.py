"""Call a model, and make a loss of what it returns, so that afterwards everything that it holds is as before."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from passes._torch import pytree
from passes.contract.errors import CaptureError, PolicyError

from ..errors import NoKernelError, NoLossError, in_short
from .snapshot import fresh, same_containers, same_random_state
from .tensors import kept, reached

MEAN = "the loss was the mean of the float outputs: no loss was given, and the output has none"
_NO_LSTM = "could not create a primitive descriptor for the LSTM"  # oneDNN's words
# Torch's words where an op refuses its operands for their devices or dtypes.
_MISFIT = re.compile(
    r"expected (device|scalar type|all tensors to be on the same device)|same d?type|type .* should be", re.I
)
Loss = Callable[..., Any] | None


class Both(NamedTuple):
    """Positional inputs and keyword inputs of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def copies(values: Any) -> Any:
    """Copy tensors, one that is given twice once: Dynamo guards which inputs are the same."""
    made: dict[int, Any] = {}
    return pytree.tree_map(lambda v: made.setdefault(id(v), fresh(v)) if isinstance(v, Tensor) else v, values)


@contextlib.contextmanager
def as_before(model: nn.Module, written: Collection[int] | None = None) -> Iterator[list[Tensor]]:
    """Restore random states, what a model holds, its parameters, their gradients (None inside), and attributes.

    Yields a list, which afterwards holds the tensors that were restored: of the parameters those `written`, given by
    their identities, if that is known.
    """
    parameters = list(model.parameters())
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    restored = [p for p in parameters if written is None or id(p) in written]
    ids = {id(p) for p in parameters}
    containers, tensors = reached(model)
    everything = {i: t for i, t in tensors.items() if i not in ids} | {id(p): p for p in restored}
    with same_random_state(), same_containers(containers), kept(everything.values()) as found:
        for p in parameters:
            p.grad = None
        try:
            yield found
        finally:
            for p, gradient, requires_grad in before:
                p.grad = gradient
                if p.requires_grad != requires_grad:
                    p.requires_grad_(requires_grad)


def output_of(model: nn.Module, inputs: Any) -> Any:
    """Call a model, by `model(**inputs)`, `model(*inputs)`, both, or `model(inputs)`.

    Raises:
        PolicyError: the inputs are of another kind.
        CaptureError: an op refuses its operands' devices or dtypes, and an input has not those of the parameters.
        NoKernelError: an LSTM of the model cannot run in a low dtype on this CPU.
    """
    args, kwargs = _as_call(inputs)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if said := misfit(model.forward, args, kwargs):
            raise PolicyError(
                f"{type(model).__name__} cannot be called with these inputs: {said}. A tuple is model(*inputs), and a "
                "target is no part of it: give it by itself, behind the inputs."
            ) from error
        raise
    except RuntimeError as error:
        if _MISFIT.search(str(error)) and (said := misplaced(model, args, kwargs)):
            raise CaptureError(f"{type(model).__name__} rejects its inputs: {said} ({in_short(error)})") from error
        layers = [path for path, module in model.named_modules() if isinstance(module, nn.LSTM)]
        if _NO_LSTM not in str(error) or not layers:
            raise
        raise NoKernelError(
            f"{' or '.join(map(repr, layers))} (LSTM) cannot run here in the low dtype: oneDNN has no such kernel for "
            "this CPU, and torch.autocast fails alike. Keep it in FP32, as by policy="
            f"'O1,dtype=fp16,modules.{layers[0]}=fp32', or take dtype=bf16."
        ) from error


def _as_call(inputs: Any) -> Both:
    if isinstance(inputs, Both):
        return inputs
    if isinstance(inputs, Mapping):
        return Both((), dict(inputs))
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return Both(inputs, {})
    if isinstance(inputs, (Tensor, PackedSequence)):
        return Both((inputs,), {})
    raise PolicyError(
        "inputs is a tensor, a tuple for model(*inputs) or a mapping for model(**inputs), not "
        f"{type(inputs).__name__}: give tuple(inputs) for several inputs, (inputs,) for a single one, and of a "
        "DataLoader the inputs of one batch."
    )


def misfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Say what a function takes, where its signature does not fit a call; "" where it does, or is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        named = f" and {', '.join(kwargs)}" if kwargs else ""
        return f"{getattr(function, '__name__', 'it')}({takes}) got {len(args)} by position{named} ({error})"
    return ""


def misplaced(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name the input that does not fit the parameters of a model, by its device or dtype; "" where all do."""
    first = next(model.parameters(), None)
    if first is None:
        return ""
    names = inspect.signature(model.forward).parameters
    named = {f"input {name!r}": value for name, value in (*zip(names, args, strict=False), *kwargs.items())}
    for name, value in named.items():
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.device.type != first.device.type:
                meta = "; a model on meta runs nowhere: model.to_empty(device=...)" if first.is_meta else ""
                return f"{name} is on {tensor.device}, and the parameters are on {first.device}{meta}"
            if tensor.dtype is torch.float64 and first.dtype is torch.float32:
                return f"{name} is float64, which autocast does not cast, and the parameters are float32: give .float()"
    return ""


def loss_of(output: Any, target: Any, loss: Loss, *, any_will_do: bool = False) -> tuple[Tensor, tuple[str, ...]]:
    """Return the loss of an output, by a function or its own, and what is to be said of it.

    Its own is its `.loss` or its key "loss", itself where it is a scalar, or the one scalar in it that has a gradient,
    as in `(logits, loss)`. Where there is none, and `any_will_do`, it is the mean of the float outputs.

    Raises:
        PolicyError: there is no loss, there are several, or it has more elements than one.
    """
    if loss is not None:
        return _loss_by(loss, output, target), ()
    if target is not None:
        raise PolicyError(
            "a target was given, the third argument, without loss= (loss_fn of a TrainStep): if it is a second input "
            "of the model, the inputs are one tuple, (x, y); else give the loss too."
        )
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = output if found is None and isinstance(output, Tensor) and not output.dim() else found
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        return found, ()
    scalars = {} if found is not None else _scalars(output)
    if len(scalars) == 1:
        [(name, scalar)] = scalars.items()
        return scalar, (f"the loss was {name}, the one scalar of the output that has a gradient",)
    leaves = floats(output)
    if any_will_do and leaves:
        graded = [t for t in leaves if t.requires_grad] or leaves
        return torch.stack([t.float().mean() for t in graded]).mean(), (MEAN,)
    what = "no loss" if leaves else "no loss and no tensor of floats"
    if scalars:
        what = f"{len(scalars)} scalars, any of which may be the loss: {', '.join(scalars)}"
    if found is not None:
        what = f"a loss that is {_described(found)}, not a tensor of one element"
    raise NoLossError(f"the output ({type(output).__name__}) has {what}", next(iter(scalars), ""))


def _loss_by(loss: Callable[..., Any], output: Any, target: Any) -> Tensor:
    if isinstance(loss, type):
        raise PolicyError(f"loss= is a class: give an object of it, loss={loss.__name__}()")
    try:
        found = loss(output) if target is None else loss(output, target)
    except TypeError as error:
        function = loss.forward if isinstance(loss, nn.Module) else loss
        said = misfit(function, (output,) if target is None else (output, target), {})
        if target is None and "required positional argument" in str(error):
            raise PolicyError(f"the loss takes a target, the third argument, and none was given: {error}") from error
        if said:
            given = "output" if target is None else "output, target"
            raise PolicyError(f"the loss is called as loss({given}), which it does not take: {said}") from error
        raise
    require_loss(found)
    return found  # type: ignore[no-any-return]


def _scalars(output: Any) -> dict[str, Tensor]:
    """Return the float tensors of no dimension that have a gradient, by the code that reads them off `output`.

    Where nothing in the output has a gradient it is all of them.
    """
    every = pytree.tree_flatten_with_path(output)[0]
    named = [(path, t) for path, t in every if isinstance(t, Tensor) and t.is_floating_point()]
    graded = [(path, t) for path, t in named if t.requires_grad] or named
    return {f"output{pytree.keystr(path)}": t for path, t in graded if not t.dim()}


def floats(output: Any) -> list[Tensor]:
    """Return the tensors of a floating dtype in an output, in the order of its leaves."""
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def require_loss(loss: object) -> None:
    """Raise PolicyError unless a loss is a tensor of one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise PolicyError(f"the loss must be a tensor of one element, not {_described(loss)}.")


def _described(value: Any) -> str:
    kind = "a complex one" if isinstance(value, Tensor) and value.is_complex() else "one"
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
