"""Refuse models of which a front end would silently lose a part. Errors name module, construct, line and way out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx import Proxy

from passes._torch import FunctionContext, function_of, global_module_hooks, is_compiled_in_place, pytree
from passes.contract.errors import INSTEAD, CaptureError, NotFaithfulError

from . import frames
from .patches import replaced
from .reads import HOOKS, label
from .snapshot import is_generator, untouched
from .tensors import held, kept, same

# Methods that training code calls on a module. A converted module has torch.nn.Module's versions of these, while its
# layers have the user's.
_METHODS = {
    "train": "set the training flags of its submodules in your own code",
    "eval": "set the training flags of its submodules in your own code",
    "get_extra_state": "keep that state outside the model",
    "state_dict": "rename the keys in your own code",
    "_save_to_state_dict": "rename the keys in your own code",
}
# Methods that load a state. A state with names that this model does not save is refused when it is loaded.
_LOADERS = dict.fromkeys(("load_state_dict", "_load_from_state_dict"), "convert old files in your own code")
_SWITCHES = ("train", "eval")


def refuse_modules(model: nn.Module, front_end: str) -> None:
    """Raise CaptureError for a wrapper, a hook or an override that a captured graph would not honour."""
    for hook in global_module_hooks():
        _refuse_hook("torch.nn.modules.module", "hook of all modules", label(hook), front_end)
    for path, module in model.named_modules(remove_duplicate=False):
        where = f"module '{path or '(root)'}' ({type(module).__name__})"
        _refuse_wrapper(module, where)
        for attribute, kind in HOOKS.items():
            for hook in getattr(module, attribute).values():
                _refuse_hook(where, kind, label(hook), front_end)
    for method in overridden(type(model)):
        if _loads_itself(model) if method in _LOADERS else method in _SWITCHES and _sets_every_flag(model):
            continue
        raise NotFaithfulError(
            f"module '(root)' ({type(model).__name__}) overrides {method}(), which the converted module would not "
            f"call. {INSTEAD}, or {(_METHODS | _LOADERS)[method]}."
        )


def overridden(kind: type[nn.Module]) -> list[str]:
    """Return the methods called by training code that the user, not a library, has overridden in a class."""

    def author(method: str) -> str:
        return next(base.__module__ for base in kind.__mro__ if method in vars(base))

    methods = (*_METHODS, *_LOADERS)
    return [method for method in methods if not author(method).startswith(("torch.", "transformers."))]


def loads_otherwise(kind: type[nn.Module]) -> bool:
    """Say whether the user has overridden how a model is loaded, for example from files with other names."""
    return any(method in _LOADERS for method in overridden(kind))


def _sets_every_flag(model: nn.Module) -> bool:
    """Say whether `train` and `eval` only set flags, so that the converted module need not call an override."""
    asked = {p: p.requires_grad for p in model.parameters()}
    flags = []
    try:
        with untouched(model) as changed:
            for switch, flag in ((model.train, True), (model.eval, False), (model.train, True)):
                switch()
                flags += [m.training is flag for m in model.modules()]
            same = all(p.requires_grad is grad for p, grad in asked.items())
    except Exception:  # an override that raises does more than set flags
        return False
    finally:
        for p, grad in asked.items():
            p.requires_grad_(grad)
    return same and all(flags) and all(name.rpartition(".")[2] == "training" for name in changed)


def _loads_itself(model: nn.Module) -> bool:
    """Say whether a state that the model saves loads without change: then the override is only for other files."""
    tensors = {**dict(model.named_parameters()), **held(model)}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        with untouched(model), kept(tensors.values()):
            state = model.state_dict()  # its metadata holds the versions that loaders read
            for name, value in state.items():
                state[name] = value.detach().clone()
            model.load_state_dict(state)
            return all(same(tensor.detach(), before[name]) for name, tensor in tensors.items())
    except Exception:  # an override that raises does more than load
        return False


def _refuse_wrapper(module: nn.Module, where: str) -> None:
    _refuse_parallel(module, where)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise CaptureError(
            f"{where} is a parallel wrapper. Convert the module inside it, then wrap what fxamp.convert returns."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{where} is a TorchScript module, whose code is no longer Python. Convert the original model."
        )
    if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
        raise CaptureError(f"{where} has parameters without a shape yet. Call the model once before converting it.")


def refuse_compiled(model: nn.Module) -> None:
    """Raise CaptureError for a model that is compiled already, or that has a module that is."""
    for path, module in model.named_modules():
        where = f"module '{path or '(root)'}' ({type(module).__name__})"
        if hasattr(type(module), "_fxamp_runner"):
            raise CaptureError(
                f"{where} is a view of fxamp, so it runs in mixed precision already. Use it as it is, or convert the "
                "original model."
            )
        # By name: torch._dynamo takes a second to load.
        if type(module).__name__ == "OptimizedModule":
            raise CaptureError(
                f"{where} is what torch.compile returned. Convert the original model, then compile the result."
            )
        if any(base.__name__ == "OptimizedModule" for base in type(module).__mro__):
            raise CaptureError(
                f"{where} is what fxamp.compile returned, so it runs in mixed precision already. Use it as it is, or "
                "convert the original model."
            )
        if is_compiled_in_place(module):
            raise CaptureError(
                f"{where} is compiled in place, by its compile(), so it runs compiled code and not its forward(). "
                "Convert the original model before you compile it, or a copy (copy.deepcopy(model) is not compiled)."
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise CaptureError for a model that is wrapped in DataParallel or sharded already."""
    for path, module in model.named_modules():
        _refuse_parallel(module, f"module '{path or '(root)'}' ({type(module).__name__})")


