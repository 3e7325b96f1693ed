"""Load an integration with the package that it is for, or say which one is missing or too old."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

from passes.contract.errors import FxampError


def loaded(module: str, name: str, names: Sequence[str], package: str, oldest: tuple[int, int]) -> Any:
    """Return one of the `names` of a public module, which is for a package of at least the `oldest` version.

    Raises:
        AttributeError: it has no such name.
        FxampError: the package is missing, or too old.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    extra, wanted = module.rpartition(".")[2], ".".join(map(str, oldest))
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as e:
        raise FxampError(f"{module} needs {package}: pip install 'fxamp[{extra}]'") from e
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
        raise FxampError(f"{module} needs {package} {wanted} or newer, and {version} is installed: pip install -U it")
    return getattr(importlib.import_module(f"fxamp.integrations.{extra}"), name)
