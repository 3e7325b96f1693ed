"""The Python part: torch, Inductor and Triton take the device that `device.cpp` registers for an H100.

Private names of torch that this needs are in this file alone: `NAMES`. The first that a torch lacks is named.
"""

from __future__ import annotations

import functools
import importlib
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import library as operators
from torch.utils._python_dispatch import TorchDispatchMode

from passes._torch import pytree

from ...errors import MeasureError

CAPABILITY = (9, 0)
MEMORY = 80 << 30
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=MEMORY, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    gcnArchName="", is_integrated=0, L2_cache_size=50 << 20, uuid="",
)  # fmt: skip
# Names that are replaced, by module. What is only read is not here: where that is gone, Python says so itself.
NAMES = {
    "torch.cuda": (
        "is_available", "is_initialized", "device_count", "current_device", "set_device", "synchronize", "empty_cache",
        "get_device_properties", "get_device_capability", "get_device_name", "is_bf16_supported", "is_tf32_supported",
        "memory_allocated", "mem_get_info", "get_rng_state", "set_rng_state", "current_stream", "init", "_lazy_init",
        "_exchange_device", "_maybe_exchange_device",
    ),
    "torch.cuda.random": ("get_rng_state", "set_rng_state"),
    "torch.backends.cuda": ("is_built",),
    "torch._dynamo.device_interface": (
        "CudaInterface", "caching_worker_device_properties", "caching_worker_current_devices", "device_interfaces",
    ),
    "torch._subclasses.fake_tensor": ("init_gpu_context",),
    "torch.utils._triton": ("has_triton", "has_triton_package"),
    "torch._inductor.fx_passes.joint_graph": ("lazy_init", "UniformValueConstantFolder"),
    "torch._inductor.fx_passes.post_grad": ("lazy_init",),
    "torch._inductor.graph": ("GraphLowering",),
}  # fmt: skip


def missing() -> list[str]:
    """Return the names that this torch does not have."""
    modules = {name: importlib.import_module(name) for name in NAMES}
    return [f"{of}.{name}" for of, names in NAMES.items() for name in names if not hasattr(modules[of], name)]


def install() -> None:
    """Let this process have an H100 on which nothing runs. There is no way back.

    Raises:
        MeasureError: A private name of torch that this takes is gone.
    """
    if absent := missing():
        raise MeasureError(
            f"torch {torch.__version__} has no {absent[0]}, which is needed to feign a GPU: "
            "use the version of torch in fxamp's constraints.txt"
        )
    # Patterns for a GPU are the same as for a CPU, and are made while nothing is feigned, since that runs tensors.
    for name in ("joint_graph", "post_grad"):
        module: Any = importlib.import_module(f"torch._inductor.fx_passes.{name}")
        module.lazy_init(torch.device("cpu"))
        module.lazy_init = _always(None)
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes.init_gpu_context = _always(None)  # makes a tensor that is no fake
    _as_torch_cuda()
    _as_device_of_dynamo()
    _as_driver_of_triton()
    _constants_on_the_cpu()
    _attention_of_a_gpu()


def _always(value: Any) -> Callable[..., Any]:
    """Return a new function that returns a value, whatever it is given."""
    return lambda *_, **__: value


