"""Values of `TrainStep(compile=...)`: a backend, and options of `torch.compile`. Others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from passes._torch import inner_backend
from passes.contract.errors import PolicyError
from passes.contract.policy import nearest

from ...capture import backend as capture
from ...capture import compiled
from ...view.view import is_view, make_view
from ..window.closure import needs_closure

_KEYS = ("backend", "mode", "options", "dynamic", "fullgraph")
_CUDA_GRAPHS = "triton.cudagraphs"


@dataclass(frozen=True)
class CompileSettings:
    """The compiler of a training step, and its options.

    Attributes:
        backend: A name or a callable, as `torch.compile` takes it; or fxamp's own, which converts the graphs too.
        mode: As `torch.compile` takes it.
        options: Options of the backend.
        dynamic: As `torch.compile` takes it.
        fullgraph: As `torch.compile` takes it; the loss function is in the graph.
        cuda_graph: Whether Inductor is asked to capture CUDA graphs of what it compiles.
        captures: Whether Inductor can do that: whether there is CUDA.
        by_fxamp: Whether the backend that was asked for was fxamp's own, around this one.
    """

    backend: capture.Inner | capture.Backend = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False
    cuda_graph: bool = False
    captures: bool = False
    by_fxamp: bool = False

    @property
    def name(self) -> str:
        """The name of the backend."""
        if self.by_fxamp:
            return "fxamp"
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", str(self.backend))

    @property
    def converts(self) -> bool:
        """Whether the backend is fxamp's own."""
        return isinstance(self.backend, capture.Backend)

    @property
    def fuses(self) -> bool:
        """Whether the inner backend generates kernels, while torch's "eager" backends only trace."""
        backend = self.inner.backend
        return not (isinstance(backend, str) and "eager" in backend)

    @property
    def inner(self) -> CompileSettings:
        """The settings for graphs that are not to be converted."""
        if not isinstance(self.backend, capture.Backend):
            return self
        return replace(self, backend=self.backend.backend, mode=self.backend.mode, options=dict(self.backend.options))

    def run(self) -> Any:
        """Return the backend with its mode and options in it."""
        if isinstance(self.backend, capture.Backend):
            return self.backend
        return inner_backend(self.backend, self.mode, dict(self.options))


def settings_of(compile: object, cuda_graph: object) -> CompileSettings | None:
    """Return the settings that the argument `compile` stands for; None to compile nothing.

    Args:
        compile: False, True for Inductor, the name of a backend, or a mapping of `torch.compile`'s options.
        cuda_graph: Whether Inductor is asked for CUDA graphs.

    Raises:
        PolicyError: It is none of these; there is no such backend or option; or CUDA graphs without Inductor.
    """
    if not isinstance(cuda_graph, bool):
        raise PolicyError(f"cuda_graph must be True or False, got {cuda_graph!r}")
    if compile is False:
        if cuda_graph:
            raise PolicyError("cuda_graph=True captures graphs that compile=True has compiled: give compile=True too")
        return None
    given = {} if compile is True else {"backend": compile} if isinstance(compile, str) else compile
    if not isinstance(given, Mapping):
        raise PolicyError(
            "compile must be False, True, the name of a torch.compile backend or a mapping of torch.compile's options, "
            f"got {compile!r}"
        )
    for key in given:
        if key not in _KEYS:
            raise PolicyError(f"compile has no option {key!r}{nearest(str(key), _KEYS)}: it takes {', '.join(_KEYS)}")
    settings = CompileSettings(**given)
    options = dict(settings.options or {})
    if cuda_graph and settings.inner.name != "inductor":
        raise PolicyError(f"cuda_graph=True is an option of Inductor, and the backend is {settings.name!r}")
    captures = cuda_graph and torch.cuda.is_available()
    if captures:
        options[_CUDA_GRAPHS] = True
    backend = _backend(settings.backend, settings.mode, options)
    settings = replace(settings, backend=backend, options=options, cuda_graph=cuda_graph, captures=captures)
    try:
        settings.run()
    except RuntimeError as error:  # of Inductor, for an option that it does not have
        raise PolicyError(f"compile: {error}") from error
    return settings


def refuse_unfit(model: nn.Module, optimizers: Sequence[Optimizer], settings: CompileSettings) -> None:
    """Raise PolicyError where a step cannot be compiled: by its model, its optimizers or the backend."""
    closure = next((o for o in optimizers if needs_closure(o)), None)
    if closure is not None:
        raise PolicyError(
            f"compile={settings.name!r} does not work with {type(closure).__name__}, which evaluates the loss several "
            "times in a step: leave compile at False, or take an optimizer whose step() needs no closure"
        )
    for path, module in model.named_modules():
        what = f"'{path}'" if path else "the model"
        if settings.converts and is_view(module):
            raise PolicyError(f"compile='fxamp' converts the model, and {what} is converted already: set compile=True")
        original = compiled.is_compiled(module) and not is_view(module)
        if original:
            raise PolicyError(
                f"{what} is compiled by torch.compile already: leave compile at False, or give TrainStep what "
                "fxamp.convert returns, or the model as it is with compile='fxamp'"
            )


def converted_by(model: nn.Module, settings: CompileSettings) -> tuple[nn.Module, CompileSettings]:
    """Return a view of the model where the backend is fxamp's, and the settings for what it then runs."""
    backend = settings.backend
    if not isinstance(backend, capture.Backend):
        return model, settings
    capture.refuse_unmatched(backend.policy, model)
    return make_view(model, backend.policy), replace(settings.inner, by_fxamp=True)


def _backend(backend: Any, mode: str | None, options: Mapping[str, Any]) -> capture.Inner | capture.Backend:
    if isinstance(backend, capture.Backend):
        return backend
    if backend == "fxamp":
        ours, rest = capture.split(options)
        return capture.backend(**{"mode": mode, **ours}, options=rest)
    capture.require_backend(backend)
    return backend  # type: ignore[no-any-return]
