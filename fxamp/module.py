"""`ConvertedModule`: the rewritten graph over the user's own parameters and buffers.

The converted module has the module tree of the original, with the very same parameter and buffer dictionaries in it
and nothing else: training it trains the original, `state_dict` keys are the same, moving it moves the original.
"""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from passes.errors import CaptureError
from passes.plan import Plan

from .call import CallSpec
from .serialize import graph_from_data, graph_to_data

_CONSTANTS = "_fxamp"  # child module for lifted constants and sub-graphs; never in the state_dict
_TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ConvertedModule(GraphModule):
    """A model in mixed precision: a `torch.fx.GraphModule` that is called like the original.

    Attributes:
        plan: what was decided, node by node.
        call_spec: how arguments bind to the graph.
        device_type: whose autocast is disabled round the graph.
        only_mode: None, or the one training mode (True: train) that could be captured.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        plan: Plan,
        call_spec: CallSpec,
        device_type: str = "cpu",
        only_mode: bool | None = None,
        original: str = "the original model",
    ) -> None:
        self.__dict__["_ready"] = False
        super().__init__(root, graph, class_name="ConvertedModule")
        for key in _TREE:
            self.__dict__[key] = root.__dict__[key]
        self.plan = plan
        self.call_spec = call_spec
        self.device_type = device_type
        self.only_mode = only_mode
        self.original = original
        self._scaling_checked = plan.policy.dtype is not torch.float16 or plan.policy.level == "O0"

    def recompile(self) -> Any:
        """Regenerate the code from the graph, keeping the original's call signature."""
        code = super().recompile()
        cls = type(self)
        cls.graph_forward = cls.forward  # type: ignore[attr-defined]
        cls.forward = ConvertedModule._forward  # type: ignore[assignment]
        return code

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.only_mode is not None and self.training is not self.only_mode:
            raise CaptureError(
                f"{self.original} was captured in {'train' if self.only_mode else 'eval'} mode only "
                f"({'; '.join(self.plan.notes) or 'its graph differs between the modes'}). Convert it again in the other "
                "mode, or use fxamp.compile, which keeps a graph for each."
            )
        flat = self.call_spec.bind(args, kwargs)
        grad = torch.is_grad_enabled()
        try:
            if torch.is_autocast_enabled(self.device_type):
                with torch.autocast(self.device_type, enabled=False):
                    out = self.graph_forward(*flat)
            else:
                out = self.graph_forward(*flat)
        finally:
            if torch.is_grad_enabled() is not grad:  # an error inside a grad-mode region of the graph
                torch.set_grad_enabled(grad)
        if not self._scaling_checked and self.training and not torch.compiler.is_compiling():
            self._watch_scaling(out)
        return self.call_spec.pack(out)

    def _watch_scaling(self, outputs: tuple[Any, ...]) -> None:
        """Warn once when FP16 gradients flow back and no GradScaler has scaled a loss."""

        def check(grad: torch.Tensor) -> None:
            if self._scaling_checked:
                return
            self._scaling_checked = True
            if not any(issubclass(type(o), torch.amp.GradScaler) and o._scale is not None for o in gc.get_objects()):
                warnings.warn(
                    "FP16 gradients without a loss scale underflow silently: scale the loss with fxamp.LossScaler or "
                    "torch.amp.GradScaler, or train with fxamp.TrainStep, which does.",
                    stacklevel=2,
                )

        for out in outputs:
            if isinstance(out, torch.Tensor) and out.requires_grad and not out.is_leaf:
                out.register_hook(check)
                return

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original", "the original model")
            raise AttributeError(
                f"'ConvertedModule' has no attribute '{name}'. Ahead of time fxamp keeps the parameters, buffers and forward "
                f"of {original}, not its other attributes and methods: read '{name}' from the original, or convert in "
                'place with model.compile(backend="fxamp").'
            ) from None

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        tree = nn.Module()
        for key in _TREE:
            tree.__dict__[key] = copy.deepcopy(self.__dict__[key], memo)
        new = self._rebuild(tree, graph_from_data(graph_to_data(self.graph)))
        memo[id(self)] = new
        for key in _HOOKS:
            new.__dict__[key] = copy.deepcopy(self.__dict__[key], memo)
        return new

    def __reduce__(self) -> Any:
        tree = {key: self.__dict__[key] for key in _TREE}
        state = (self.plan.to_json(), self.call_spec, self.device_type, self.only_mode, self.original)
        return _load, (tree, graph_to_data(self.graph), state)

    def __copy__(self) -> ConvertedModule:
        tree = nn.Module()
        for key in _TREE:
            tree.__dict__[key] = copy.copy(self.__dict__[key])
        return self._rebuild(tree, graph_from_data(graph_to_data(self.graph)))

    def _rebuild(self, tree: nn.Module, graph: Graph) -> ConvertedModule:
        return ConvertedModule(
            tree, graph, self.plan, self.call_spec, self.device_type, self.only_mode, self.original
        )


def _load(tree: dict[str, Any], graph: list[Any], state: tuple[Any, ...]) -> ConvertedModule:
    root = nn.Module()
    root.__dict__.update(tree)
    plan, *rest = state
    return ConvertedModule(root, graph_from_data(graph), Plan.from_json(plan), *rest)


def skeleton(model: nn.Module, opaque: dict[str, nn.Module], constants: dict[str, Any]) -> nn.Module:
    """Return a tree of empty modules that shares the model's parameter and buffer dictionaries.

    Opaque leaves are the original's own modules; constants go under a child that is never saved in a state_dict.
    """
    new: dict[int, nn.Module] = {}

    def copy_structure(module: nn.Module, path: str) -> nn.Module:
        if path in opaque:
            return opaque[path]
        if id(module) not in new:
            empty = nn.Module()
            empty.__dict__["_parameters"] = module._parameters
            empty.__dict__["_buffers"] = module._buffers
            empty.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set
            empty.training = module.training
            new[id(module)] = empty
            for name, child in module._modules.items():
                empty._modules[name] = None if child is None else copy_structure(child, f"{path}.{name}".lstrip("."))
        return new[id(module)]

    root = copy_structure(model, "")
    if constants:
        child = nn.Module()
        for name, value in constants.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                child.register_buffer(name, value, persistent=False)
            else:
                setattr(child, name, value)
        root._modules[_CONSTANTS] = child
    return root


def constant_target(name: str) -> str:
    """Return the get_attr target of a lifted constant."""
    return f"{_CONSTANTS}.{name}"
