"""The private names of torch that the product alone uses, in one place; the compiler's are in `passes/_torch.py`.

Each is used by PyTorch's own documentation or by its downstream projects, and each is tested against the oldest and the
newest supported torch: what Dynamo, Inductor and autograd do beside their public settings, global hooks, and the
settings of replicas and shards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._logging._internal import trace_structured
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from passes._torch import VF, FakeTensor, FakeTensorMode, OpOverload, pytree

pop_mode, push_mode = torch.utils._python_dispatch._pop_mode, torch.utils._python_dispatch._push_mode
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
flat_by = torch.fx._pytree.tree_flatten_spec  # `Graph.process_inputs` takes no keyword arguments
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # inside a backward: another one may run through it
add_together = torch._foreach_add_  # adds tensors to others in place
copy_together = torch._foreach_copy_  # copies many tensors, on an accelerator by one launch; the dtypes may differ
current_autograd_node = torch._C._current_autograd_node  # that is running in this thread; None outside of backward
current_backward = torch._C._current_graph_task_id  # the number of the backward that is running, -1 outside of all
sequence_number = torch._C._autograd._get_sequence_nr  # that autograd will give to the next op that this thread records
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # whether a transform of `torch.func` wraps a tensor
python_kernels = enable_python_dispatcher  # inside it composites run by the kernels that torch has in Python
without_modes = _disable_current_modes  # inside a trace too tensors are then real, and nothing is recorded
is_traced_by_fx = torch.fx._symbolic_trace.is_fx_symbolic_tracing  # whether `torch.fx.symbolic_trace` is running
is_traced_by_jit: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # whether `torch.jit.trace` is running
ArchiveReader = torch._C.PyTorchFileReader  # reads what `torch.save` writes, by which `torch.load` reads it too
safe_softmax = torch.ops.aten._safe_softmax.default  # 0, as in attention, for a row of -inf; `torch.softmax` gives NaN
MODULE_CALLS = (torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__)

# A function compiled with these has a cache of its own, also below a graph break, where Dynamo compiles the code of
# submodules, which all instances of a class share. (torch 2.13)
_COMPILE = inspect.signature(torch.compile).parameters
OWN_CACHE: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _COMPILE else {}

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip
_MARKED = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # what `maybe_mark_dynamic` writes on a tensor


@functools.cache
def answer_whether_exporting() -> None:
    """Let Dynamo answer `torch.compiler.is_exporting`: before torch 2.13 it says yes, and models leave eager's way."""
    if not OWN_CACHE:
        dynamo: Any = torch._dynamo.variables.torch
        known, exporting = dynamo.tracing_state_functions(), torch.compiler.is_exporting
        dynamo.tracing_state_functions = lambda: {**known, exporting: exporting()}


def codes_in_trace() -> list[CodeType]:
    """Return the code objects that Dynamo has traced for the graph that it gives to a backend now."""
    return torch._guards.TracingContext.get().traced_code


def code_being_captured() -> CodeType:
    """Return the code object of the frame that Dynamo captures; below a graph break it is not that of the function."""
    return codes_in_trace()[0]


def forget_compiled(code: CodeType, backend: Callable[..., Any] | None = None) -> None:
    """Drop what Dynamo compiled by one backend, or by all, for a code object; torch keeps it as long as the process.

    What others compiled for the code stays, of the user's too: it is shared by all models of a class.
    """
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    others = [e for e in entries if e.backend is not backend and e.guard_manager.extra_state is not None]
    if backend is None or not others:
        torch._dynamo.eval_frame.remove_from_cache(code)
        return
    for entry in entries:
        manager = entry.guard_manager
        if entry.backend is backend and manager.extra_state is not None:
            gone = torch._dynamo.guards.DeletedGuardManagerWrapper("fxamp has forgotten it")
            manager.extra_state.invalidate(entry, gone)


_gone: list[tuple[Iterable[CodeType], Callable[..., Any]]] = []  # what `forget_later` was given


def forget_later(codes: Iterable[CodeType], backend: Callable[..., Any]) -> None:
    """Note what is to be forgotten by `forget_the_gone`.

    A finalizer runs anywhere, also while Dynamo compiles the code or checks its guards: it reads in C, afterwards, what
    `forget_compiled` frees.
    """
    _gone.append((codes, backend))