def _random_state(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


# Each has a function of its own, for Dynamo tells them apart by identity.
_ANSWERS: dict[str, Callable[..., Any]] = {
    **{
        name: _always(None)
        for name in ("set_device", "synchronize", "empty_cache", "set_rng_state", "init", "_lazy_init")
    },
    **{
        name: _always(0)
        for name in ("current_device", "_exchange_device", "_maybe_exchange_device", "memory_allocated")
    },
    **{name: _always(True) for name in ("is_available", "is_bf16_supported", "is_tf32_supported")},
    "is_initialized": _always(False),
    "device_count": _always(1),
    "get_device_properties": _always(PROPERTIES),
    "get_device_capability": _always(CAPABILITY),
    "get_device_name": _always(PROPERTIES.name),
    "mem_get_info": _always((MEMORY, MEMORY)),
    "get_rng_state": _random_state,
    "current_stream": _always(types.SimpleNamespace(cuda_stream=0)),
}


def _as_torch_cuda() -> None:
    cuda: Any = torch.cuda
    for name, answer in _ANSWERS.items():
        setattr(cuda, name, answer)
    for name in NAMES["torch.cuda.random"]:
        setattr(cuda.random, name, _ANSWERS[name])
    version: Any = torch.version
    version.cuda, version.hip = "13.0", None
    backend: Any = torch.backends.cuda
    backend.is_built = _always(True)
    core: Any = torch._C
    core._cuda_getCurrentRawStream = _always(0)


def _as_device_of_dynamo() -> None:
    interfaces: Any = importlib.import_module("torch._dynamo.device_interface")
    own = {name: answer for name, answer in _ANSWERS.items() if hasattr(interfaces.CudaInterface, name)}
    own |= {name.lstrip("_"): answer for name, answer in _ANSWERS.items() if name.endswith("exchange_device")}
    own |= {
        "get_compute_capability": _always(10 * CAPABILITY[0] + CAPABILITY[1]),
        "get_raw_stream": _always(0), "is_triton_capable": _always(True), "raise_if_triton_unavailable": _always(None),
    }  # fmt: skip
    for name, answer in own.items():
        setattr(interfaces.CudaInterface, name, staticmethod(answer))
    interfaces.caching_worker_device_properties["cuda"] = [PROPERTIES]
    interfaces.caching_worker_current_devices["cuda"] = 0
    interfaces.device_interfaces.setdefault("cuda", interfaces.CudaInterface)
    interfaces.device_interfaces.setdefault("cuda:0", interfaces.CudaInterface)
    for name in NAMES["torch.utils._triton"]:
        getattr(importlib.import_module("torch.utils._triton"), name).cache_clear()


def _as_driver_of_triton() -> None:
    triton: Any = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(
        "cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32
    )
    limits = {"max_shared_mem": PROPERTIES.shared_memory_per_block_optin, "multiprocessor_count": 132, "warpSize": 32}
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=_always(target),
            get_current_device=_always(0),
            get_device_interface=_always(torch.cuda),
            get_active_torch_device=_always(torch.device("cuda:0")),
            get_benchmarker=_always(None),
            is_active=_always(True),
            utils=types.SimpleNamespace(get_device_properties=_always(limits)),
        )
    )


class _OnTheCpu(TorchDispatchMode):
    """Makes what would be made on the GPU on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return func(*pytree.tree_map(moved, args), **pytree.tree_map(moved, kwargs or {}))


def _constants_on_the_cpu() -> None:
    """Let Inductor fold constants with values, which fake tensors do not have."""
    folder: Any = importlib.import_module("torch._inductor.fx_passes.joint_graph").UniformValueConstantFolder
    deduce = folder._deduce_value

    @functools.wraps(deduce)
    def deduced(self: Any, node: Any) -> Any:
        with _OnTheCpu():  # type: ignore[no-untyped-call]
            return deduce(self, node)

    folder._deduce_value = deduced


def _attention_of_a_gpu() -> None:
    """Let attention choose the kernels that it has on an H100, by dtype and mask."""
    kernels: Any = vars(operators)["Library"]("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        kernels.impl("scaled_dot_product_attention", _attention, "AutogradCUDA", allow_override=True)
    _kernels.append(kernels)


_kernels: list[Any] = []  # what is registered goes with it


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    aten = torch.ops.aten
    if enable_gqa:
        heads = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
    out: Tensor
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -float("inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(-2))
    sums = torch.is_grad_enabled() and query.requires_grad
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, sums, dropout_p, is_causal, scale=scale
    )[0]
    return out
