"""The view of a model: an object of a subclass of the model's class, over the model's own `__dict__`.

Parameters, buffers, submodules, hooks, flags and attributes are one and the same; only a call differs. The model
itself, called as itself, runs as its author wrote it.

    view(x)            Runner: the plan
    view.forward(x)    the same; what a trainer writes there stays on the view, and wraps its call
    view.encode(x)     under the view's autocast, or captured, if `methods` names it
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from passes._torch import pytree
from passes.contract.errors import CaptureError
from passes.contract.plan import Plan
from passes.contract.policy import SHORT, Policy
from passes.graph.values import LOW_DTYPES

from ..capture.backend import require_inner
from ..capture.graphs import Graphs
from ..capture.graphs import runner_of as runner_of
from ..capture.in_place import COPIES_A_MODEL
from ..observe.watch import CALLERS
from .runner import Runner, Written
from .settings import Settings
from .twin import MODEL_OF_COPY

# Base classes of libraries, whose methods configure, save and load; what computes calls the view, as `generate` does.
_LIBRARIES = (
    "torch.", "lightning.", "pytorch_lightning.", "transformers.modeling_utils", "transformers.utils.",
    "transformers.integrations.", "transformers.configuration_utils", "huggingface_hub.",
)  # fmt: skip


class _Forward:
    """`view.forward`: a call of the view, with the author's signature.

    What is written there wraps the call from outside, between the model's hooks, as on any module; it never enters a
    graph, where its autocast would pin every op, and never reaches the model.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __get__(self, view: Any, cls: type | None = None) -> Any:
        if view is None:
            return self._call
        written = written_to(view)
        return types.MethodType(self._call, view) if written is None else written

    def __set__(self, view: Any, value: Any) -> None:
        ours = getattr(value, "__func__", None) is self._call
        runner_of(view).override = None if ours else Written(value, super(View, view).__call__)  # type: ignore[misc]

    def __delete__(self, view: Any) -> None:
        runner_of(view).override = None


def written_to(view: Any) -> Any:
    """Return what somebody has written to `forward` of a view; None where nobody has."""
    override = runner_of(view).override
    return override.forward if isinstance(override, Written) else override