def _refuse_parallel(module: nn.Module, where: str) -> None:
    if isinstance(module, nn.DataParallel):
        raise CaptureError(
            f"{where} is a parallel wrapper. Convert the module inside it, then wrap what fxamp.convert returns."
        )
    # By name: torch.distributed is not in every build.
    if any(base.__name__ in ("FullyShardedDataParallel", "FSDPModule") for base in type(module).__mro__):
        raise CaptureError(
            f"{where} is sharded already. Convert or compile each block first, then fully_shard it, then the root."
        )


def _refuse_hook(where: str, kind: str, label: str, front_end: str) -> None:
    if label in ("WeightNorm", "SpectralNorm"):
        raise NotFaithfulError(
            f"{where} uses torch.nn.utils's old {label}, a {kind} that recomputes the weight on the module itself; "
            f"capture='{front_end}' would read a stale weight. Use torch.nn.utils.parametrizations instead."
        )
    raise NotFaithfulError(
        f"{where} has a {kind} ({label}), which the graph captured with '{front_end}' would not run. {INSTEAD}, or "
        "remove the hook before converting."
    )


@contextlib.contextmanager
def refuse_constructs(front_end: str) -> Iterator[None]:
    """Raise CaptureError if the model, while it is captured, uses a construct that this front end drops or inlines."""

    def refusing(owner: Any, attribute: str, construct: str | Callable[[Any], str], loss: str) -> Any:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if used_by_model():
                    name = construct if isinstance(construct, str) else construct(args[0])
                    raise NotFaithfulError(
                        f"the model uses {name} at {frames.place()}: capture='{front_end}' {loss}. {INSTEAD}."
                    )
                return original(*args, **kwargs)

            return call

        return replaced(owner, attribute, make)

    inlined, region = "would inline it and lose its", "would drop the region"
    checkpointing = torch.utils.checkpoint
    patches = [
        refusing(checkpointing, "checkpoint", "torch.utils.checkpoint.checkpoint", f"{inlined} recomputation"),
        refusing(torch.autograd.Function, "apply", _function, f"{inlined} backward"),
        refusing(FunctionContext, "__init__", lambda c: _function(function_of(c)), f"{inlined} backward"),
        refusing(
            torch.autograd.graph.saved_tensors_hooks,
            "__init__",
            _saved_tensors,
            "would lose what it does to the tensors saved for backward",
        ),
        refusing(torch.inference_mode, "__enter__", "a torch.inference_mode region", region),
        refusing(torch.Tensor, "register_hook", "Tensor.register_hook", "would drop the hook"),
    ]
    if front_end == "fx":
        patches += [
            refusing(torch.no_grad, "__enter__", "a torch.no_grad region", region),
            refusing(torch.enable_grad, "__enter__", "a torch.enable_grad region", region),
            refusing(torch.set_grad_enabled, "__init__", "torch.set_grad_enabled", region),
            refusing(torch.autocast, "__enter__", "a torch.autocast region", region),
        ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _function(cls: Any) -> str:
    return (
        _CHECKPOINT
        if cls.__module__ == "torch.utils.checkpoint"
        else f"the torch.autograd.Function '{cls.__qualname__}'"
    )


_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


def _saved_tensors(_: Any) -> str:
    frame = frames.caller(("user", "nn", "torch"), 2)
    inside = frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__
    return _CHECKPOINT if inside else "torch.autograd.graph.saved_tensors_hooks"


# Files of torch whose frames act on behalf of a model.
_ON_BEHALF = (
    torch.utils.checkpoint.__file__,
    torch.autograd.graph.__file__,
    torch.cpu.amp.autocast_mode.__file__,
    torch.cuda.amp.autocast_mode.__file__,
)


def used_by_model() -> bool:
    """Say whether a model uses the construct, and not torch's own machinery."""
    frame = frames.caller(("user", "nn", "torch"), 2)
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return frames.kind(file) != "torch" or file in _ON_BEHALF


@contextlib.contextmanager
def grad_mode_reads() -> Iterator[list[str]]:
    """Yield a list of the lines where the program reads the grad mode of its caller, which capture makes a constant.

    A read inside a `no_grad` region of the program always gets the same answer, so it is not listed.
    """
    ambient = torch.is_grad_enabled()
    places: list[str] = []

    def make(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked() -> bool:
            mode: bool = ask()
            asker = frames.caller(("user", "nn", "torch"))
            if mode is ambient and asker is not None and frames.kind(asker.f_code.co_filename) == "user":
                places.append(frames.place())
            return mode

        return asked

    with replaced(torch, "is_grad_enabled", make):
        yield places


def refuse_assigned(changed: Iterable[str], read: Collection[str], front_end: str) -> None:
    """Raise NotFaithfulError when forward() assigned a buffer, or an attribute whose tensor the graph reads."""
    for name in changed:
        plain = name.replace("_buffers.", "")
        if plain != name or name in read:
            raise NotFaithfulError(
                f"forward() assigns '{plain}'; the graph captured with '{front_end}' would not do that. {INSTEAD}, or "
                "write to it in place ('copy_')."
            )


def refuse_lost_state(
    changed: Mapping[str, Any],
    read: Collection[str],
    model: nn.Module,
    front_end: str,
    caches: Callable[[list[str]], Collection[str]],
) -> None:
    """Raise NotFaithfulError if forward() changes state that a graph would not change, and that surely matters.

    These are a random generator; a tensor with a gradient, which a loss may read, unless forward() keeps it to read it
    itself; and a tensor outside of the modules' attributes that forward() may read in its next call.

    Args:
        changed: what `untouched` found.
        read: the names in it that forward() may read.
        model: what was captured.
        front_end: "fx" or "export".
        caches: says which of some names hold what a second call reads and leaves alone.
    """
    modules = {path for path, _ in model.named_modules()}
    graded = [name for name, value in changed.items() if any(map(_may_have_gradient, pytree.tree_leaves(value)))]
    lost = {*graded} - {*(caches([n for n in graded if n in read]) if graded else ())}
    for name, value in changed.items():
        leaves = pytree.tree_leaves(value)
        if any(map(is_generator, leaves)):
            raise NotFaithfulError(
                f"forward() draws numbers from '{name}'; capture='{front_end}' would repeat the numbers of this one "
                f"call. {INSTEAD}, or draw them by torch, as torch.rand(1)."
            )
        if name in lost:
            raise NotFaithfulError(
                f"forward() keeps a tensor with a gradient in '{name}'; the graph captured with '{front_end}' would "
                f"not, and a loss that reads it there would not train. {INSTEAD}, or return the tensor, or detach it."
            )
        outside = name in read and name.partition("[")[0].rpartition(".")[0] not in modules
        if outside and any(issubclass(type(leaf), (torch.Tensor, Proxy)) for leaf in leaves):
            raise NotFaithfulError(
                f"forward() keeps a tensor in '{name}', outside of the modules, and may read it in its next call; the "
                f"graph captured with '{front_end}' would not. {INSTEAD}, or keep it in a buffer."
            )


def _may_have_gradient(leaf: Any) -> bool:
    kind = type(leaf)  # a traced value refuses isinstance()
    if issubclass(kind, Proxy):
        return bool(leaf.node.target != "detach")
    return issubclass(kind, torch.Tensor) and bool(leaf.requires_grad)
