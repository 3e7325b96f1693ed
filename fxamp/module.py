"""`ConvertedModule`: the rewritten graph over the user's own parameters and buffers.

The converted module has the module tree of the original, with the very same parameter and buffer dictionaries in it
and nothing else: training it trains the original, `state_dict` keys are the same, moving it moves the original.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from passes.errors import CaptureError
from passes.plan import Plan

from .bindings import called_directly, read_directly
from .call import CallSpec
from .in_place import called_by_name
from .serialize import graph_from_data, graph_to_data
from .underflow import UnderflowWatch

_CONSTANTS = "_fxamp"  # child module for lifted constants and sub-graphs; never in the state_dict
_TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training")
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Containers(CodeGen):
    """Lets what interprets the graph, as `torch.export` does, give and get the original's containers."""

    def __init__(self, call_spec: CallSpec) -> None:
        super().__init__()
        self.call_spec = call_spec

    def process_inputs(self, *args: Any) -> Any:
        """Return the flat inputs of a call."""
        return self.call_spec.bind(args, {})

    def process_outputs(self, outputs: Any) -> Any:
        """Return what the model returns."""
        return self.call_spec.pack(outputs)


class ConvertedModule(GraphModule):
    """A model in mixed precision: a `torch.fx.GraphModule` that is called like the original.

    Attributes:
        plan: what was decided, node by node.
        call_spec: how arguments bind to the graph.
        device_type: whose autocast is disabled round the graph.
        only_mode: None for a graph that serves both training modes, else the flags that it was captured with, by path.
        uncopied: why it cannot be copied now, "" when it can.
        only_grad: the grad mode that the graph holds for, by training flag, where the model asks for the grad mode.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        plan: Plan,
        call_spec: CallSpec,
        device_type: str = "cpu",
        only_mode: dict[str, bool] | None = None,
        original: str = "the original model",
        only_grad: dict[bool, bool] | None = None,
    ) -> None:
        graph.set_codegen(Containers(call_spec))
        super().__init__(root, graph, class_name="ConvertedModule")
        for key in _TREE:
            self.__dict__[key] = root.__dict__[key]
        self.plan = plan
        self.call_spec = call_spec
        self.device_type = device_type
        self.only_mode = only_mode
        self.original = original
        self.uncopied = ""
        self.only_grad = only_grad or {}
        self._guards = call_spec.guard_function()
        self._watch = UnderflowWatch(plan)

    def recompile(self) -> Any:
        """Regenerate the code from the graph, keeping the original's call signature."""
        with called_directly(self.graph), called_by_name(self.graph), read_directly(self.graph):
            code = super().recompile()
        cls: Any = type(self)  # of this instance alone
        cls.graph_forward, cls.forward = cls.forward, ConvertedModule._forward
        cls.__call__ = nn.Module.__call__  # fx's own catches errors, to print lines of the code to stderr
        return code

    @property
    def code(self) -> str:
        """The code of the graph, which runs by itself; a call takes the same by fewer detours (`bindings.py`)."""
        return self.graph.python_code("self").src

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.only_mode is not None:
            self._refuse_flags(self.only_mode)
        if self.only_grad:
            self._refuse_grad_mode(self.only_grad)
        flat = self.call_spec.bind(args, kwargs)
        if self._guards is not None:
            holds = self._guards(*flat)
            if False in holds:
                self.call_spec.refuse_sizes(holds, flat)
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.device_type)
        try:
            if autocast:
                with torch.autocast(self.device_type, enabled=False):
                    out = self.graph_forward(*flat)
            else:
                out = self.graph_forward(*flat)
        finally:  # an error inside a grad-mode or autocast region of the graph
            if torch.is_grad_enabled() is not grad:
                torch.set_grad_enabled(grad)
            if torch.is_autocast_enabled(self.device_type) is not autocast:
                torch.set_autocast_enabled(self.device_type, autocast)
        if self.training:
            self._watch(out)
        return self.call_spec.pack(out)

    def _refuse_flags(self, captured: dict[str, bool]) -> None:
        """Raise CaptureError when a module is in another mode than the one the graph was captured in."""
        for path, flag in captured.items():
            if self.get_submodule(path).training is not flag:
                here = f"'{path}'" if path else "it"
                raise CaptureError(
                    f"{self.original} was captured while {here} had training={flag}; its graph holds for that alone "
                    f"({'; '.join(self.plan.notes)}). Convert it again in the mode wanted; both "
                    "conversions share the parameters."
                )

    def _refuse_grad_mode(self, captured: dict[bool, bool]) -> None:
        """Raise CaptureError in another grad mode than the one the graph was captured in."""
        mode = captured.get(self.training)
        if mode not in (None, torch.is_grad_enabled()):
            raise CaptureError(
                f"{self.original} was captured while torch.is_grad_enabled() was {mode}, which it asks for; its graph "
                f"holds for that alone ({'; '.join(self.plan.notes)}). Convert it again in the grad mode wanted, which "
                "shares the parameters, or use fxamp.compile(model)."
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original", "the original model")
            raise AttributeError(
                f"'ConvertedModule' has no attribute '{name}'. Ahead of time fxamp keeps the parameters, buffers and "
                f"forward of {original}, not its other attributes and methods: read '{name}' from the original, "
                "which shares its parameters."
            ) from None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the parameters, as every `nn.Module` does; warn when that takes FP32 from them."""
        before = {name: p.dtype for name, p in self.named_parameters()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, p in self.named_parameters():
            if p.dtype not in (before[name], torch.float32):
                warnings.warn(
                    f"'{name}' of a converted {self.original} was {before[name]} and is {p.dtype} now, and so is what "
                    "shares it. The graph casts parameters itself, from the dtype they had when it was made, and "
                    "training needs them in FP32. Leave that call out, or make it before fxamp.convert.",
                    stacklevel=3,
                )
                break
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        self._refuse_copies()
        tree = nn.Module()
        for key in _TREE:
            tree.__dict__[key] = copy.deepcopy(self.__dict__[key], memo)
        new = self._rebuild(tree, graph_from_data(graph_to_data(self.graph)))
        memo[id(self)] = new
        for key in _HOOKS:
            new.__dict__[key] = copy.deepcopy(self.__dict__[key], memo)
        return new

    def __reduce__(self) -> Any:
        self._refuse_copies()
        tree = {key: self.__dict__[key] for key in _TREE}
        state = (self.plan.to_json(), self.call_spec, self.device_type, self.only_mode, self.original, self.only_grad)
        return _load, (tree, graph_to_data(self.graph), state)

    def __copy__(self) -> ConvertedModule:
        self._refuse_copies()
        tree = nn.Module()
        for key in _TREE:
            tree.__dict__[key] = copy.copy(self.__dict__[key])
        return self._rebuild(tree, graph_from_data(graph_to_data(self.graph)))

    def _refuse_copies(self) -> None:
        if self.uncopied:
            raise CaptureError(f"this module cannot be copied: {self.uncopied}.")

    def _rebuild(self, tree: nn.Module, graph: Graph) -> ConvertedModule:
        state = self.device_type, self.only_mode, self.original, self.only_grad
        return ConvertedModule(tree, graph, self.plan, self.call_spec, *state)


def _load(tree: dict[str, Any], graph: list[Any], state: tuple[Any, ...]) -> ConvertedModule:
    root = nn.Module()
    root.__dict__.update(tree)
    plan, *rest = state
    return ConvertedModule(root, graph_from_data(graph), Plan.from_json(plan), *rest)


def skeleton(model: nn.Module, opaque: dict[str, nn.Module], constants: dict[str, Any]) -> nn.Module:
    """Return a tree of empty modules that shares the model's parameter and buffer dictionaries.

    Opaque leaves keep their class, to run, and layers of torch.nn theirs, to be found by isinstance(); each has a
    training flag, hooks and children of its own. Constants go under a child that is never saved in a state_dict.
    """
    new: dict[int, nn.Module] = {}

    def copy_structure(module: nn.Module, keep: bool) -> nn.Module:
        if id(module) in new:
            return new[id(module)]
        empty = nn.Module()
        if keep:
            empty.__class__ = type(module)
            empty.__dict__.update({k: v for k, v in module.__dict__.items() if k not in empty.__dict__})
        for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", *_STATE_HOOKS):
            empty.__dict__[key] = module.__dict__[key]
        empty.training = module.training
        new[id(module)] = empty
        for name, child in module._modules.items():
            runs = keep and id(module) in running
            if runs and child is not None:
                running.add(id(child))
            empty._modules[name] = None if child is None else copy_structure(child, runs or _is_library_leaf(child))
        return empty

    running = {id(m) for m in opaque.values()}
    for leaf in opaque.values():
        copy_structure(leaf, True)
    root = copy_structure(model, False)
    if constants:
        child = nn.Module()
        for name, value in constants.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                child.register_buffer(name, value, persistent=False)
            else:
                setattr(child, name, value)
        root._modules[_CONSTANTS] = child
    return root


def _is_library_leaf(module: nn.Module) -> bool:
    """Say whether this is a layer of torch.nn, whose class says how it loads old checkpoints and what it is."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def constant_target(name: str) -> str:
    """Return the get_attr target of a lifted constant."""
    return f"{_CONSTANTS}.{name}"
