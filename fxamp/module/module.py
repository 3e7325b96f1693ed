"""`ConvertedModule`: the rewritten graph over the user's own parameters and buffers.

The converted module has the module tree of the original, and its modules share the original's parameter and buffer
dictionaries. Training it trains the original, `state_dict` keys are the same, and moving it moves the original.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from passes.contract.errors import CaptureError
from passes.contract.plan import Plan

from ..capture.model.call import CallSpec
from ..capture.model.captured import State
from .baked import Baked
from .bindings import called_directly, read_directly
from .device import DeviceWatch
from .in_place import called_by_name
from .kept import Kept
from .parameters import low_parameters, refuse_low_parameters
from .serialize import graph_from_data, graph_to_data
from .skeleton import CONSTANTS, STATE_HOOKS, TREE, container_of
from .underflow import UnderflowWatch

_HOOKS = frozenset(k for k in nn.Module().__dict__ if "hooks" in k) - {*STATE_HOOKS}
# Attributes of a converted module: `nn.Module` would take one for a child of the same name.
_OURS = frozenset(
    {
        *("graph", "plan", "meta", "variants", "functions", "missing", "device_type", "original", "container"),
        *("uncopied", "call_spec", "shape_env", "_graph", "_code", "_lineno_map", "_prologue_start", "_watch"),
        *("_baked", "_guards", "_by_state", "_chosen", "_kept", "_place", "_low"),
    }
)


class Containers(CodeGen):
    """Converts containers for interpreters of the graph, such as `torch.export`, which pass the original's inputs."""

    def __init__(self, call_spec: CallSpec) -> None:
        super().__init__()
        self.call_spec = call_spec

    def process_inputs(self, *args: Any) -> Any:
        """Return the flat inputs of a call."""
        return self.call_spec.bind(args, {})

    def process_outputs(self, outputs: Any) -> Any:
        """Return what the model returns."""
        return self.call_spec.pack(outputs)


@dataclass(frozen=True)
class Variant:
    """One graph of a converted module.

    Attributes:
        state: the states of the model that it holds for.
        graph: the rewritten graph.
        call_spec: how arguments bind to it.
    """

    state: State
    graph: Graph
    call_spec: CallSpec


