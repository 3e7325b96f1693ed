"""Make a page from a template, with its style and its scripts inside. It can run no other script and fetch nothing.

Everything that is put into a template is escaped. The page's own policy (CSP) names the hashes of its style and its
scripts, so that not even markup that got in could run or load anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from ..forms.harmless import visible

# Characters that could end the data early in HTML or in the script. In JSON their escapes mean the same text.
_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(template: str, *, title: str, data: Any, scripts: Sequence[str], **values: Any) -> str:
    """Return a page as text.

    Args:
        template: name of a template that extends `base.html`.
        title: title of the page.
        data: for the scripts, which find it as JSON in the element "data".
        scripts: names of the scripts, in the order in which they run.
        values: for the template.
    """
    style = _source("page.css")
    code = "\n".join(_source(name) for name in scripts)
    text = json.dumps(_all_shown(data), ensure_ascii=False, separators=(",", ":")).translate(_ENDS)
    return _environment().get_template(template).render(
        title=title, style=Markup(style), code=Markup(code), data=Markup(text), style_hash=_hash(style),
        code_hash=_hash(code), **values,
    )  # fmt: skip


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fxamp.report.page"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_shown,
    )  # fmt: skip
    made.filters["mb"] = lambda value: "" if value is None else f"{value / 1e6:.3g}"
    return made


def _shown(value: Any) -> Any:
    """Return a text without characters that change how other text is shown, such as a change of direction."""
    return visible(value) if type(value) is str else value


def _all_shown(data: Any) -> Any:
    """Return data with every text made harmless, since a script shows texts as they are."""
    if isinstance(data, str):
        return _cached(data)
    if isinstance(data, dict):
        return {_cached(key): _all_shown(value) for key, value in data.items()}
    return [_all_shown(value) for value in data] if isinstance(data, (list, tuple)) else data


_cached = functools.lru_cache(maxsize=10_000)(visible)  # most texts of a page are there many times


def _source(name: str) -> str:
    """Return the text of a script or a style, which is ours."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(text: str) -> str:
    """Return the hash of the content of an element, in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
