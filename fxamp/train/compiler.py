"""What compiles a training step: the values of `TrainStep(compile=...)`, and functions that are compiled by them.

Other values are refused by name. A compiled function counts its graphs, breaks and fallbacks. What writes tensors, such
as the step of an optimizer, is traced by `make_fx`: Dynamo would look at every object that it touches, and check it at
each call, where here whoever calls says by a key when a graph can be used again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes.contract.errors import PolicyError
from passes.contract.policy import Policy, nearest
from passes.graph.values import no_autocast

from .._torch import as_if_compiling, compile_records, forget_compiled, inner_backend, traced_by
from ..capture import backend as capture
from ..capture.graph import break_of
from ..capture.graphs import is_compiled
from ..view.view import is_view, make_view
from .kernels import Kernels

_CAPTURING = ("reduce-overhead", "max-autotune")  # modes in which Inductor captures CUDA graphs
MOST_FORMS = 8  # graphs of one function
_KEYS = ("backend", "mode", "options", "dynamic", "fullgraph")


@dataclass(frozen=True)
class CompileSettings:
    """The compiler of a training step, and its options, as `torch.compile` takes them."""

    backend: capture.Inner = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False
    captures: bool = False  # Inductor captures CUDA graphs of what it compiles: it is asked to, and there is CUDA
    policy: Policy | None = None  # that converts the model, where fxamp's own backend was asked for, around this one

    @property
    def name(self) -> str:
        """The name of the backend that was asked for."""
        inner = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", str(self.backend))
        return inner if self.policy is None else "fxamp"

    @property
    def cuda_graph(self) -> bool:
        """Whether Inductor is asked to capture CUDA graphs of what it compiles."""
        return self.backend == "inductor" and (
            self.mode in _CAPTURING or bool((self.options or {}).get("triton.cudagraphs"))
        )

    @property
    def fuses(self) -> bool:
        """Whether the backend generates kernels, while torch's "eager" backends only trace."""
        return not (isinstance(self.backend, str) and "eager" in self.backend)

    def run(self) -> Any:
        """Return the backend with its mode and options in it; Inductor records what it makes of each graph."""
        options = dict(self.options)
        if self.backend == "inductor":
            from ..measure.inductor import recording  # imports Inductor, which takes seconds

            options = recording() | options
        return inner_backend(self.backend, self.mode, options)


def settings_of(compile: object) -> CompileSettings | None:
    """Return the settings that the arguments stand for; None to compile nothing. Refuse all others by name."""
    if compile is False:
        return None
    given = {} if compile is True else {"backend": compile} if isinstance(compile, str) else compile
    if not isinstance(given, Mapping):
        raise PolicyError(
            "compile must be False, True, the name of a torch.compile backend or a mapping of torch.compile's options, "
            f"got {compile!r}"
        )
    if unknown := next((key for key in given if key not in _KEYS), ""):
        raise PolicyError(
            f"compile has no option {unknown!r}{nearest(str(unknown), _KEYS)}: it takes {', '.join(_KEYS)}"
        )
    settings = CompileSettings(**given)
    options = dict(settings.options or {})
    backend: Any = settings.backend
    if backend == "fxamp":
        ours, options = capture.split(options)
        backend = capture.backend(**{"mode": settings.mode, **ours})
    if isinstance(backend, capture.Backend):
        mode, options = backend.mode or settings.mode, {**dict(backend.options), **options}
        settings = replace(settings, backend=backend.backend, mode=mode, policy=backend.policy)
    else:
        capture.require_backend(backend)
    settings = replace(settings, options=options)
    settings = replace(settings, captures=settings.cuda_graph and torch.cuda.is_available())
    try:
        settings.run()
    except RuntimeError as error:  # of Inductor, for an option that it does not have
        raise PolicyError(f"compile: {error}") from error
    return settings


def arguments_of(settings: CompileSettings) -> dict[str, Any]:
    """Return what to give `TrainStep(compile=...)` for settings of a step whose model is converted."""
    return {key: getattr(settings, key) for key in _KEYS}


def model_to_compile(model: nn.Module, settings: CompileSettings) -> nn.Module:
    """Return a view of the model where the backend is fxamp's, else the model. Refuse what cannot be compiled."""
    for path, module in model.named_modules():
        what = f"'{path}'" if path else "the model"
        if settings.policy is not None and is_view(module):
            raise PolicyError(f"compile='fxamp' converts the model, and {what} is converted already: set compile=True")
        if is_compiled(module) and not is_view(module):
            raise PolicyError(
                f"{what} is compiled by torch.compile already: leave compile at False, or give TrainStep what "
                "fxamp.convert returns, or the model as it is with compile='fxamp'"
            )
    if settings.policy is None:
        return model
    capture.refuse_unmatched(settings.policy, model)
    view: nn.Module = make_view(model, settings.policy)
    return view


