"""The documentation site: guides, notebooks and the reference of docstrings, made by Sphinx.

    python -m sphinx -W -b html .github/docs build/site

Guides and the README are read on the project's page as well; links of theirs to files outside of this folder lead to
the repository.
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
RELATIVE = re.compile(r"\]\((\.\./[^)#\s]+)")

project, author = "fxamp", "the fxamp authors"
copyright = "the fxamp authors"
release = version = fxamp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", "fxamp"
myst_heading_anchors = 3
nb_execution_mode = "off"  # their outputs are committed, and a test runs them
default_role = "code"  # docstrings write code between single backticks
autodoc_typehints, autodoc_member_order = "none", "bysource"


def _to_repository(_: Sphinx, name: str, source: list[str]) -> None:
    """Let links that leave this folder lead to the repository."""
    at = posixpath.join(".github/docs", posixpath.dirname(name))
    source[0] = RELATIVE.sub(lambda m: f"]({REPOSITORY}{posixpath.normpath(posixpath.join(at, m[1]))}", source[0])


def setup(app: Sphinx) -> None:
    """Register what is done to a page before it is read."""
    app.connect("source-read", _to_repository)
