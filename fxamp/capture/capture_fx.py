"""The `fx` front end: symbolic tracing, without inputs, of models that trace faithfully.

Modules of torch.nn are traced through, so that a cast can be inserted before a weight. A module that cannot be traced
through stays an opaque leaf in its original dtypes.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import Attribute

from passes._torch import BatchNorm, TorchDispatchMode, TorchFunctionMode, pytree, storage_id
from passes.contract.errors import INSTEAD, CaptureError, FxampError, NotFaithfulError
from passes.graph.notes import note
from passes.graph.values import mutated_operands, source
from passes.ops import ops
from passes.ops.rules import RULES
from passes.runtime import rnn

from .model import frames
from .model.call import CallSpec, flatten_outputs
from .model.patches import replaced, traced_here_alone
from .model.reads import Recorder
from .model.tensors import held, strided, written

# Modules of torch.nn whose forward is one functional call (or a few) that tracing records as it is.
_TRACEABLE = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.Embedding, nn.EmbeddingBag,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.GLU, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.Softsign, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.LogSigmoid, nn.Threshold, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.ZeroPad2d, nn.ConstantPad1d,
    nn.ConstantPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.Unfold, nn.Fold, nn.CosineSimilarity, nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
    nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
)  # fmt: skip


_FACTORIES = {getattr(torch, row.name): row.name for row in RULES.values() if row.factory}
# Tracing records no node for these methods, or one whose effect autograd does not see.
_LOST_METHODS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "set_", "backward"}
)


class _Value(Proxy):
    """A traced value that also records `x[i] = y` and `x += y`, and refuses what a Proxy would silently lose."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            raise CaptureError(
                f"forward() assigns .{name} of a tensor at {frames.place()}: symbolic tracing would lose it. {_INPUTS}."
            )
        super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Refuse isinstance() and torch.is_tensor() of a traced value in the model's code: the answer is not known."""
        frame: Any = sys._getframe(1)
        by_torch = frame.f_code is torch.is_tensor.__code__
        frame = frame.f_back if by_torch else frame
        file = frame.f_code.co_filename
        line = linecache.getline(file, frame.f_lineno)  # "" where there is no source: then isinstance() is assumed
        if frames.kind(file) == "user" and (by_torch or not line or "isinstance(" in line):
            asked = "torch.is_tensor()" if by_torch else "isinstance()"
            raise CaptureError(
                f"forward() calls {asked} on a traced value at {frames.place()}: symbolic tracing has no tensor here "
                f"and would take the wrong branch. {_INPUTS}."
            )
        return type(self)


class _Attribute(Attribute, _Value):
    """An attribute of a traced value, such as `x.T`; or a method, if it is called next."""

    __getattr__ = _Value.__getattr__


