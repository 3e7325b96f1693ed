"""A TARGET, `package.module:callable` or `path/file.py:callable`: a function that makes a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from passes.contract.errors import FxampError
from passes.contract.policy import nearest

TARGET_FORM = "TARGET is package.module:callable or path/file.py:callable, looked up from the current directory"


def load_target(target: str) -> tuple[object, object, object]:
    """Import a target, call it, and return (model, args, kwargs)."""
    return call_target(target, load_callable(target))


def load_callable(target: str) -> Callable[..., Any]:
    """Import `package.module:callable` or `path/file.py:callable`."""
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
    found: Callable[..., Any] = build
    return found


def call_target(target: str, build: Callable[..., Any], **options: Any) -> tuple[object, object, object]:
    """Call what a target names, and return (model, args, kwargs)."""
    try:
        made = build(**options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        how = f"with {', '.join(options)}" if options else "without arguments"
        raise FxampError(f"{target!r} raised {type(error).__name__}: {error}; it is called {how}") from error
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