class View:
    """Mixed into a subclass of the model's class; each view has a class of its own.

    Example:
        >>> view = fxamp.compile(model, policy="O1,dtype=bf16", backend="eager")
        >>> isinstance(view, type(model)), view[0].weight is model[0].weight, list(view.state_dict())[0]
        (True, True, '0.weight')
    """

    _fxamp_runner: Runner

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the author's class: `type(view)(...)`, and `view[1:]` of a sequence, are new models."""
        return cls.__mro__[cls.__mro__.index(View) + 1](*args, **kwargs)

    def __init_subclass__(cls, **_: Any) -> None:
        pass  # a view's class is none of the author's subclasses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan."""
        runner = type(self)._fxamp_runner
        if (override := runner.override) is None:
            return runner(args, kwargs, model=self)
        return (
            override(*args, **kwargs) if torch.compiler.is_compiling() else runner.call_override(override, args, kwargs)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        runner = runner_of(self)
        return functools.partial(make_view, **_arguments(runner)), (runner.model, runner.graphs.asked)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        runner = runner_of(self)
        model: nn.Module = copy.deepcopy(runner.model, memo)
        if COPIES_A_MODEL in memo:
            made = _over(model, type(self))  # the same class, which graphs are guarded on
            vars(made)[MODEL_OF_COPY] = model
        else:
            made = make_view(model, runner.graphs.asked, **_arguments(runner))
        memo[id(self)] = made
        if (written := written_to(self)) is not None and runner_of(made) is not runner:
            made.forward = copy.deepcopy(written, memo)
        return made

    def __copy__(self) -> Any:
        runner = runner_of(self)
        made = make_view(copy.copy(runner.model), runner.graphs.asked, **_arguments(runner))
        if (written := written_to(self)) is not None:
            made.forward = written
        return made

    def __prepare_scriptable__(self) -> Any:
        raise CaptureError(
            "torch.jit.script of a view would lose its plan: export the model itself, then pass the result to "
            "fxamp.convert."
        )

    def __repr__(self) -> str:
        runner = runner_of(self)
        policy, known = runner.graphs.policy, runner.graphs
        low = f" {SHORT[policy.dtype]}" if policy.dtype in LOW_DTYPES and policy.level.rounds else ""
        graphs = f"{len(known)} graphs, {sum(g.plan.casts for g in known)} casts" if known else "not captured yet"
        return f"<fxamp view of {type(runner.model).__name__}: {policy.level}{low}, {graphs}>"

    def compile(
        self, *, fullgraph: bool = False, dynamic: bool | None = None, backend: Any = "inductor",
        mode: str | None = None, options: Mapping[str, Any] | None = None, disable: bool = False,
    ) -> None:  # fmt: skip
        """Compile the graphs of this view by another backend from now on; the model itself is not changed.

        The arguments are those of `torch.nn.Module.compile`. With `disable` graphs run as they are emitted.

        Raises:
            PolicyError: there is no such backend, or it is fxamp itself.
        """
        backend = "eager" if disable else backend
        require_inner(backend)
        runner_of(self).compile(backend=backend, mode=mode, options=options, fullgraph=fullgraph, dynamic=dynamic)

    def cast_once(self) -> contextlib.AbstractContextManager[Any]:
        """Cast each weight once between two updates, inside the context that is returned: `fxamp.cast_once`."""
        from .frozen import cast_once  # which imports this

        return cast_once(self)


def is_view(value: object) -> bool:
    """Say whether something is a view."""
    return isinstance(value, View)


def _arguments(runner: Runner) -> dict[str, Any]:
    return {**vars(runner.settings), "replayed": runner.graphs.replayed}


def make_view(model: nn.Module, policy: Policy, *, replayed: Plan | None = None, **settings: Any) -> Any:
    """Return a view of a model, which captures at its first call; further arguments are `Settings`."""
    cls = type(model)
    runner = Runner(model, Settings(**settings), Graphs(policy, replayed))
    call = _named_as(cls.forward, lambda self, *args, **kwargs: type(self)._fxamp_runner.forward(args, kwargs, self))
    slots = {n for kind in cls.__mro__ for n in getattr(kind, "__slots__", ()) if n not in ("__dict__", "__weakref__")}
    members = {
        **_methods_of(cls, runner.settings.methods), **{name: _slot(name) for name in slots}, "forward": _Forward(call),
        "__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "_fxamp_runner": runner,
    }  # fmt: skip
    # A metaclass of the author's may keep a registry of classes, in which a view's class has no place.
    ordinary = type(cls) in (type, abc.ABCMeta)
    new: Any = type(cls) if ordinary else functools.partial(type.__new__, type(cls))
    made = new(cls.__name__, (View, cls), members)
    runner.follows(made)
    return _over(model, made)


def _over(model: nn.Module, kind: type) -> Any:
    view: Any = object.__new__(kind)
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def _methods_of(cls: type, captured: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        sharded = kind.__name__ == "FSDPModule"
        if kind in nn.Module.__mro__ or (kind.__module__.startswith(_LIBRARIES) and not sharded):
            continue
        for name, function in vars(kind).items():
            if isinstance(function, property) and function.fget is not None and not hasattr(nn.Module, name):
                out[name] = property(_in_region(function.fget), function.fset, function.fdel, function.__doc__)
            if not isinstance(function, types.FunctionType) or name.startswith("__") or name == "forward":
                continue
            if sharded:
                out[name] = _on_model(function)
            elif not hasattr(nn.Module, name):
                out[name] = _captured(function) if name in captured else _in_region(function, kind)
    return out


def _slot(name: str) -> property:
    return property(
        lambda view: getattr(runner_of(view).model, name),
        lambda view, value: setattr(runner_of(view).model, name, value),
    )


def _on_model(function: Any) -> Any:
    return _named_as(function, lambda self, *args, **kwargs: function(runner_of(self).model, *args, **kwargs))


def _captured(function: Any) -> Any:
    return _named_as(function, lambda self, *args, **kwargs: runner_of(self)(args, kwargs, function.__name__, self))


def _in_region(function: Any, kind: type | None = None) -> Any:
    """Return a method of the author's that runs under the view's autocast, a generator or coroutine at each step.

    One that is plain is that which its class, `kind`, has at the call.
    """
    make = next((make for is_kind, make in _STEPPED.items() if is_kind(function)), None)
    made = _plain(function, kind) if make is None else make(function, functools.partial(_begun, function))
    return _named_as(function, made)


def _begun(function: Any, view: Any, args: Any, kwargs: Any) -> Any:
    """Return what opens the region for a method; None while it is compiled, or where the region is open already."""
    region = _region(view, args, kwargs)
    if region is not None:
        runner_of(view).say_uncaptured(function.__name__)
    return region


def _region(view: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return None
    runner = runner_of(view)
    runner.settle((args, kwargs))
    return None if runner.graphs.in_region() else runner.graphs.region


def _plain(author: Any, kind: type | None) -> Any:
    name = author.__name__

    def in_region_of_view(self: Any, *args: Any, **kwargs: Any) -> Any:
        region = _region(self, args, kwargs)
        function = author if kind is None else vars(kind).get(name, author)
        if region is None:
            return function(self, *args, **kwargs)
        with region():
            made = function(self, *args, **kwargs)
        if kind is not None and name != "generate":  # where there are tensors, a line of the log says it
            values = pytree.tree_leaves((args, kwargs, made))
            if any(isinstance(value, torch.Tensor) for value in values):
                runner_of(self).say_uncaptured(name)
        return made

    CALLERS[id(in_region_of_view.__code__)] = "a method of a view that is not captured"
    return in_region_of_view


def _generator(function: Any, begun: Callable[..., Any]) -> Any:
    def generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (yield from _stepped(begun(self, args, kwargs), function(self, *args, **kwargs)))

    return generator


def _coroutine(function: Any, begun: Callable[..., Any]) -> Any:
    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await _awaited(begun(self, args, kwargs), function(self, *args, **kwargs))

    return coroutine


def _asynchronous_generator(function: Any, begun: Callable[..., Any]) -> Any:
    async def generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        region, made, value = begun(self, args, kwargs), function(self, *args, **kwargs), None
        try:
            while True:
                value = yield await _awaited(region, made.asend(value))
        except StopAsyncIteration:
            pass
        finally:
            await made.aclose()

    return generator


_STEPPED = {
    inspect.isgeneratorfunction: _generator, inspect.iscoroutinefunction: _coroutine,
    inspect.isasyncgenfunction: _asynchronous_generator,
}  # fmt: skip


def _stepped(region: Any, steps: Any) -> Generator[Any, Any, Any]:
    """Run a generator, or what awaits, with a region open while it runs, and closed while it waits."""
    step, value = steps.send, None
    try:
        while True:
            with contextlib.nullcontext() if region is None else region():
                made = step(value)
            try:
                step, value = steps.send, (yield made)
            except GeneratorExit:
                raise
            except BaseException as e:
                step, value = steps.throw, e
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


_awaited: Any = types.coroutine(_stepped)


def _named_as(author: Any, call: Any) -> Any:
    """Give a function the author's name, text and signature, but no `__wrapped__`, which would get past the view."""
    call.__name__, call.__qualname__ = author.__name__, author.__qualname__
    call.__doc__, call.__module__ = author.__doc__, author.__module__
    call.__signature__ = inspect.signature(author)
    return call