def forget_the_gone() -> None:
    """Forget what `forget_later` was given, unless Dynamo compiles something now, in this thread or in another."""
    lock = torch._dynamo.convert_frame.compile_lock
    if not _gone or torch._guards.CompileContext.try_get() is not None or not lock.acquire(blocking=False):
        return
    try:
        while _gone:
            codes, backend = _gone.pop()
            for code in codes:
                forget_compiled(code, backend)
    finally:
        lock.release()


def dynamo_stance() -> str:
    """Return the stance that `torch.compiler.set_stance` has set: "default", "force_eager" and others."""
    return str(torch._dynamo.eval_frame._stance.stance)


_registered = itertools.count()
_seen: list[int] = []


@functools.cache
def _count_registrations() -> None:
    def registered(module: Any, name: str, value: Any) -> None:
        if torch.compiler.is_compiling():
            return  # or Dynamo would guard the count, which a forward that registers the same again changes each time
        _seen[:] = [next(_registered)]

    torch.nn.modules.module.register_module_module_registration_hook(registered)
    torch.nn.modules.module.register_module_parameter_registration_hook(registered)


def registrations() -> int:
    """Return a number that changes where a module or a parameter is registered anywhere; counting begins here."""
    _count_registrations()
    return _seen[0] if _seen else -1


def number_of_hooks() -> int:
    """Return a number that grows with every hook that is registered anywhere, on modules and on tensors."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def mark_static_address(tensor: torch.Tensor) -> None:
    """Promise compilers that a tensor keeps its address, so that CUDA graphs neither copy it nor record anew."""
    torch._dynamo.mark_static_address(tensor)


def is_profiling() -> bool:
    """Say whether a profiler of torch is on; `record_function` costs some microseconds also where none is."""
    return torch.autograd.profiler._is_profiler_enabled


def global_optimizer_hooks(besides: Callable[..., Any]) -> bool:
    """Say whether there are hooks on the steps of all optimizers, besides partial calls of a function."""
    module: Any = importlib.import_module("torch.optim.optimizer")
    hooks = (*module._global_optimizer_pre_hooks.values(), *module._global_optimizer_post_hooks.values())
    return any(getattr(hook, "func", None) is not besides for hook in hooks)


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Say whether somebody looks at the gradient of a parameter when it arrives."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def norms_of(tensors: list[torch.Tensor], order: float = 2) -> list[torch.Tensor]:
    """Return the norm of each of some tensors, in FP32 of 16-bit ones, on an accelerator by few launches."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return list(torch._foreach_norm(tensors, order, dtype=dtype)) if tensors else []