def _recording(function: Callable[[Any, Any], Any]) -> Callable[[_Value, Any], Any]:
    def record(self: _Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _function in ops.IN_PLACE:  # without these Python runs `x = x + y`, and other references to x keep the old value
    setattr(_Value, f"__{_function.__name__}__", _recording(_function))


_INPUTS = "Give example inputs and capture='export' (fxamp.convert(model, args))"


class _Constants(TorchFunctionMode):
    """Record factories (zeros, arange, rand, ...) as nodes instead of baking in what they return during the trace."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if func in _FACTORIES and not any(isinstance(a, torch.Tensor) for a in leaves):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def of_traced_sizes(self) -> Iterator[None]:
        """Make torch.zeros(x.shape[0], 3) traceable: its parser rejects a traced number before any mode is called."""

        def recording(factory: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(a, Proxy) for a in pytree.tree_leaves((args, kwargs))):
                    return self.tracer.create_proxy("call_function", factory, args, kwargs)
                return factory(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name in _FACTORIES.values():
                stack.enter_context(replaced(torch, name, recording))
            for name in ("finfo", "iinfo"):
                stack.enter_context(replaced(torch, name, _of_a_dtype))
            yield


def _of_a_dtype(info: Any) -> Any:
    """Return a `torch.finfo` or `torch.iinfo` that refuses a traced dtype: torch 2.15 makes up numbers for it."""

    def limits(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Proxy) for a in (*args, *kwargs.values())):
            raise CaptureError(
                f"forward() calls torch.{info.__name__} on the dtype of a traced value at {frames.place()}: symbolic "
                f"tracing does not know that dtype. {_INPUTS}."
            )
        return info(*args, **kwargs)

    return limits


class _Writes(TorchDispatchMode):
    """Refuse a write to a tensor from outside of the trace: it would happen once, now, and never in the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = {**dict(model.named_parameters()), **held(model)}
        self.names = {storage_id(t): name for name, t in tensors.items()}
        self.made: dict[int, torch.Tensor] = {}  # kept alive, so that no new storage gets the address of an old one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs):
            if storage_id(tensor) not in self.made:
                name = self.names.get(storage_id(tensor))
                what = f"'{name}'" if name else "a tensor made outside forward()"
                raise NotFaithfulError(
                    f"forward() writes to {what} at {frames.place()}: symbolic tracing records only reads of "
                    f"parameters and buffers, so the graph would not write to it. {INSTEAD}."
                )
        before = {storage_id(t) for t in strided((args, kwargs))}
        output = func(*args, **kwargs)
        self.made |= {storage_id(t): t for t in strided(output) if storage_id(t) not in before}
        return output


class _Tracer(Tracer):
    """Traces into torch.nn, keeps modules that cannot be traced as leaves, and refuses what would be lost."""

    proxy_buffer_attributes = True

    def __init__(self, run: Callable[[nn.Module], Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.run = run
        self.stacks = frames.Stacks(run.__code__)
        self.leaves: dict[str, nn.Module] = {}

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Trace `run(model)`, which makes the placeholders and calls the model."""
        return self.run, [self.root]

    def proxy(self, node: Node) -> Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in _TRACEABLE or isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or nn.utils.parametrize.is_parametrized(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if type(m) in (nn.LSTM, nn.RNN):
            return self._within(m, lambda: _recurrent(m, *args, **kwargs))
        if isinstance(m, BatchNorm) and type(m) in _TRACEABLE:
            m.__dict__["_check_input_dim"] = lambda _: None  # a branch on the rank; `untouched` takes it away again
        return super().call_module(m, forward, args, kwargs)

    def _within(self, m: nn.Module, build: Callable[[], Any]) -> Any:
        path = self.path_of_module(m)
        self.module_stack[f"{path}@fxamp"] = (path, type(m))
        try:
            return build()
        finally:
            del self.module_stack[f"{path}@fxamp"]

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Node:
        if kind == "call_method" and target in _LOST_METHODS:
            raise NotFaithfulError(
                f"forward() calls Tensor.{target} at {frames.place()}: the graph would not do that. {INSTEAD}."
            )
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta.setdefault("stack_trace", self.stacks())
        if kind == "call_module":
            leaf = self.root.get_submodule(target)
            note(node, leaf=type(leaf).__name__)
            self.leaves[target] = leaf
            node.meta["nn_module_stack"] = {**self.module_stack, target: (target, type(leaf))}
        else:
            node.meta["nn_module_stack"] = dict(self.module_stack)
        return node

    def create_arg(self, a: Any) -> Any:
        if callable(a) and not isinstance(a, (type, torch.nn.Module, Proxy)):
            raise NotFaithfulError(
                f"forward() passes a function to a method of a traced value at {frames.place()}: the graph would not "
                f"call it. {INSTEAD}."
            )
        return super().create_arg(a)


def _recurrent(m: Any, x: Any, hx: Any = None) -> Any:
    weights = m.all_weights
    flat = [w for layer in weights for w in layer]
    function = rnn.lstm if isinstance(m, nn.LSTM) else rnn.rnn
    config = (m.bias, m.num_layers, float(m.dropout), m.training, m.bidirectional, m.batch_first)
    extra = (m.proj_size,) if isinstance(m, nn.LSTM) else (m.nonlinearity,)
    return x.tracer.create_proxy("call_function", function, (x, hx, flat, *config, *extra), {})


def given_by_default(call: CallSpec) -> CallSpec:
    """Return the call that is traced without example inputs: it passes all arguments that have no default."""
    if call.var_positional or call.var_keyword:
        taken = ", ".join(s + n for s, n in (("*", call.var_positional), ("**", call.var_keyword)) if n)
        raise CaptureError(
            f"forward() takes {taken}, whose content cannot be known without example inputs. Pass args and kwargs to "
            "fxamp.convert."
        )
    return replace(call, given=tuple(n for n in (*call.names, *call.keyword_only) if n not in call.defaults))


def trace(
    model: nn.Module, call: CallSpec, flat: list[Any], recorder: Recorder
) -> tuple[Graph, CallSpec, dict[str, nn.Module], dict[str, Any]]:
    """Trace a model in its present mode: one placeholder for each tensor of the example (`flat`), or each argument.

    Returns the graph with a flat output tuple, the call specification with the outputs' container, the opaque leaves by
    path, and lifted constants by name.
    """
    outputs: list[Any] = []
    before = _slots(model)

    def run(model: nn.Module) -> Any:
        def placeholder(name: str) -> Any:
            return tracer.create_proxy("placeholder", "".join(c if c.isalnum() else "_" for c in name), (), {})

        if call.in_spec is None:
            values: dict[str, Any] = {n: placeholder(n) for n in call.given}
        else:
            leaves = zip(call.leaves, flat, strict=True)
            values = call.unflatten([placeholder(leaf.name) if leaf.tensor else v for leaf, v in leaves])
        args, kwargs = call.arguments(values)
        with traced_here_alone(), recorder():
            kept, *outputs[:] = flatten_outputs(model.forward(*args, **kwargs))
        _refuse_assigned(model, before, tracer.graph)
        return tuple(kept)

    tracer = _Tracer(run)
    if tracer.is_leaf_module(model, ""):
        raise CaptureError(f"{type(model).__name__} is itself an opaque module for symbolic tracing. {_INPUTS}.")
    constants = _Constants(tracer)
    try:
        with constants, constants.of_traced_sizes(), _Writes(model):
            graph = tracer.trace(model)
    except FxampError:
        raise
    except Exception as e:
        raise CaptureError(
            f"symbolic tracing cannot capture {type(model).__name__}: {type(e).__name__}: {e} ({frames.place_of(e)}). "
            f"{_INPUTS}."
        ) from e
    graph.output_node().type = None  # fx took it from `run`
    out_constants, out_spec = outputs
    call = replace(call, out_spec=out_spec, out_constants=out_constants)
    return graph, call, tracer.leaves, _lift_constants(graph, model, tracer)


def _slots(model: nn.Module) -> dict[str, tuple[dict[str, Any], str, Any]]:
    """Map the path of every buffer, or tensor in a plain attribute, to its table, its name there and its value."""
    out: dict[str, tuple[dict[str, Any], str, Any]] = {}
    for path, module in model.named_modules():
        for table in (module.__dict__, module._buffers):
            for name, value in table.items():
                if table is module._buffers or isinstance(value, (torch.Tensor, Proxy)):
                    out[f"{path}.{name}".lstrip(".")] = table, name, value
    return out


def _refuse_assigned(model: nn.Module, before: dict[str, Any], graph: Graph) -> None:
    """Raise NotFaithfulError where forward() assigned a buffer, or a tensor that it reads, other than by `x += y`."""
    now, read = _slots(model), {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    buffers = {f"{path}.{n}".lstrip(".") for path, m in model.named_modules() for n in m._buffers}
    for path in sorted(now.keys() | before.keys()):
        table, name, value = now.get(path, ({}, "", None))
        old = before.get(path)
        if old is not None and value is old[2]:
            continue
        if old is not None and isinstance(value, Proxy) and _is_written(value.node, old[2], before):
            table[name] = old[2]
        elif (old is not None and path in read) or path in buffers:
            where = f" at {source(value.node)}" if isinstance(value, Proxy) else ""
            raise NotFaithfulError(
                f"forward() assigns '{path}'{where}; the graph would not do that. {INSTEAD}, or write to it in place "
                "('copy_')."
            )


def _is_written(node: Node, tensor: Any, slots: dict[str, Any]) -> bool:
    """Say whether a value is this tensor, after `tensor += y` and the like."""
    while node.args and node.args[0] in mutated_operands(node):
        node = node.args[0]  # type: ignore[assignment]
    found = slots.get(str(node.target)) if node.op == "get_attr" else None
    return found is not None and found[2] is tensor


def _lift_constants(graph: Graph, model: nn.Module, tracer: Tracer) -> dict[str, Any]:
    """Give all other tensors than parameters and buffers new names in the graph; return them by name."""
    own = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    own |= {n for n, _ in model.named_buffers(remove_duplicate=False)}
    tensors = {path: tensor for tensor, path in tracer.tensor_attrs.items()}  # also those that forward() has reassigned
    lifted = {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in own:
            name = str(node.target).replace(".", "_")
            found = tensors.get(str(node.target))
            lifted[name] = operator.attrgetter(str(node.target))(model) if found is None else found
            if getattr(lifted[name], "grad_fn", None) is not None:
                reader = source(next(iter(node.users)))
                raise CaptureError(
                    f"forward() uses parameters that it did not read as attributes, for example in a loop over "
                    f"self.parameters() ({reader}): symbolic tracing would bake their values into the graph. {_INPUTS}."
                )
            node.target = f"_fxamp.{name}"
    return lifted
