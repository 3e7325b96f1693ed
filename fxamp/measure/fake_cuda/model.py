"""A model and its inputs, built on the CPU by whoever is asked for them, and moved to the GPU that is not there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from passes._torch import pytree
from passes.contract.errors import FxampError

from ...capture.inputs import Inputs, as_inputs
from ...errors import MeasureError
from ...target import call_target, load_callable
from .tally import FakeGpu

LARGEST = 1 << 30  # bytes of parameters that are made with values


class _TooLargeError(BaseException):
    """Raised within a target, which may catch any Exception."""


def build(target: str, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    """Return what a target makes on the CPU; on "meta", without values, if it has more than a GB of parameters.

    Raises:
        FxampError: The target cannot be imported, or raises.
        MeasureError: It returns something else than a model and inputs, or chooses by whether there is a GPU.
    """
    function = load_callable(target)
    with _without_gpu(target, function):
        try:
            with _at_most(LARGEST):
                made = call_target(target, function, **options)
        except FxampError as error:
            if not isinstance(error.__cause__, _TooLargeError):
                raise
            with torch.device("meta"):
                made = call_target(target, function, **options)
    model, args, kwargs = made
    inputs = as_inputs(args, kwargs)
    if not isinstance(model, nn.Module) or inputs is None:
        raise MeasureError(
            f"{target!r} returned {'a model without inputs' if inputs is None else type(model).__name__}: kernels are "
            "counted of a model and its example inputs, (model, args) or (model, args, kwargs)"
        )
    return model, inputs


@contextlib.contextmanager
def _at_most(limit: int) -> Iterator[None]:
    size = 0

    def add(_: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        nonlocal size
        size += parameter.nbytes if parameter is not None and parameter.device.type != "meta" else 0
        if size > limit:
            raise _TooLargeError

    handle: Any = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _without_gpu(target: str, function: Callable[..., Any]) -> Iterator[None]:
    """Refuse a target that asks whether there is a GPU: it would make another model here than where there is one."""
    module = function.__module__

    def is_available() -> bool:
        if sys._getframe(1).f_globals.get("__name__") == module:
            raise MeasureError(
                f"{target!r} asks torch.cuda.is_available() while it makes its model, which is then not the one that a "
                "GPU gets; make the model on the CPU, and move it where it is trained"
            )
        return False

    with mock.patch.object(torch.cuda, "is_available", is_available):
        yield


def moved(gpu: FakeGpu, model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Put a model and its inputs onto the GPU, without values; what is one tensor stays one."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            to = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")
            grad = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(to, grad) if isinstance(tensor, nn.Parameter) else to.requires_grad_(grad)
        return made[id(tensor)]

    with gpu:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: None if t is None else fake(t) for name, t in tensors.items()})  # type: ignore[misc]
        return model, pytree.tree_map_only(Tensor, fake, inputs)
