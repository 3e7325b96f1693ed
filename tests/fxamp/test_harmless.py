"""What a terminal, Markdown and a workflow's log would obey is shown as text."""

from __future__ import annotations

import json

import pytest

from fxamp import harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blocks.0.fc/linear#0", "blocks.0.fc/linear#0"),
        ("my_lib::my_op", "my_lib::my_op"),
        ("größe 层", "größe 层"),
        ("\x1b[2J\a", r"\x1b[2J\x07"),
        ("two\nlines", r"two\nlines"),
        ("\u202eright to left", r"\u202eright to left"),
        ("\x9b31m", r"\x9b31m"),
        ("\udcff", r"\udcff"),
        ("::error file=x::", ": :error file=x::"),
        ("  ::warning::", "  : :warning::"),
        ("a ##[error] b ##vso[task.x]", "a # #[error] b # #vso[task.x]"),
    ],
)
def test_what_is_no_text_is_written_as_its_escape(text: str, shown: str) -> None:
    assert harmless.visible(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>x</script>", "&lt;script>x&lt;/script>"),
        ("a|b", r"a\|b"),
        ("a\\|b", r"a\\\|b"),
        ("`code`", r"\`code\`"),
        ("![x](http://a.b)", r"!\[x\](http://a.b)"),
        ("&lt;", "&amp;lt;"),
    ],
)
def test_markdown_is_neither_html_nor_a_link_nor_the_end_of_a_cell(text: str, shown: str) -> None:
    assert harmless.markdown(text) == shown


def test_json_means_the_same() -> None:
    data = {"k": "\x9b\u202e\ud800\U000e0001 ##[x] ::y é \\u0041"}
    shown = harmless.as_json(json.dumps(data, ensure_ascii=False, indent=1))
    assert json.loads(shown) == data
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "##[" not in shown
