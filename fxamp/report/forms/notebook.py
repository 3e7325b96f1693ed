"""Rich display in notebooks: a page in a frame, or text as it is."""

from __future__ import annotations

import html


def in_notebook(page: str, height: int = 720) -> str:
    """Return markup that shows a page in a frame of its own, where its style and its script touch nothing else.

    Args:
        page: a whole HTML page.
        height: of the frame, in pixels.
    """
    inside = html.escape(page, quote=True)
    return f'<iframe srcdoc="{inside}" style="width:100%;height:{height}px;border:0" sandbox="allow-scripts"></iframe>'


def as_text(text: str) -> str:
    """Return markup that shows text in a fixed width."""
    return f'<pre style="overflow-x:auto">{html.escape(text)}</pre>'
