"""The page of a report in a real browser: Debian's chromium, driven by playwright; skipped where there is none."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from torch import nn

import fxamp
from fxamp.demo import LeNet5
from fxamp.harmless import visible
from fxamp.report.forms.text import costliest
from tests.support.records import HOSTILE, hostile_report, node, report_of
from tests.support.subjects import converted, subject

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
            contexts.append(browser.new_context(**{"viewport": SIZE} | how))
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
    return page.evaluate("[...document.querySelectorAll('#tree tbody tr')].map((row) => row.dataset.path)")


def focused(page: Any, attribute: str) -> Any:
    return page.evaluate(f"document.activeElement.getAttribute('{attribute}')")


def chosen(page: Any) -> str:
    """Return the key of the node that is explained."""
    return str(page.locator("#panel h2").get_attribute("data-key"))


BOXES = """(host) => [...document.querySelectorAll(`${host} .box`)].map((box) => {
    const { x, y, width, height } = box.querySelector(".face").getBoundingClientRect();
    const [label, open] = [box.querySelector(".label").textContent, box.classList.contains("open")];
    return { id: box.dataset.id, label, open, x, y, width, height };
})"""


def boxes(page: Any, host: str = "#canvas") -> dict[str, dict[str, Any]]:
    page.wait_for_timeout(300)  # boxes move to their places
    return {box["id"]: box for box in page.evaluate(BOXES, host)}


def labelled(page: Any, label: str, host: str = "#canvas") -> Any:
    return page.locator(f"{host} .box", has=page.locator(f"text.label:text-is('{label}')"))


def click_a_box(page: Any) -> None:
    """Click the first box that is not unfolded and is seen."""
    canvas = page.locator("#canvas").bounding_box()
    for box in boxes(page).values():
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        seen = (
            canvas["y"] < y < min(canvas["y"] + canvas["height"], 800)
            and canvas["x"] < x < canvas["x"] + canvas["width"]
        )
        if seen and not box["open"]:
            page.mouse.click(x, y)
            return
    raise AssertionError("no box is seen")


def overlapping(found: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the boxes that lie over each other, but not inside each other."""

    def over(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(
            a[at] < b[at] + b[size] - 0.5 and b[at] < a[at] + a[size] - 0.5
            for at, size in (("x", "width"), ("y", "height"))
        )

    def within(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return bool(b["open"]) and all(
            a[at] >= b[at] - 0.5 and a[at] + a[size] <= b[at] + b[size] + 0.5
            for at, size in (("x", "width"), ("y", "height"))
        )

    return [
        (a["label"], b["label"]) for a, b in itertools.combinations(found.values(), 2)
        if over(a, b) and not within(a, b) and not within(b, a)
    ]  # fmt: skip


def test_a_module_of_the_tree_folds_and_unfolds(opened: Opened) -> None:
    page = opened()
    before = rows(page)
    assert before[0] == ""
    page.locator("#tree tr[data-path='bert'] .fold").click()
    assert not any(path.startswith("bert.") for path in rows(page))
    page.locator("#tree tr[data-path='bert'] .fold").click()
    assert rows(page)[:3] == before[:3]


def test_equal_layers_are_one_row_and_one_box(opened: Opened, tmp_path: Path) -> None:
    many = [node(i, module=f"layer.{i // 10}.part{i // 5 % 2}") for i in range(120)]
    (tmp_path / "layers.html").write_text(report_of(many).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "layers.html")
    assert "12" in page.locator("#tree tr[data-path='layer.0-11']").inner_text()
    assert page.locator("#canvas .box").count() == 1
    assert "12 × 10 nodes" in page.locator("#canvas .box").text_content()  # noqa: RUF001
    labelled(page, "layer.0-11").click()
    assert {box["label"] for box in boxes(page).values()} == {"layer.0-11", *(f"layer.{i}" for i in range(12))}


def test_a_search_finds_nodes_in_the_whole_model_and_escape_ends_it(opened: Opened) -> None:
    page = opened()
    page.keyboard.press("/")
    page.keyboard.type("layer_norm")
    count = int(page.locator("#found").inner_text().split()[0])
    assert count == page.locator("#node-table tbody tr").count() > 0
    assert all("layer_norm" in text for text in page.locator("#node-table tbody th").all_inner_texts())
    page.keyboard.press("Escape")
    assert page.locator("#found").inner_text() == ""


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
    path = focused(page, "data-path")
    assert page.locator(f"#tree tr[data-path='{path}']").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert focused(page, "data-path") == rows(page)[-1]
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert rows(page) == [""]


def test_unfolding_keeps_the_rest_and_the_box_where_they_are(opened: Opened) -> None:
    page = opened()
    page.locator("#whole").click()
    before = boxes(page)
    closed = page.locator("#canvas .boxes .box[aria-expanded=false]").first
    box = before[closed.get_attribute("data-id")]
    closed.click()
    after = boxes(page)
    assert after[box["id"]]["open"]
    assert before.keys() < after.keys()
    same = after[box["id"]]
    assert same["x"] + same["width"] / 2 == pytest.approx(box["x"] + box["width"] / 2, abs=2)
    assert same["y"] == pytest.approx(box["y"], abs=2)
    order = sorted((b for b in before.values() if b["y"] > box["y"] + box["height"]), key=lambda b: b["y"])
    assert [b["id"] for b in sorted((after[b["id"]] for b in order), key=lambda b: b["y"])] == [b["id"] for b in order]
    assert overlapping(after) == []
    page.locator("#back").click()
    assert boxes(page).keys() == before.keys()
    again = page.locator(f"#canvas [data-id='{box['id']}']")
    again.click()
    again.locator(".label").first.click()
    assert boxes(page).keys() == before.keys()


def test_a_drawing_is_walked_by_keys_and_its_node_is_explained(opened: Opened) -> None:
    page = opened()
    page.locator("#canvas .box[tabindex='0']").focus()
    seen = set()
    for _ in range(6):
        page.keyboard.press("ArrowDown")
        seen.add(focused(page, "data-id"))
    assert len(seen) > 3
    page.locator("#search").fill("scaled_dot")
    page.locator("#node-table tbody button").first.click()
    text = page.locator("#panel").inner_text()
    assert "why" in text
    assert re.search(r"\w+\.py:\d+", text)
    page.locator("#tab-graph").click()
    assert "scaled_dot" in page.locator("#canvas .box.chosen").get_attribute("aria-label")
    count = page.locator("#canvas .box").count()
    page.locator("#canvas .box.chosen").focus()
    page.keyboard.press("Escape")
    assert page.locator("#canvas .box.chosen").get_attribute("aria-expanded") == "true"
    page.keyboard.press("Enter")
    assert page.locator("#canvas .box").count() < count


def test_it_is_moved_by_dragging_and_zoomed_by_the_wheel_and_by_two_fingers(opened: Opened) -> None:
    page = opened()
    before = boxes(page)
    canvas = page.locator("#canvas").bounding_box()
    x, y = canvas["x"] + 20, canvas["y"] + canvas["height"] - 120
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 30, steps=4)
    page.mouse.up()
    moved = boxes(page)
    assert {round(moved[i]["x"] - before[i]["x"]) for i in before} == {60}
    page.mouse.wheel(0, -300)
    assert all(box["width"] > moved[i]["width"] for i, box in boxes(page).items())
    assert page.locator("#canvas .minimap").is_visible()
    wide = boxes(page)
    cdp = page.context.new_cdp_session(page)
    for kind, apart in (("touchStart", 40), ("touchMove", 80), ("touchEnd", 0)):
        points = [{"x": x, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}] if apart else []
        cdp.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert all(box["width"] > wide[i]["width"] for i, box in boxes(page).items())


def test_it_is_coloured_by_what_is_asked_for(opened: Opened) -> None:
    page = opened()
    page.locator("#colour").select_option("cast")
    assert page.locator("#canvas .box.heated").count() > 3
    page.locator("#colour").select_option("differs")
    assert page.locator("#canvas .box.marked").count() > 0
    page.locator("#colour").select_option("policy")
    assert page.locator("#canvas .box.heated, #canvas .box.marked").count() == 0
    assert [o.is_disabled() for o in page.locator("#colour option").all()][-2:] == [False, True]  # no errors were given
    page.locator("[data-tile='casts']").click()
    assert page.locator("#colour").input_value() == "cast"


def test_the_comparison_opens_on_what_differs_on_both_sides_together(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-graph").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert focused(page, "id") == "tab-compare"
    assert not page.locator("#graph").is_visible()
    count = int(page.locator("#unlike").inner_text().split()[0])
    assert page.locator("#compare-table tbody tr").count() == count > 0
    left, right = boxes(page, "#left"), boxes(page, "#right")
    assert left.keys() == right.keys()
    canvas = page.locator("#left").bounding_box()
    page.mouse.move(canvas["x"] + 10, canvas["y"] + 10)
    page.mouse.wheel(0, 200)
    moved = boxes(page, "#right")
    assert all(moved[i]["width"] < right[i]["width"] for i in right)
    apart = {round(moved[i]["x"] - box["x"]) for i, box in boxes(page, "#left").items()}
    assert max(apart) - min(apart) <= 1
    differ = page.locator("#left .box.node.fp32:not(.faded)")
    assert differ.count() > 0
    assert page.locator("#right .box.node.low:not(.faded)").count() == differ.count()
    page.locator("#against").select_option("original")
    assert int(page.locator("#unlike").inner_text().split()[0]) > count


def test_a_cause_is_followed_to_its_drawing(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-nodes").click()
    page.locator("#search").fill("scaled_dot")
    page.locator("#node-table tbody button").first.click()
    first = chosen(page)
    page.locator("#panel .chain button").first.click()
    cause = chosen(page)
    assert cause != first
    assert page.evaluate("document.activeElement === document.querySelector('#panel h2')")
    page.locator("#tab-graph").click()
    assert cause.partition("/")[0] in page.locator("#canvas .box.chosen").get_attribute("aria-label")
    assert page.locator("#crumbs button").count() > 3


def test_a_chain_of_causes_shows_its_ends(opened: Opened, tmp_path: Path) -> None:
    many = [node(i, causes=(f"/op#{i - 1}",) if i else ()) for i in range(12)]
    (tmp_path / "chain.html").write_text(report_of(many).to_html(), encoding="utf-8")
    page = opened("#%2Fop%2311", at=tmp_path / "chain.html")
    assert page.locator("#panel .chain > li").count() == 3
    assert page.locator("#panel .chain summary").inner_text() == "9 nodes follow"
    assert page.locator("#panel .chain > li button").first.inner_text() == "/op#10"
    assert page.locator("#panel .chain > li > button").last.inner_text() == "/op#0"


def test_a_link_to_a_node_opens_it_and_one_that_cannot_be_read_is_ignored(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-nodes").click()
    page.locator("#node-table tbody tr").nth(5).locator("button").click()
    assert chosen(opened(page.evaluate("location.hash"))) == chosen(page)
    for fragment in ("#100%", "#nowhere", "#%ff", "#"):
        broken = opened(fragment)
        assert not broken.locator("#panel").is_visible()
        assert broken.locator("#canvas .box").count() > 3


def test_the_source_has_the_costliest_lines_first_and_shows_them_where_they_are(opened: Opened) -> None:
    page = opened()
    page.locator("#tab-source").click()
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "": 0.0}
    cells = page.locator("#ranks tbody tr td:nth-child(2)").all_inner_texts()
    costs = [float((text or "0").split()[0]) * units[text.partition(" ")[2]] for text in cells]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0
    page.locator("#ranks tbody button").first.click()
    line = page.locator("#ranks tbody button").first.inner_text()
    row = page.locator(f"#files .row[data-line='{line}']")
    assert row.is_visible()
    assert row.locator(".margin i").count() == 3
    assert line in page.locator("#panel").inner_text()


@pytest.mark.parametrize(
    "text", [t if i in (0, 1, 3, 5, 8) else pytest.param(t, marks=pytest.mark.matrix) for i, t in enumerate(HOSTILE)]
)
def test_names_that_want_to_be_markup_are_text(opened: Opened, tmp_path: Path, text: str) -> None:
    (tmp_path / "hostile.html").write_text(hostile_report(text).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "hostile.html")
    assert page.title().startswith(visible(text)[:5])
    for name in ("compare", "source", "nodes"):
        page.locator(f"#tab-{name}").click()
    page.locator("#node-table tbody button").last.click()
    assert visible(text) in page.locator("#panel").text_content()
    page.locator("#search").fill(text.replace("\n", " "))
    assert page.locator("script").count() == 2
    assert page.locator("img, svg svg, [onload], [onerror]").count() == 0


def luminance(colour: str) -> float:
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(opened: Opened, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    page.locator("#tab-compare").click()
    page.locator("#compare-table tbody button").first.click()
    page.locator("#panel h2").wait_for()
    assert (luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) is (scheme == "light")
    read = """(css) => [...document.querySelectorAll(css)].filter((e) => e.checkVisibility()).map((e) => {
        let behind = e;
        while (/rgba\\(.*, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
        return [e.className || e.tagName, getComputedStyle(e).color, getComputedStyle(behind).backgroundColor];
    })"""
    found = page.evaluate(
        read, "h1, p, dt, dd, th, td, button:not(:disabled), .pill, .key, .mark, caption, code, .tile span"
    )
    assert len(found) > 50
    for name, text, behind in found:
        light, dark = sorted((luminance(text), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, text, behind)


WIDTHS = (360, 800, 1400, 1900)
ENDS = (WIDTHS[0], WIDTHS[-1])
COLUMNS = """() => [...document.querySelectorAll(".long thead th")].filter((e) => e.checkVisibility()).map((th) => {
    const pen = document.createElement("canvas").getContext("2d");
    const { font, paddingLeft, paddingRight } = getComputedStyle(th);
    pen.font = font;
    const width = th.getBoundingClientRect().width - parseFloat(paddingLeft) - parseFloat(paddingRight);
    return [th.textContent, width / pen.measureText("0").width];
})"""


@pytest.mark.parametrize("width", [w if w in ENDS else pytest.param(w, marks=pytest.mark.matrix) for w in WIDTHS])
def test_at_every_width_nothing_scrolls_sideways_and_every_column_can_be_read(opened: Opened, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    for tab in ("graph", "nodes", "compare", "source"):
        page.locator(f"#tab-{tab}").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        narrow = [name for name, characters in page.evaluate(COLUMNS) if characters < 8]
        assert narrow == [], tab
        heights = page.evaluate(
            "[...document.querySelectorAll('.long tbody tr')].map((row) => row.getBoundingClientRect().height)"
        )
        assert max(heights, default=0) < 200, tab
    page.locator("#tab-graph").click()
    assert overlapping(boxes(page)) == []
    assert page.locator("#canvas").bounding_box()["width"] > 0.6 * width - 250


@pytest.mark.parametrize("width", [800, 1000])
def test_in_a_window_of_a_tablet_the_reason_of_a_node_is_seen_without_scrolling(opened: Opened, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    page.locator("#tab-nodes").click()
    table = page.locator("#node-table table").bounding_box()
    assert table["x"] + table["width"] <= width
    assert page.locator("#node-table thead th:visible").all_inner_texts()[-2:] == ["why", "your line"]


@pytest.mark.parametrize("width", [w if w in ENDS else pytest.param(w, marks=pytest.mark.matrix) for w in WIDTHS])
def test_at_every_width_a_click_brings_its_panel_into_view(opened: Opened, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    page.locator("#whole").scroll_into_view_if_needed()
    page.locator("#whole").click()
    click_a_box(page)
    place = page.locator("#panel h2").bounding_box()
    assert 0 <= place["x"] < width
    assert 0 <= place["y"] < 780
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [400, 800])
def test_in_a_narrow_window_the_drawing_has_its_height_and_what_is_chosen_is_seen(opened: Opened, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    assert page.locator("#canvas").bounding_box()["height"] > 0.6 * page.viewport_size["height"]
    page.locator("#tab-nodes").click()
    page.locator("#node-table tbody button").nth(60).click()
    page.locator("#tab-graph").click()
    page.wait_for_timeout(400)  # it moves there
    box, panel = (page.locator(at).bounding_box() for at in ("#canvas .box.chosen", "#panel"))
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= panel["y"]


def test_thirty_thousand_nodes_open_in_two_seconds_and_scroll(opened: Opened, tmp_path: Path) -> None:
    many = [node(i, module=f"layers.{i // 500}.block{i // 25 % 20}", bytes=100 + i % 7) for i in range(30_000)]
    (tmp_path / "many.html").write_text(report_of(many).to_html(), encoding="utf-8")
    seconds = []
    for _ in range(3):  # the machine may be busy
        begin = time.perf_counter()
        page = opened(at=tmp_path / "many.html")
        assert page.locator("#canvas .box").count() > 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 2
    page.locator("#tab-nodes").click()
    shown = page.locator("#node-table tbody tr").count()
    assert shown < 1_000
    page.evaluate("document.querySelector('#node-table').scrollTo(0, 1e9)")
    page.wait_for_function(f"document.querySelectorAll('#node-table tbody tr').length > {shown}")


def test_a_plan_alone_is_shown_without_costs(opened: Opened, tmp_path: Path) -> None:
    plan = fxamp.plan_of(converted("lenet5", "O1,dtype=bf16"))
    (tmp_path / "plan.html").write_text(fxamp.report(plan).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "plan.html")
    assert "a plan alone" in page.locator("#empty").inner_text()
    assert page.locator("#canvas .box").count() > 3
    for tab in ("nodes", "compare", "source"):
        page.locator(f"#tab-{tab}").click()
    assert "example inputs" in page.locator("#ranks").inner_text()


def test_a_census_has_a_tab_of_its_own(opened: Opened, tmp_path: Path) -> None:
    view = fxamp.convert(LeNet5(), (torch.randn(2, 1, 8, 8),), policy="O1,dtype=bf16")
    lost = nn.Linear(4, 4)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.float().sum() + view.fc3(torch.zeros(1, 84)).sum() + lost(torch.zeros(1, 4)).sum()

    found = fxamp.census(view, torch.randn(2, 1, 8, 8), loss=loss)
    (tmp_path / "census.html").write_text(fxamp.report(view).to_html(census=found), encoding="utf-8")
    page = opened(at=tmp_path / "census.html")
    low = sum(row.flops for row in found.ran if row.dtype == "bfloat16") / sum(row.flops for row in found.ran)
    tile = page.locator("[data-tile=ran]")
    assert tile.locator(".figure").inner_text() == f"{100 * low:.1f} %"
    tile.click()
    assert "of the arithmetic ran as planned" in page.locator("#share").inner_text()
    dtypes = {row.dtype: 0 for row in found.ran if not row.casts}
    for row in found.ran:
        dtypes[row.dtype] = dtypes.get(row.dtype, 0) + row.count * (not row.casts)
    table = page.locator("#dtypes tbody tr").all()
    assert {
        row.locator("th .pill").get_attribute("title"): int(row.locator("td").last.inner_text()) for row in table
    } == {dtype: count for dtype, count in dtypes.items() if count}
    assert "module fc3" in page.locator("#verdict").inner_text()
    rows = page.locator("#ran tbody tr")
    assert rows.count() == len(found.ran)
    page.locator("#ran tbody button", has_text="conv2/conv2d#0").first.click()
    assert page.locator("#panel h2").inner_text() == "conv2d#0"
    plain = opened()
    assert plain.locator("#tab-census").is_hidden()
    assert plain.locator("[data-tile=ran]").is_hidden()
    assert all("time" not in option for option in plain.locator("#colour option").all_inner_texts())


def test_each_side_of_the_comparison_has_its_own_casts(opened: Opened, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(self.down(self.up(x)))

    view = fxamp.convert(Net(), (torch.ones(2, 8),), policy="O2,dtype=bf16,modules.down=fp32")
    (tmp_path / "both.html").write_text(fxamp.report(view).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "both.html")
    page.locator("#tab-compare").click()
    weights = {side: page.locator(f"#{side} .weights").count() for side in ("left", "right")}
    assert weights == {"left": 2, "right": 1}  # autocast casts the weights of both layers
    page.locator("#against").select_option("original")
    assert page.locator("#left :is(.weights, .mark)").count() == 0


def test_it_is_coloured_by_predicted_error_where_there_is_one(opened: Opened, tmp_path: Path) -> None:
    found = subject("hf_bert")
    errors = fxamp.estimate_error(found.model, found.kwargs, loss=found.zoo.loss, policies="O2,dtype=bf16").policies[0]
    report = fxamp.report(converted("hf_bert", "O2,dtype=bf16"))
    (tmp_path / "errors.html").write_text(report.to_html(errors=errors), encoding="utf-8")
    most = max(shares := errors.by("key"), key=shares.__getitem__)
    page = opened(f"#{quote(most, safe='')}", at=tmp_path / "errors.html")
    page.locator("#colour").select_option("error")
    assert f"{float(f'{100 * shares[most]:.3g}'):g} %" in page.locator("#canvas .box.chosen .below").text_content()
    assert "of that of the loss" in page.locator("#panel").inner_text()
    assert page.locator("#canvas .box.heated").count() > 3


class Clicks:
    """Clicks and typed words of someone who sees a page for the first time."""

    def __init__(self, page: Any) -> None:
        self.page, self.count = page, 0

    def click(self, css: str) -> None:
        self.count += 1
        self.page.locator(css).first.click()


def test_a_newcomer_has_an_answer_in_three_clicks(opened: Opened, tmp_path: Path) -> None:
    vit = fxamp.report(converted("vit", "O1,dtype=bf16,ops.softmax=fp32"))
    (tmp_path / "vit.html").write_text(vit.to_html(), encoding="utf-8")
    why = Clicks(opened(at=tmp_path / "vit.html"))  # why is this softmax FP32
    why.click("#search")
    why.page.keyboard.type("softmax")
    why.click("#node-table tbody button")
    panel = why.page.locator("#panel").inner_text()
    assert "softmax#0" in panel
    assert "fp32" in panel
    assert "override" in panel
    assert "weights = torch.softmax" in panel
    line = Clicks(opened())  # which line costs most
    line.click("#tab-source")
    record = fxamp.report(converted("hf_bert", "O2,dtype=bf16")).record
    (dearest, *_), *_ = costliest(record, record.nodes)
    assert dearest.partition(": ")[0] in line.page.locator("#ranks tbody tr").first.inner_text()
    line.click("#ranks tbody button")
    assert line.page.locator("#files .row:focus-within").is_visible()
    differs = Clicks(opened())  # what differs from autocast
    differs.click("#tab-compare")
    assert "run in another precision than torch.autocast" in differs.page.locator("#unlike").inner_text()
    differs.click("#compare-table tbody button")
    assert "why" in differs.page.locator("#panel").inner_text()
    changed = fxamp.diff(converted("vit", "O1,dtype=bf16"), converted("vit", "O1,dtype=bf16,ops.softmax=fp32"))
    (tmp_path / "diff.html").write_text(changed.to_html(), encoding="utf-8")
    between = Clicks(opened(at=tmp_path / "diff.html"))  # what changed between two plans: the first thing on its page
    assert changed.totals in between.page.locator("h1").inner_text()
    row = between.page.locator("tr.changed", has_text="softmax#0").first.inner_text()
    assert "bfloat16" in row
    assert max(one.count for one in (why, line, differs, between)) <= 3


def test_a_report_is_shown_in_a_notebook(opened: Opened, tmp_path: Path) -> None:
    report = fxamp.report(converted("lenet5", "O1,dtype=bf16"))
    (tmp_path / "cell.html").write_text(f"<!doctype html>{report._repr_html_()}", encoding="utf-8")
    page = opened(at=tmp_path / "cell.html")
    inside = page.frame_locator("iframe")
    assert inside.locator("h1").inner_text() == "LeNet5"
    inside.locator("#tab-nodes").click()
    inside.locator("#node-table tbody button").first.click()
    assert inside.locator("#panel h2").inner_text()


def test_a_report_of_nothing_is_a_page(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "none.html").write_text(report_of([]).to_html(), encoding="utf-8")
    page = opened(at=tmp_path / "none.html")
    for tab in ("nodes", "compare", "source", "graph"):
        page.locator(f"#tab-{tab}").click()
    assert page.locator("h1").inner_text() == "Net"


def test_everything_that_can_be_pressed_has_a_name(opened: Opened) -> None:
    page = opened()
    click_a_box(page)
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, select, [role=button]")]
        .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
        .map((e) => e.outerHTML)""")
    assert nameless == []