class Counted:
    """Compiled code of a training step, and what is counted of it."""

    def __init__(self, name: str, settings: CompileSettings) -> None:
        self.name, self.settings = name, settings
        self.frames = 0  # pieces of code that were compiled, each into a graph for one form of the inputs
        self.breaks: list[str] = []  # where and why a graph ended early
        self.recompiles: list[str] = []  # why code was compiled once more
        self.fallbacks: list[str] = []  # what runs uncompiled, and why
        self.uncaptured: list[str] = []  # why there is no CUDA graph of something
        self.kernels = Kernels(settings.backend == "inductor")


class Region(Counted):
    """A plain function, without a closure, that is compiled for a training step; each graph by `compile_graph`."""

    def __init__(
        self, name: str, function: Callable[..., Any], settings: CompileSettings,
        compile_graph: Callable[[GraphModule, list[Any]], Callable[..., Any]],
    ) -> None:  # fmt: skip
        super().__init__(name, settings)
        self.failed = False  # the backend itself raised an error in the last call

        def compiler(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            if reason := break_of(gm):
                self.breaks.append(reason)
            try:
                return self.kernels.compile(lambda: compile_graph(gm, example_inputs))
            except Exception:
                self.failed = True
                raise

        compiler.__name__ = settings.name  # the name by which torch calls the backend in errors
        # Dynamo keeps what it compiles by code object: two steps would compete for one limit of recompiles.
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._code = own.__code__
        self._run = torch.compile(own, backend=compiler, dynamic=settings.dynamic, fullgraph=settings.fullgraph)

    def forget(self) -> None:
        """Compile anew at the next call."""
        forget_compiled(self._code)

    def __call__(self, *args: Any) -> Any:
        """Run the function, compiled. An error of the backend gets a note with a way out."""
        before = compile_records()
        self.failed = False
        self.kernels.ran.clear()
        try:
            return self._run(*args)
        except Exception as error:
            if self.failed and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(way_out(self.settings.name, self.name, str(error)))
            raise
        finally:
            self.kernels.after_forward()
            self._look_back(before)

    def _look_back(self, before: list[Any]) -> None:
        after = compile_records()
        if not after or (before and after[-1] is before[-1]):
            return
        known = set(map(id, before))
        for record in (record for record in after if id(record) not in known):
            self.frames += bool(record.has_guarded_code and record.graph_op_count)
            if record.recompile_reason:
                self.recompiles.append(record.recompile_reason)
            if record.fail_reason and not self.failed:
                self.fallbacks.append(f"{record.co_name}: {record.fail_reason.splitlines()[0]}")
            if reason := getattr(record, "cudagraph_skip_reason", None):  # not in every torch
                self.uncaptured.append(reason)


class NotTraced(Exception):  # noqa: N818 - no error: who calls runs the function as it is
    """Raised with the reason where there is no graph of a function; nothing of it has run."""


class Traced(Counted):
    """Compiled functions of lists of tensors, which write some of these; `kernels` are of those that ran last."""

    def __init__(self, name: str, settings: CompileSettings) -> None:
        super().__init__(name, settings)
        self._graphs: dict[Hashable, Callable[..., Any]] = {}

    def graph_of(
        self, form: Hashable, ways: Sequence[Callable[..., Any]], inputs: Sequence[Tensor]
    ) -> Callable[[], object]:
        """Return what calls the graph of this form, of the first of `ways` that can be traced; NotTraced if none."""
        plain = [tensor.detach() for tensor in inputs]
        run = self._graphs.get(form)
        if run is None:
            run = self._graphs[form] = self._compile(ways, plain)
        return functools.partial(torch.no_grad()(run), *plain)

    def _compile(self, ways: Sequence[Callable[..., Any]], inputs: list[Tensor]) -> Callable[..., Any]:
        if len(self._graphs) >= MOST_FORMS:
            raise NotTraced(self._give_up(f"it had {MOST_FORMS} forms: gradients of other weights, dtypes or numbers"))
        if self._graphs:
            self.recompiles.append("gradients of other weights, dtypes or numbers")
        for function in ways:
            with torch.no_grad(), no_autocast(), traced_by(inputs) as fakes:
                try:
                    with as_if_compiling():
                        graph = make_fx(function)(*fakes)
                except Exception as error:
                    raise NotTraced(self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])) from error
                if graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
                    continue
                try:
                    run = self.kernels.compile(functools.partial(self.settings.run(), graph, fakes))
                except Exception as error:
                    if hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(way_out(self.settings.name, self.name, str(error)))
                    raise
            break
        else:
            raise NotTraced(self._give_up("a tensor is read as a number, which a graph would keep as it is"))
        self.frames += 1
        return run

    def _give_up(self, reason: str) -> str:
        self.fallbacks.append(reason)
        return reason


def way_out(backend: str, graph: str, error: str) -> str:
    """Return what can be done about an error of a backend."""
    instead = "Try compile='aot_eager' to see whether the graph is at fault, or compile=False to train uncompiled."
    if "C++ compiler" in error:
        instead = "Install a C++ compiler; or use compile='aot_eager', which compiles no kernels, or compile=False."
    return f"The backend '{backend}' failed on the graph '{graph}' of this TrainStep. {instead}"
