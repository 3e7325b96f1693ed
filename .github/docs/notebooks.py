"""Run the notebooks of this folder, and write their outputs: `python .github/docs/notebooks.py`.

With `--check` it writes nothing, and fails where a cell fails or prints another text than the one committed.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def run(path: Path) -> Any:
    """Return a notebook with the outputs of a fresh run, without what changes from run to run."""
    book = nbformat.read(path, as_version=4)
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])})
    NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(HERE))
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    book.metadata.pop("language_info", None)
    return book


def printed(book: Any) -> list[str]:
    """Return what each cell prints, without numbers of lines."""
    outputs = [o for cell in book.cells for o in cell.get("outputs", ())]
    return [re.sub(r"\.py:\d+", ".py", o.get("text") or o.data["text/plain"]) for o in outputs]


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        made = run(path)
        if "--check" not in sys.argv:
            nbformat.write(made, path)
        elif printed(made) != printed(nbformat.read(path, as_version=4)):
            sys.exit(f"{path.name} prints something else now: run {Path(__file__).name} and commit what it writes")
