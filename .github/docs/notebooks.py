"""Run the notebooks of this folder, and write their outputs: `python .github/docs/notebooks.py`.

With `--check` it writes nothing, and fails where a cell fails or gives something else than what is committed: text, or
a page, which is compared where it was made with this torch.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import torch
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


# Numbers of lines, and versions, which a page has too.
_CHANGES = re.compile(r"(?<=\.py):\d+|\d+\.\d+\.\d+(\+\w+)?|&quot;line&quot;:\d+")


def given(book: Any, pages: bool) -> list[dict[str, str]]:
    """Return all that each cell gives, by its kind, without what changes from run to run."""
    outputs = [o for cell in book.cells for o in cell.get("outputs", ())]
    kinds = [{"text": o["text"]} if "text" in o else dict(o.data) for o in outputs]
    return [
        {kind: _CHANGES.sub("", str(text)) for kind, text in each.items() if pages or kind != "text/html"}
        for each in kinds
    ]


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        made, committed = run(path), nbformat.read(path, as_version=4)
        pages = torch.__version__ in str(committed)
        if "--check" not in sys.argv:
            nbformat.write(made, path)
        elif given(made, pages) != given(committed, pages):
            sys.exit(f"{path.name} gives something else now: run {Path(__file__).name} and commit what it writes")
