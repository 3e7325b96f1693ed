"""The page of a report in a real browser: Debian's chromium, driven by playwright; skipped where there is none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fxamp
from fxamp.report.forms.harmless import visible
from fxamp.report.page import page as made_page
from reports.subjects import converted
from tests.support.records import HOSTILE, hostile_report, node

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("there is no chromium here; Debian has it as the package of that name", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # a container's root has none
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page") / "report.html"
    made.write_text(fxamp.report(converted("hf_bert", "O2,dtype=bf16")).to_html(), encoding="utf-8")
    return made


Opened = Callable[..., Any]


class Said:
    """What pages said, and what they asked for beside themselves."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.own: list[str] = []

    def listen(self, page: Any) -> Any:
        page.on("console", lambda message: self.lines.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.lines.append(f"error: {error}"))
        page.on("request", lambda request: self.asked(request.url))
        return page

    def asked(self, url: str) -> None:
        if not any(own in url for own in self.own):
            self.lines.append(f"asked: {url}")


SIZE = {"width": 1400, "height": 900}


@pytest.fixture(scope="module")
def kept(browser: Any) -> tuple[Any, Said]:
    """Return a page that all tests open their files in, one after the other: a new one takes a process."""
    said = Said()
    return said.listen(browser.new_context().new_page()), said


@pytest.fixture
def opened(browser: Any, kept: tuple[Any, Said], file: Path) -> Iterator[Opened]:
    """Open the page, and afterwards hold that it said nothing and asked for nothing."""
    page, said = kept
    said.lines.clear()
    contexts = []

    def open_page(fragment: str = "", at: Path = file, **how: Any) -> Any:
        said.own.append(at.as_uri())
        found = page
        if how or fragment:
            contexts.append(browser.new_context(viewport=SIZE, **how))
            found = said.listen(contexts[-1].new_page())
        else:
            page.goto("about:blank")
            page.set_viewport_size(SIZE)
        found.goto(at.as_uri() + fragment)
        return found

    yield open_page
    for context in contexts:
        context.close()
    assert said.lines == []


def rows(page: Any) -> list[str]:
    return [row.get_attribute("data-path") for row in page.locator("#tree tbody tr:visible").all()]


def focused(page: Any, attribute: str) -> Any:
    return page.evaluate(f"document.activeElement.getAttribute('{attribute}')")


def test_a_module_folds_and_unfolds(opened: Opened) -> None:
    page = opened()
    assert rows(page)[0] == ""
    before = rows(page)
    page.locator("#tree tr[data-path='bert']").locator(".fold").click()
    assert not any(path.startswith("bert.") for path in rows(page))
    page.locator("#tree tr[data-path='bert']").locator(".fold").click()
    assert rows(page) == before


def test_a_search_finds_nodes_in_the_whole_model_and_escape_ends_it(opened: Opened) -> None:
    page = opened()
    before = rows(page)
    page.keyboard.press("/")
    page.keyboard.type("layer_norm")
    count = int(page.locator("#found").inner_text().split()[0])
    assert count == page.locator("#node-table tbody tr").count() > 0
    assert all("layer_norm" in text for text in page.locator("#node-table tbody th").all_inner_texts())
    assert page.locator("#tree tbody tr:visible").count() < page.locator("#tree tbody tr").count()
    page.keyboard.press("Escape")
    assert page.locator("#found").inner_text() == ""
    assert rows(page) == before


def test_the_tree_is_walked_by_keys(opened: Opened) -> None:
    page = opened()
    page.locator("#tree tr[data-path='']").focus()
    page.keyboard.press("ArrowDown")
    first = focused(page, "data-path")
    assert first
    page.keyboard.press("ArrowLeft")
    assert page.locator(f"#tree tr[data-path='{first}']").get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert focused(page, "data-path").startswith(f"{first}.")
    page.keyboard.press("Enter")
    assert page.locator("#chosen").inner_text() == focused(page, "data-path")
    page.keyboard.press("End")
    assert focused(page, "data-path") == rows(page)[-1]
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert rows(page) == [""]


