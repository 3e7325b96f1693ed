"""The `fx` front end: symbolic tracing, without inputs, of models that trace faithfully.

Modules of torch.nn are traced through, so that a cast can stand before a weight; what cannot be traced through stays an
opaque leaf at its original dtypes.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy, Tracer

from passes import rnn
from passes._torch import TorchFunctionMode, pytree
from passes.errors import CaptureError, FxampError

from .call import CallSpec

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


class _Constants(TorchFunctionMode):
    """Record factories (zeros, arange, rand, ...) as nodes instead of baking what they made while tracing."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        plain = not any(isinstance(a, (torch.Tensor, Proxy)) for a in leaves)
        if plain and getattr(torch, getattr(func, "__name__", ""), None) is func and func.__name__ in _FACTORIES:
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


_FACTORIES = frozenset(
    "zeros ones full empty eye arange linspace logspace rand randn randint randperm normal tensor as_tensor scalar_tensor "
    "tril_indices triu_indices hann_window hamming_window bartlett_window blackman_window".split()
)


class _Tracer(Tracer):
    """Trace through torch.nn, keep what cannot be traced through as leaves, refuse what would be lost."""

    proxy_buffer_attributes = True

    def __init__(self, call: CallSpec) -> None:
        super().__init__(autowrap_modules=())
        self.call_spec = call
        self.leaves: dict[str, nn.Module] = {}
        self.constants: dict[str, Any] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in _TRACEABLE or isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or nn.utils.parametrize.is_parametrized(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(m) in (nn.LSTM, nn.RNN):
            return self._within(m, lambda: _recurrent(m, *args, **kwargs))
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and type(m) in _TRACEABLE:
            m.__dict__["_check_input_dim"] = lambda _: None  # a branch on the rank; `untouched` takes it away again
        return super().call_module(m, forward, args, kwargs)

    def _within(self, m: nn.Module, build: Callable[[], Any]) -> Any:
        path = self.path_of_module(m)
        self.module_stack[f"{path}@fxamp"] = (path, type(m))
        try:
            return build()
        finally:
            del self.module_stack[f"{path}@fxamp"]

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None) -> Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta.setdefault("stack_trace", _user_stack())
        if kind == "call_module":
            leaf = self.root.get_submodule(target)
            node.meta["leaf_type"] = type(leaf).__name__
            self.leaves[target] = leaf
            node.meta["nn_module_stack"] = {**self.module_stack, target: (target, type(leaf))}
        else:
            node.meta["nn_module_stack"] = dict(self.module_stack)
        return node

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Make one placeholder per given argument; an argument left out takes its default."""
        call = self.call_spec
        given: dict[str, Any] = {n: self.create_proxy("placeholder", n, (), {}) for n in call.given}
        args: list[Any] = [self.root]
        for name in call.names:
            args.append(given[name] if name in given else call.defaults[name])
        kwargs = {n: given[n] for n in call.keyword_only if n in given}
        return (lambda *values: root_fn(*values, **kwargs)), args


def _recurrent(m: Any, x: Any, hx: Any = None) -> Any:
    weights = [[getattr(m, n) for n in names] for names in m._all_weights]
    flat = [w for layer in weights for w in layer]
    function = rnn.lstm if isinstance(m, nn.LSTM) else rnn.rnn
    config = (m.bias, m.num_layers, float(m.dropout), m.training, m.bidirectional, m.batch_first)
    extra = (m.proj_size,) if isinstance(m, nn.LSTM) else (m.nonlinearity,)
    tracer = x.tracer
    return tracer.create_proxy("call_function", function, (x, hx, flat, *config, *extra), {})


def _user_stack() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/torch/fx/" in frame.filename or "/fxamp/" in frame.filename or frame.filename.endswith("_compile.py"):
            continue
        if "/torch/overrides" in frame.filename or "/torch/_tensor" in frame.filename:
            continue
        return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
    return ""


def given_by_default(call: CallSpec) -> CallSpec:
    """Without example inputs: every argument without a default is given."""
    if call.var_positional or call.var_keyword:
        raise CaptureError(
            f"forward() takes *{call.var_positional or ''} **{call.var_keyword or ''}, whose content cannot be known without "
            "example inputs. Pass args and kwargs to fxamp.convert."
        )
    return replace(call, given=tuple(n for n in (*call.names, *call.keyword_only) if n not in call.defaults))


def trace(model: nn.Module, call: CallSpec) -> tuple[Graph, CallSpec, dict[str, nn.Module], dict[str, Any]]:
    """Trace a model in its present mode.

    Returns the graph with a flat output tuple, the call specification with the outputs' container, the opaque leaves by
    path, and lifted constants by name.
    """
    tracer = _Tracer(call)
    if tracer.is_leaf_module(model, ""):
        raise CaptureError(
            f"{type(model).__name__} is itself an opaque module for symbolic tracing. Give example inputs "
            "(fxamp.convert(model, args)), which capture through it."
        )
    try:
        with _Constants(tracer):
            graph = tracer.trace(model)
    except FxampError:
        raise
    except Exception as e:
        raise CaptureError(
            f"symbolic tracing cannot capture {type(model).__name__}: {type(e).__name__}: {e} ({_model_line(e)}). Give example "
            "inputs (fxamp.convert(model, args)), or use fxamp.compile(model)."
        ) from e
    constants = {}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            constants[node.target] = getattr(model, str(node.target))
            node.target = f"_fxamp.{node.target}"
    output = graph.output_node()
    flat, spec = pytree.tree_flatten(_plain(output.args[0]))
    kept = [o for o in flat if isinstance(o, Node)]
    out_constants = tuple((i, o) for i, o in enumerate(flat) if not isinstance(o, Node))
    output.args = (tuple(kept),)
    return graph, replace(call, out_spec=spec, out_constants=out_constants), tracer.leaves, constants


def _plain(value: Any) -> Any:
    """Return fx's immutable containers as the plain ones that the model returned."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_plain(v) for v in value))
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _model_line(error: Exception) -> str:
    """Return file and line of the model's own innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        name = frame.filename.replace("\\", "/")
        if "/torch/" not in name and "/fxamp/" not in name:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return inspect.getsourcefile(type(error)) or "no source line"