@contextlib.contextmanager
def traced_by(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield fake tensors of fixed sizes for some tensors; inside, Inductor finds their mode, to cache what it makes."""
    mode = torch._guards.detect_fake_mode(tensors)
    fakes = list(tensors)
    if mode is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        yield fakes


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true, so that an optimizer's step takes the path that is traced."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def of_fixed_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for a further input of a graph that Dynamo captures: a compiler takes no size of it as dynamic.

    It is a fake tensor of the capture that is under way; outside of all captures it is the tensor itself.
    """
    context: Any = torch._guards.TracingContext.try_get()
    mode = context and context.fake_mode
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


def mark_batch(tensor: torch.Tensor) -> bool:
    """Let Dynamo take dimension 0 for dynamic, unless the code fixes it; say whether it was not marked already."""
    if _MARKED[0] in tensor.__dict__:
        return False
    tensor.__dict__.update({_MARKED[0]: {0}, _MARKED[1]: True})  # `maybe_mark_dynamic` takes microseconds more
    return True


def unmark_batch(tensor: torch.Tensor) -> None:
    """Take back what `mark_batch` did; Dynamo's guards hold the set of dimensions, which stays as it is."""
    for name in _MARKED:
        tensor.__dict__.pop(name, None)


def dynamo_is_disabled() -> bool:
    """Say whether Dynamo's configuration disables it."""
    return bool(torch._dynamo.config.disable)


def dynamo_settings(change: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Dynamo has other settings, in this thread."""
    return torch._dynamo.config.patch(change)  # type: ignore[no-any-return]


def is_replica_running() -> bool:
    """Say whether a DistributedDataParallel is being called; torch then splits graphs for it."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are on, the outermost first."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def ignores_compilers(mode: TorchDispatchMode) -> bool:
    """Say whether Dynamo captures and runs graphs under a dispatch mode; under others it steps aside."""
    return bool(mode.ignore_compile_internals())


def sequence_of(node: Any) -> int:
    """Return the number that autograd recorded a node of its graph with."""
    return int(node._sequence_nr())


def is_module_tracker(hook: object) -> bool:
    """Say whether a global hook is that of `FlopCounterMode`, which names the module that is running."""
    return getattr(hook, "__module__", "") == "torch.utils.module_tracker"


@contextlib.contextmanager
def without_module_trackers() -> Iterator[None]:
    """Take off the global hooks of `FlopCounterMode`'s module tracker, at which Dynamo would break."""
    tables = [getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS[:2]]
    before = [table.copy() for table in tables]
    for table in tables:
        for key in [k for k, hook in table.items() if is_module_tracker(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put JSON into the structured trace of the present compilation, which `tlparse` shows; made if there is one."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=text)


_PLAIN = {torch.Tensor, nn.Parameter, FakeTensor}
_fake_kernel: ContextVar[Callable[..., Any] | None] = ContextVar("fake kernel", default=None)


@contextlib.contextmanager
def fakes_by(kernel: Callable[..., Any], composites: tuple[OpOverload, ...]) -> Iterator[None]:
    """Inside this context, have fake tensors run composites by a kernel that gives what their decomposition gives.

    It is called with the decomposition and the arguments. A trace of what the composite calls, as a compiler makes it,
    still sees all of that: only where no dispatch mode looks on does the kernel run. Torch registers the sizes and
    dtypes of no composite, and runs its Python kernel under the Python dispatcher, which is on while Dynamo traces.
    """
    for op in composites:
        _prepare_for_fakes(op)
    token = _fake_kernel.set(kernel)
    try:
        yield
    finally:
        _fake_kernel.reset(token)


@functools.cache
def _prepare_for_fakes(op: OpOverload) -> None:
    importlib.import_module("torch._decomp.decompositions")  # it registers the kernels in Python

    def chosen(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel, modes = _fake_kernel.get(), dispatch_modes()
        kinds = {type(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fake = bool(modes) and all(isinstance(mode, FakeTensorMode) for mode in modes) and kinds <= _PLAIN
        return whole(*args, **kwargs) if kernel is None or not fake else kernel(whole, *args, **kwargs)

    op.py_kernels.update({key: functools.partial(chosen, whole) for key, whole in op.py_kernels.items()})
    op._dispatch_cache.clear()


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id that is equal for tensors in one storage, also fake ones; a tensor without a storage has its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # of a wrapper, as those of torch.func are
        return id(tensor)


def let_go_of_inputs(fakes: Iterable[object]) -> None:
    """Have the mode of some fake tensors forget, by weak references, which tensors it has made fakes of.

    A graph keeps its fakes, and torch swaps no tensor (`swap_tensors`) to which anybody has a weak reference.
    """
    for mode in {fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)}:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def copied_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that shares its memory until one of the two is written, through `.data` too."""
    return tensor._lazy_clone()


def is_spread(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a DTensor, without an import that some builds of torch lack."""
    return hasattr(tensor, "device_mesh")


def is_sharded(module: object) -> bool:
    """Say whether FSDP2 gathers the parameters of a module for its calls: it changes the class of what it shards."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_gathered(module: torch.nn.Module) -> bool:
    """Say whether FSDP, the first or the second, puts other memory under the parameters of a module for its calls."""
    return bool(vars(module).get("_is_fsdp_managed_module"))


def leave_padding_to_python() -> None:
    """Let Dynamo leave `pad_packed_sequence` to Python; before torch 2.13 it raises, as the kernel reads lengths."""
    if torch.__version__ < "2.13":
        torch._dynamo.disallow_in_graph(VF._pad_packed_sequence)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a fake that the trace in progress has made of another, and not what a program runs on."""
    context = torch._guards.TracingContext.try_get()
    return isinstance(tensor, FakeTensor) and context is not None and tensor.fake_mode is context.fake_mode


def dynamo_errors() -> Any:
    """Return the module of Dynamo's errors; Dynamo is loaded only now."""
    return torch._dynamo.exc


def original_of(module: object) -> torch.nn.Module | None:
    """Return the module that `torch.compile` has wrapped in this one; None for anything else."""
    return module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else None


def compiled_call(module: torch.nn.Module) -> Any:
    """Return what `module.compile()` put in the place of the call of a module; None if it was not called."""
    return module._compiled_call_impl


def wrap_compiled_call(module: torch.nn.Module, wrap: Callable[[Any, Callable[..., Any]], Any]) -> None:
    """Put something around what `torch.compile` runs in the place of a module's call.

    `wrap` makes it of that, and of what runs the module as it is written; `module` is the one that was compiled in
    place, or what `torch.compile` returned.
    """
    original = original_of(module)
    name = "_compiled_call_impl" if original is None else "forward"
    plain = module._call_impl if original is None else original.__call__
    vars(module)[name] = wrap(getattr(module, name), plain)


def own_parameters(module: torch.nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module itself by name; the public way to them takes microseconds."""
    return module._parameters


def codegen_of(graph: torch.fx.Graph) -> Any:
    """Return what makes a graph's code, which flattens the containers of inputs and outputs; torch only sets it."""
    return graph._codegen


def global_module_hooks() -> list[Any]:
    """Return the hooks that run for every module (`torch.nn.modules.module.register_module_*_hook`)."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(torch.nn.modules.module, name).values()]


def is_number_input(placeholder: Node) -> bool:
    """Say whether Dynamo made an input of a Python number; its graph gets that as a tensor of no dimension."""
    argument = placeholder.meta.get("grapharg")
    return bool(getattr(argument, "pass_arg_as_tensor", False))


def inner_backend(backend: Any, mode: str | None, options: dict[str, Any]) -> Any:
    """Return a torch.compile backend, given by name or as a callable, with its mode and options bound to it.

    `torch.compile` wraps its own `backend` argument in the same two classes.
    """
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)
    return torch._TorchCompileWrapper(backend, mode, options, None)


@dataclass(frozen=True)
class Kernel:
    """What Inductor has scheduled for one buffer.

    Attributes:
        made_from: the name of the node of the compiled graph whose value the buffer holds, "" for none or part of one.
        op: the op that Inductor lowered, such as "addmm".
        stored: the dtype of the buffer.
        loaded: the dtypes of the buffers that are read.
        extern: a kernel of a library computes it, as that of a product.
    """

    made_from: str
    op: str
    stored: torch.dtype
    loaded: tuple[torch.dtype, ...]
    extern: bool


def recorded_by_inductor(record: Callable[[bool, list[Kernel]], None]) -> dict[str, Any]:
    """Return options under which Inductor compiles without its caches, and records what it has scheduled.

    It tells for each graph that it compiles whether that is a backward, and what it consists of.
    """

    def look(scheduled: list[Any]) -> list[Any]:
        graph: Any = torch._inductor.virtualized.V.graph
        last: dict[str, Node] = {}  # the node that gives the value of one that was decomposed
        for node in graph.module.graph.nodes:
            beside = node.target is operator.getitem and node.args[1] != 0  # a pool's places, attention's statistics
            if isinstance(node.meta.get("val"), torch.Tensor) and not _gives_alias(node) and not beside:
                last[_made_from(node)] = node
        parts = [part for whole in scheduled for part in whole.get_nodes() if part.node is not None]
        record(bool(graph.is_backward), [k for part in parts if (k := _kernel(part, graph, last)) is not None])
        return scheduled

    return {"_post_fusion_custom_pass": look}  # a function, about which the caches know nothing, so they step aside


def _gives_alias(node: Node) -> bool:
    """Say whether a node gives another shape of its operand, as the one behind the product of a linear layer."""
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else []
    return any(r.alias_info is not None for r in returns)


def _made_from(node: Node) -> str:
    sources = node.meta.get("from_node") or ()
    return str(sources[0].name) if sources else ""


def _kernel(part: Any, graph: Any, last: dict[str, Node]) -> Kernel | None:
    buffer = part.node
    origin, stored = buffer.get_origin_node(), buffer.maybe_get_dtype()
    if stored is None:
        return None
    loaded = tuple(d for read in part.read_writes.reads if (d := _dtype_of_buffer(graph, read.name)) is not None)
    name = "" if origin is None else _made_from(origin)
    op = str(getattr(origin, "target", "")).removeprefix("aten.").partition(".")[0]
    return Kernel(name if last.get(name) is origin else "", op, stored, loaded, part.is_extern())


def _dtype_of_buffer(graph: Any, name: str) -> torch.dtype | None:
    """Return the dtype of a buffer; None for that of several results, each of which has a buffer of its own."""
    try:
        found: torch.dtype = graph.get_dtype(name)
    except NotImplementedError:
        return None
    return found


def without_transforms(value: Any) -> Any:
    """Replace a fake tensor wrapped by torch.func, as by vmap, by a plain one of the sizes visible inside it."""
    if not isinstance(value, torch.Tensor) or not is_transformed(value):
        return value
    inside = value
    while is_transformed(inside):
        inside = torch._C._functorch.get_unwrapped(inside)
    if not isinstance(inside, FakeTensor):
        return value
    with inside.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def run_as_soon_as_ready(value: torch.Tensor) -> None:
    """Let backward pass through the node that made a value as soon as its gradient is complete.

    Of the nodes that are ready, autograd's engine runs the one made last. A node that several forwards use is older
    than all others, so it would run after them, when its gradient is no longer in the cache.
    """
    set_number = getattr(value.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(2**64 - 1)


def kept_by_compiled(outputs: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return the tensors that a graph compiled by AOTAutograd has saved for backward, of what it has just returned.

    None where it saved none, or where hooks of the user have packed them.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    nodes = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
    compiled: Any = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
    return None if compiled is None else [*compiled.saved_tensors, *getattr(compiled, "_tensors_no_vc_check", ())]


def source_name(placeholder: Node) -> str:
    """Return where Dynamo took an input of a graph from: `L['self']._modules['fc']._parameters['weight']`."""
    argument = placeholder.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in older releases


def compile_records() -> list[Any]:
    """Return Dynamo's records of the last frames that it compiled, or failed to, in this process; oldest first.

    Each has `compile_id`, `co_name`, `recompile_reason`, `fail_reason` and more. `tlparse` shows them.
    """
    return list(torch._dynamo.utils.get_compilation_metrics())


def last_record() -> Any:
    """Return Dynamo's record of the last frame that it compiled, or failed to; None if there is none."""
    return next(reversed(compile_records()), None)


def at_recompile_limit(since: Any = None) -> list[str]:
    """Return name and place of the code that has reached Dynamo's recompile limit since a record was the last one."""
    failed, names = list[Any](), dict[str, str]()
    for record in compile_records():
        if record is since:
            failed.clear()
        elif "recompile limit" in str(record.fail_reason).partition("\n")[0]:
            failed.append(record)
        frame = str(record.compile_id).rpartition("/")[0]  # the record of the failure itself has no name
        if record.co_name:
            names[frame] = f"'{record.co_name}' ({record.co_filename}:{record.co_firstlineno})"
    return list(dict.fromkeys(names.get(str(r.compile_id).rpartition("/")[0], "its code") for r in failed))


def communication_hook(replica: DistributedDataParallel) -> str:
    """Return the name of the hook that replaces the all-reduce of a DistributedDataParallel; "" if there is none.

    A hook that is built into torch appears only in torch's logging data.
    """
    return str(replica._get_ddp_logging_data().get("comm_hook", ""))


def communication_states(replica: DistributedDataParallel) -> list[Any]:
    """Return what the communication hooks of a DistributedDataParallel keep from step to step."""
    return [state for _, state in replica._comm_hooks]


def store_of_ranks() -> Any:
    """Return the store through which the ranks of this job have met: keys and values that each of them can read."""
    return torch.distributed.distributed_c10d._get_default_store()


def reduces_gradients(module: torch.nn.Module) -> bool:
    """Say whether a backward reduces the gradients of a module that FSDP2 shards: `set_requires_gradient_sync`."""
    sharded: Any = module
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return all(group is None or group.reduce_grads for group in groups)


def gathering(module: nn.Module) -> tuple[torch.dtype | None, bool]:
    """Return the dtype in which FSDP2 gathers a sharded module's parameters, and whether it casts the inputs.

    None means the parameters' own dtype. FSDP2 does not publish its MixedPrecisionPolicy.
    """
    sharded: Any = module
    policy = sharded._get_fsdp_state()._mp_policy
    return policy.param_dtype, bool(policy.cast_forward_inputs)