def test_a_drawing_is_walked_by_keys_and_its_node_is_explained(opened: Opened) -> None:
    page = opened()
    layer = "bert.encoder.layer.0"
    page.locator(f"#tree tr[data-path='{layer}']").click()
    assert page.locator("#chosen").inner_text() == layer
    assert page.locator("#canvas .box").count() > 10
    assert page.locator("#canvas .cast").count() > 0
    page.locator("#canvas .box[tabindex='0']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    key = page.locator("#panel h2").inner_text()
    assert key.startswith(layer)
    text = page.locator("#panel").inner_text()
    assert "why" in text
    assert re.search(r"\w+\.py:\d+", text)
    boxes = page.locator("#canvas .box:visible").count()
    page.keyboard.press("z")
    assert 1 < page.locator("#canvas .box:visible").count() < boxes
    assert page.locator("#near").get_attribute("aria-pressed") == "true"
    page.keyboard.press("z")
    assert page.locator("#canvas .box:visible").count() == boxes


def test_a_folded_module_opens_its_own_drawing(opened: Opened, tmp_path: Path) -> None:
    nodes = tuple(node(i, module=f"layers.{i // 50}.block{i // 25 % 2}") for i in range(600))
    record = fxamp.report(converted("hf_bert", "O2,dtype=bf16")).record
    assert record is not None
    (tmp_path / "folded.html").write_text(made_page(msgspec.structs.replace(record, nodes=nodes)), encoding="utf-8")
    page = opened(at=tmp_path / "folded.html")
    page.locator("#canvas .box.module").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#chosen").inner_text() == "layers.0.block0"
    chosen = page.locator("#tree tr[aria-selected='true']").get_attribute("data-path")
    assert chosen == page.locator("#chosen").inner_text()


def test_tabs_are_walked_by_keys_and_the_comparison_marks_what_differs(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-graph").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert focused(page, "id") == "tab-compare"
    assert page.locator("#compare").is_visible()
    assert not page.locator("#graph").is_visible()
    all_rows = page.locator("#compare-table tbody tr").count()
    page.locator("#which").select_option("autocast")
    marked = page.locator("#compare-table tbody tr")
    assert 0 < marked.count() < all_rows
    assert marked.count() == page.locator("#compare-table tbody tr.differs").count()


def test_a_cause_is_followed_to_its_drawing_and_a_table_stays_where_it_is(opened: Opened) -> None:
    page = opened()
    page.locator("#tree tr[data-path='bert.encoder.layer.0']").click()
    page.locator("#tab-nodes").click()
    page.locator("#node-table tbody button").first.click()
    first = page.locator("#panel h2").inner_text()
    assert page.locator("#chosen").inner_text() == "bert.encoder.layer.0"
    assert page.locator("#said").inner_text().startswith(f"{first} runs in ")
    page.locator("#panel .chain button").first.click()
    cause = page.locator("#panel h2").inner_text()
    assert cause != first
    assert page.evaluate("document.activeElement === document.querySelector('#panel h2')")
    page.locator("#tab-graph").click()
    assert cause.partition("/")[0] in page.locator("#canvas .box.chosen").get_attribute("aria-label")


def test_a_link_to_a_node_opens_it(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-nodes").click()
    page.locator("#node-table tbody tr").nth(5).locator("button").click()
    key = page.locator("#panel h2").inner_text()
    again = opened(page.evaluate("location.hash"))
    assert again.locator("#panel h2").inner_text() == key


@pytest.mark.parametrize(
    "text", [t if i in (0, 1, 3, 5, 8) else pytest.param(t, marks=pytest.mark.matrix) for i, t in enumerate(HOSTILE)]
)
def test_names_that_want_to_be_markup_are_text(opened: Opened, tmp_path: Path, text: str) -> None:
    (tmp_path / "hostile.html").write_text(hostile_report(text).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "hostile.html")
    assert page.title().startswith(visible(text)[:5])
    page.locator("#canvas .box").last.click()
    assert visible(text) in page.locator("#panel").text_content()
    for name in ("nodes", "compare", "lines"):
        page.locator(f"#tab-{name}").click()
    page.locator("#search").fill(text.replace("\n", " "))
    assert page.locator("script").count() == 2
    assert page.locator("img, main svg svg, [onload], [onerror]").count() == 0


def luminance(colour: str) -> float:
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(opened: Opened, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    page.locator("#tab-compare").click()
    page.locator("#compare-table tbody button").first.click()
    assert (luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) is (scheme == "light")
    read = """(css) => [...document.querySelectorAll(css)].filter((e) => e.checkVisibility()).map((e) => {
        let behind = e;
        while (/rgba\\(.*, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
        return [e.className || e.tagName, getComputedStyle(e).color, getComputedStyle(behind).backgroundColor];
    })"""
    found = page.evaluate(read, "h1, p, dt, dd, th, td, button, .dtype, .key, .mark, caption, code")
    assert len(found) > 50
    for name, text, behind in found:
        light, dark = sorted((luminance(text), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, text, behind)


def test_a_narrow_window_does_not_scroll_sideways(opened: Opened) -> None:
    page = opened()
    for width in (1400, 1000, 600, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_that_can_be_pressed_has_a_name(opened: Opened) -> None:
    page = opened()
    page.locator("#canvas .box").first.click()
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, select, [role=button]")]
        .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
        .map((e) => e.outerHTML)""")
    assert nameless == []
