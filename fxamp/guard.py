"""`passes` is a common name: raise an error at import if another package of that name hides ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def refuse_foreign_passes() -> None:
    """Raise ImportError when `import passes` does not find the package installed beside fxamp."""
    spec = importlib.util.find_spec("passes")
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    ours = Path(__file__).resolve().parent.parent / "passes" / "__init__.py"
    if found != ours:
        raise ImportError(
            f"fxamp brings a package named 'passes' ({ours}), and 'import passes' finds {found or 'none'} instead: "
            "rename that module, or import it as a part of a package of yours."
        )