class ConvertedModule(GraphModule):
    """A model in mixed precision: a `torch.fx.GraphModule` that is called like the original.

    A model that computes different things in train and eval mode, or with gradients and without, has a graph for each
    state. A call runs the graph of the present state; `.graph` and `.code` show that graph.

    Attributes:
        variants: The graphs.
        functions: The generated code of each graph, by its place in `variants`: a function of this module and the flat
            inputs.
        uncopied: The reason why the module cannot be copied now; "" if it can.

    Example:
        >>> converted[0].weight is model[0].weight, converted.plan.casts
        (True, 6)
        >>> converted.functions.keys(), len(converted.variants), converted.original, converted.device_type
        (dict_keys([0]), 1, 'Sequential', 'cpu')
        >>> len(converted.call_spec.signature().parameters)
        1
        >>> "torch.ops.aten.linear.default" in converted.code
        True
    """

    functions: dict[int, Callable[..., Any]]
    _kept: Kept
    # The grad mode and the training flags that each graph is for; None where one graph serves every state.
    _by_state: list[tuple[bool | None, tuple[tuple[nn.Module, bool], ...]]] | None

    def __init__(
        self, root: nn.Module, variants: Sequence[Variant], kept: Kept, model: nn.Module | None = None
    ) -> None:
        # `GraphModule.__init__` sets its one graph, for which these attributes are needed. It gets an empty root, since
        # it would copy children, and mistake one with the name of an attribute for that attribute.
        self.__dict__.update(variants=list(variants), functions={}, _guards=[], _by_state=None, _chosen=0)
        if model is not None:
            kept = replace(kept, container=container_of(model))
        self.__dict__["_kept"] = kept
        super().__init__(nn.Module(), Graph(), class_name="ConvertedModule")
        for key in TREE:
            self.__dict__[key] = root.__dict__[key]
        for at, variant in enumerate(variants):
            self.put(at, variant.graph)
        if kept.container is not None:
            self._be_indexed()
        self.uncopied = ""
        self._watch = UnderflowWatch(kept.plan)
        self._low = bool(low_parameters(self.named_parameters()))
        self._place = DeviceWatch(kept)
        self._baked = Baked(kept.reads, self, model, kept.original)
        self._chosen: int | None = None
        self._guards = [variant.call_spec.guard_function() for variant in self.variants]
        if any(v.state.flags is not None or v.state.grad is not None for v in self.variants):
            self._by_state = [(v.state.grad, self._flags(v.state)) for v in self.variants]

    @property
    def plan(self) -> Plan:
        """The plan: the decisions on all nodes of all graphs."""
        return self._kept.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._kept = replace(self._kept, plan=plan)

    @property
    def device_type(self) -> str:
        """The device type whose autocast is disabled while the graph runs."""
        return self._kept.device_type

    @property
    def original(self) -> str:
        """The name of the model's class."""
        return self._kept.original

    def _be_indexed(self) -> None:
        """Let this instance, and no other, be indexed like the container of torch.nn that the model is."""

        def reading(name: str) -> Callable[..., Any]:
            def read(self: ConvertedModule, *args: Any) -> Any:
                shell = nn.Module()
                shell.__class__ = self._kept.container or nn.Module
                shell._modules = {k: m for k, m in self._modules.items() if not k.startswith(CONSTANTS)}
                return getattr(shell, name)(*args)

            return read

        for name in ("__len__", "__iter__", "__getitem__", "keys", "values", "items"):
            if hasattr(self._kept.container, name):
                setattr(type(self), name, reading(name))

    def _flags(self, state: State) -> tuple[tuple[nn.Module, bool], ...]:
        return tuple((self.get_submodule(path), flag) for path, flag in (state.flags or {}).items())

    @property
    def _graph(self) -> Graph:
        """The graph of the present state, which `torch.fx.GraphModule` takes for the only one."""
        graph: Graph = self.variants[self._current()].graph
        return graph

    @_graph.setter
    def _graph(self, graph: Graph) -> None:
        at = self._current()
        self.variants[at] = replace(self.variants[at], graph=graph)

    @property
    def call_spec(self) -> CallSpec:
        """How arguments bind to the graph of the present state."""
        spec: CallSpec = self.variants[self._current()].call_spec
        return spec

    @call_spec.setter
    def call_spec(self, spec: CallSpec) -> None:
        at = self._current()
        self.variants[at] = replace(self.variants[at], call_spec=spec)
        self._guards[at] = spec.guard_function()

    def put(self, at: int, graph: Graph) -> None:
        """Replace one of the graphs; it need not be the graph of the present state.

        Example:
            >>> converted.put(0, converted.graph)
        """
        before, self._chosen = self._chosen, at
        try:
            self.graph = graph
        finally:
            self._chosen = before

    def recompile(self) -> Any:
        """Regenerate the code from the graph of the present state, keeping the original's call signature.

        Example:
            >>> _ = converted.recompile()
        """
        graph, at = self.graph, self._current()
        graph.set_codegen(Containers(self.variants[at].call_spec))
        with called_directly(graph), called_by_name(graph), read_directly(graph):
            code = super().recompile()
        cls: Any = type(self)  # fx makes a class for each instance
        self.functions[at], cls.forward = cls.forward, _with_signature(self.variants[at].call_spec)
        cls.__call__ = nn.Module.__call__  # fx's own prints lines of code to stderr when an error passes
        return code

    def graph_forward(self, *flat: Any) -> Any:
        """Run the graph of the present state on flat tensors, without checks of shapes; return flat outputs.

        Example:
            >>> output, = converted.graph_forward(x)
            >>> output.dtype
            torch.float32
        """
        return self.functions[self._current()](self, *flat)

    @property
    def code(self) -> str:
        """The code of the graph. A call runs equivalent but faster code (`bindings.py`)."""
        return self.graph.python_code("self").src

    def only(self, at: int) -> ConvertedModule:
        """Return a module that has only one of the graphs, over the same parameters.

        Example:
            >>> converted.only(0)(x).shape
            torch.Size([3, 4])
        """
        variant = self.variants[at]
        alone = ConvertedModule(self, [variant], Kept(self.plan.part(at), self.device_type, self.original))
        alone._baked = self._baked
        return alone

    def _current(self) -> int:
        """Return the number of the graph for the present state, and the first if there is none."""
        found = self._holding() if self._chosen is None else self._chosen
        return 0 if found is None else found

    def _holding(self) -> int | None:
        if self._by_state is None:
            return 0
        grad = torch.is_grad_enabled()
        for at, (asked, flags) in enumerate(self._by_state):
            if (asked is None or asked is grad) and all(module.training is flag for module, flag in flags):
                return at
        return None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            self._baked.guard()
        else:
            self._baked.check()
        if self._low and self.training:  # it was converted in eval mode
            refuse_low_parameters(self.named_parameters(), True)
        at = 0 if self._by_state is None else self._holding()
        if at is None:
            raise self._refusal()
        flat = self.variants[at].call_spec.bind(args, kwargs)
        self._baked.check_inputs(flat, self.variants[at].call_spec)
        self._place(self, flat)
        guards = self._guards[at]
        if guards is not None:
            holds = guards(*flat)
            if False in holds:
                self.variants[at].call_spec.refuse_sizes(holds, flat)
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.device_type)
        function = self.functions[at]
        try:
            if autocast:
                with torch.autocast(self.device_type, enabled=False):
                    out = function(self, *flat)
            else:
                out = function(self, *flat)
        finally:  # an error inside a grad-mode or autocast region of the graph
            if torch.is_grad_enabled() is not grad:
                torch.set_grad_enabled(grad)
            if torch.is_autocast_enabled(self.device_type) is not autocast:
                torch.set_autocast_enabled(self.device_type, autocast)
        if self.training:
            self._watch(out)
        return self.variants[at].call_spec.pack(out)

    def _refusal(self) -> CaptureError:
        """Return the error for a state that no graph holds for."""
        now, grad = {path: m.training for path, m in self.named_modules()}, torch.is_grad_enabled()
        why = next((why for state, why in self._kept.missing if _allows(state, now, grad)), "")
        if why:
            return CaptureError(
                f"{self.original} could not be captured in the state that it is in now, {State(now, grad)}: {why} Call "
                "it in another state, or use fxamp.compile(model), which captures at the first call."
            )
        held = "; ".join(dict.fromkeys(str(v.state) for v in self.variants))
        odd = next((path for path, flag in now.items() if flag is not self.training), None)
        here = f"'{odd}' has training={now[odd]}" if odd is not None else f"it has training={self.training}"
        return CaptureError(
            f"{self.original} computes different things in different states, and was captured for: {held}. This call "
            f"is in none of these: {here}, gradients {'on' if grad else 'off'}{self._fixed()}. Convert it again in the "
            "state that you want; both conversions share the parameters."
        )

    def _fixed(self) -> str:
        """Return the reason why there is only one state, if the plan gives it."""
        return next((f" ({note})" for note in self.plan.notes if "was fixed when it was exported" in note), "")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, even if a child has the name of one of our attributes."""
        if name in _OURS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by its path, also if its name is one that a GraphModule uses itself.

        Example:
            >>> converted.get_submodule("2").weight.shape
            torch.Size([4, 16])
        """
        first, _, rest = target.partition(".")
        child = self._modules.get(first)
        return super().get_submodule(target) if child is None else child.get_submodule(rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            kept = self.__dict__.get("_kept")
            original = "the original model" if kept is None else kept.original
            raise AttributeError(
                f"'ConvertedModule' has no attribute '{name}'. Ahead of time fxamp keeps the parameters, buffers and "
                f"forward of {original}, not its other attributes and methods: read '{name}' from the original, "
                "which shares its parameters."
            ) from None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state of this model; refuse a state that only the user's own loading code may understand.

        Raises:
            CaptureError: the state has other names, which the user's code may know how to read.
        """
        if self._kept.loads_otherwise:
            strange = {k.removeprefix(prefix) for k in state_dict if k.startswith(prefix)} ^ self.state_dict().keys()
            if strange:
                raise CaptureError(
                    f"{self.original} has its own code to load a state, which a converted module does not call, and "
                    f"this state has other names ('{min(strange)}'): load it into the original model, which shares "
                    "its parameters with the converted module."
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the parameters, as every `nn.Module` does; warn if they are no longer FP32 afterwards."""
        before = {name: p.dtype for name, p in self.named_parameters()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, p in self.named_parameters():
            if p.dtype not in (before[name], torch.float32):
                warnings.warn(
                    f"'{name}' of a converted {self.original} was {before[name]} and is {p.dtype} now, also in modules "
                    "that share it. The graph casts parameters itself, from the dtypes at conversion, and training "
                    "needs them in FP32. Leave out the call that changed the dtype, or make it before fxamp.convert.",
                    stacklevel=3,
                )
                break
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        self._refuse_copies()
        tree = nn.Module()
        for key in TREE:
            tree.__dict__[key] = copy.deepcopy(self.__dict__[key], memo)
        new = self._rebuild(tree)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self._others(new), memo))
        return new

    def __reduce__(self) -> Any:
        self._refuse_copies()
        tree = {key: self.__dict__[key] for key in TREE}
        graphs = [(v.state, graph_to_data(v.graph), v.call_spec) for v in self.variants]
        return _load, (tree, graphs, self._kept.to_data()), self._others(self.only(0))

    def __copy__(self) -> ConvertedModule:
        self._refuse_copies()
        tree = nn.Module()
        for key in TREE:
            tree.__dict__[key] = copy.copy(self.__dict__[key])
        new = self._rebuild(tree)
        new.__dict__.update({key: copy.copy(v) if key in _HOOKS else v for key, v in self._others(new).items()})
        return new

    def _others(self, fresh: ConvertedModule) -> dict[str, Any]:
        """Return the hooks and attributes that the user has added to this module."""
        return {k: v for k, v in self.__dict__.items() if k in _HOOKS or k not in fresh.__dict__}

    def _refuse_copies(self) -> None:
        self._baked.check()
        if self.uncopied:
            raise CaptureError(f"this module cannot be copied: {self.uncopied}.")

    def _rebuild(self, tree: nn.Module) -> ConvertedModule:
        variants = [replace(v, graph=graph_from_data(graph_to_data(v.graph))) for v in self.variants]
        return ConvertedModule(tree, variants, self._kept)


def _with_signature(call: CallSpec) -> Callable[..., Any]:
    """Return the forward of converted modules as a function with the signature of the original's forward."""
    forward: Any = types.FunctionType(ConvertedModule._forward.__code__, globals(), "forward")
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = call.signature().parameters.values()
    if "self" not in call.signature().parameters:
        forward.__signature__ = inspect.Signature([own, *taken])
    return forward  # type: ignore[no-any-return]


def _allows(state: State, flags: Mapping[str, bool], grad: bool) -> bool:
    named = state.flags or {}  # the module that holds constants has none
    return state.grad in (None, grad) and all(flags.get(path) is flag for path, flag in named.items())


def _load(tree: dict[str, Any], graphs: list[Any], kept: Any) -> ConvertedModule:
    root = nn.Module()
    root.__dict__.update(tree)
    variants = [Variant(state, graph_from_data(graph), spec) for state, graph, spec in graphs]
    return ConvertedModule(root, variants, Kept.from_data(kept))
