"""A TARGET of the command line: a function that makes a model or a TrainStep and its inputs; and one step of these."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from passes.contract.errors import FxampError, PolicyError
from passes.contract.policy import Policy, nearest

if TYPE_CHECKING:
    from torch import nn

TARGET_FORM = "TARGET is package.module:callable or path/file.py:callable, looked up from the current directory"
A_LOSS = (
    "let TARGET return (fxamp.TrainStep(model, loss_fn, optimizer), (inputs, target)), or a model whose output is a "
    "loss, or has one as .loss"
)


def load_target(target: str) -> tuple[object, object, object]:
    """Import `package.module:callable` or `path/file.py:callable`, call it, and return (model, args, kwargs)."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise FxampError(f"{target!r} is not a target; {TARGET_FORM}")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except KeyboardInterrupt:
        raise
    # Not only Exception: a module that calls sys.exit would choose our exit status, others would leave a traceback.
    except BaseException as error:
        raise FxampError(f"cannot import {where!r} ({type(error).__name__}: {error}); {TARGET_FORM}") from error
    build = getattr(module, name, None)
    if not callable(build):
        problem = "has no" if build is None else "has no callable"
        near = nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise FxampError(f"{where!r} {problem} {name!r}{near}; {TARGET_FORM}")
    try:
        made = build()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FxampError(
            f"{target!r} raised {type(error).__name__}: {error}; it is called without arguments"
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise FxampError(
            f"{target!r} returned {len(parts)} things; return model, (model, args) or (model, args, kwargs)"
        )
    model, args, kwargs = (*parts, None, None)[:3]
    return model, args, kwargs


def _import_file(path: Path) -> ModuleType:
    # A file that has the name of a loaded module must not replace it.
    name = path.stem if path.stem not in sys.modules else f"_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FxampError(f"cannot import {str(path)!r}; {TARGET_FORM}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def run_target(made: tuple[Any, Any, Any], policy: Policy, *, own: bool) -> tuple[nn.Module | None, list[str]]:
    """Run a step; return the module that has the plan, None for a model to be converted, and what ran otherwise.

    Args:
        made: what the target returned: (model, args, kwargs), (TrainStep, inputs) or (TrainStep, inputs, target).
        policy: what a model is converted by.
        own: no policy was given, so that of a converted model or of a TrainStep holds.

    Raises:
        FxampError: there is nothing to run it with.
        PolicyError: a policy was given for what has its own.
    """
    from torch import nn

    from ..convert import convert, converted_in
    from ..trust.census.census import census

    given, inputs, target = step_of(made, "check: --run needs a batch")
    whole = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    has_plan = isinstance(whole, nn.Module) and bool(converted_in(whole))
    if has_plan and not own:
        raise PolicyError("check: the target is converted already, by its own policy; leave out --policy")
    if isinstance(given, nn.Module) and not has_plan:
        given = convert(given, policy=policy)
    found = census(given, inputs, target)
    if found.planned is None:
        raise FxampError("check: nothing of the target is converted: give the TrainStep what fxamp.convert returned")
    return whole if has_plan else None, list(map(str, found.differences))


def step_of(made: tuple[Any, Any, Any], needs: str) -> tuple[Any, Any, Any]:
    """Return a model or a TrainStep, its inputs as every diagnostic takes them, and what its loss compares with.

    Raises:
        FxampError: there is no batch, and who `needs` one.
    """
    from torch import nn

    model, args, kwargs = made
    if args is None and kwargs is None:
        raise FxampError(f"{needs}: let the target return ({type(model).__name__}, batch)")
    if isinstance(model, nn.Module):
        return model, _batch(model, args, kwargs), None
    if kwargs is None and isinstance(args, tuple) and len(args) == 2 and getattr(model, "loss_fn", None) is not None:
        return model, *args  # the step has a loss of its own, so that a pair is inputs and target
    return model, args, kwargs


def _batch(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a model is called with as one batch."""
    if not kwargs:
        return tuple(args) if isinstance(args, list) else args
    args = () if args is None else args if isinstance(args, (tuple, list)) else (args,)
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments
