"""The documentation site: guides, notebooks and the reference of docstrings, made by Sphinx.

    python -m sphinx -W -b html .github/docs build/site

The README opens the site, so that it can be followed from there alone. It and the guides are read on the project's page
as well; links of theirs to files outside of this folder lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fxamp  # noqa: E402  (the path comes first)

REPOSITORY = "https://github.com/fxamp/fxamp/blob/main/"
DOCS = ".github/docs"
RELATIVE = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")

project, author = "fxamp", "the fxamp authors"
copyright = "the fxamp authors"
release = version = fxamp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", "fxamp"
myst_heading_anchors = 3
nb_execution_mode = "off"  # their outputs are committed, and a test runs them
default_role = "code"  # docstrings write code between single backticks
autodoc_typehints, autodoc_member_order = "none", "bysource"


def _linked(text: str, folder: str) -> str:
    """Let links of a page in a folder of the repository lead to pages of the site, or to the repository."""

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if not (ROOT / path).exists():  # code, such as `layers[0](x)`
            return found[0]
        here = path.startswith(f"{DOCS}/") or path.endswith(".png")
        return f"]({posixpath.relpath(path, DOCS) if here else REPOSITORY + path}"

    return RELATIVE.sub(link, text)


def _read(_: Sphinx, name: str, source: list[str]) -> None:
    """Make a page of the site out of the text of a guide, and the first one out of the README too."""
    source[0] = _linked(source[0], DOCS)
    if name == "index":
        source[0] = f"{_linked((ROOT / 'README.md').read_text(encoding='utf-8'), '')}\n{source[0]}"


def setup(app: Sphinx) -> None:
    """Register what is done to a page before it is read."""
    app.connect("source-read", _read)
