"""Pages in a real browser: figures, keyboard, search, ways through, narrow and dark screens, accessibility, no network.

Skipped where there is no Chromium; see `conftest.py`.
"""

import contextlib
import dataclasses

import pytest

from autoshard.printing import amount

NAMES = ["gpt", "staged", "run", "hosted"]


def settle(page):
    """Waits until the page has drawn what it was asked for."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")


@dataclasses.dataclass
class Opened:
    """A page in the browser, and what it did that it should not."""

    page: object
    complaints: list[str]


@pytest.fixture
def open_page(browser, pages):
    """(name, width=1200, dark=False) -> the page, opened and all of it drawn; complaints fail the test."""
    with contextlib.ExitStack() as open_ones:
        opened = []

        def of(name, width=1200, dark=False):
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
            )
            open_ones.callback(context.close)
            page, complaints = context.new_page(), []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
            page.on("request", lambda r: r.url.split(":")[0] in ("file", "data", "blob") or complaints.append(r.url))
            page.goto(pages(name).as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            for place in page.query_selector_all(".plot"):
                if place.is_visible():
                    place.scroll_into_view_if_needed()
                    page.wait_for_function("place => place.querySelector('.bk-Figure, .bk-Column')", arg=place)
            opened.append(Opened(page, complaints))
            return page

        yield of
        assert [one.complaints for one in opened] == [[]] * len(opened)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dark", [False, True])
def test_pages_pass_an_accessibility_check(open_page, name, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(name, dark=dark)
    for button in page.query_selector_all("#collective-table button")[:2]:
        button.click()
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_a_narrow_screen(open_page, name):
    page = open_page(name, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = "[...document.querySelectorAll('canvas')].filter(c => c.getBoundingClientRect().right > 361).length"
    assert page.evaluate(wide) == 0, "figures fit"


@pytest.mark.parametrize("dark", [False, True])
def test_figures_have_the_colours_of_the_screen(open_page, dark):
    page = open_page("gpt", dark=dark)
    light = lambda colour: sum(map(int, colour[4:-1].split(","))) > 380
    style = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    axes = "Bokeh.documents.flatMap(d => [...d._all_models.values()]).filter(m => m.type.endsWith('Axis'))"
    labels = lambda: page.evaluate(f"{axes}.map(m => m.major_label_text_color)")
    assert light(style()) != dark and len(labels()) > 4 and {light(c) for c in labels()} == {dark}
    page.click("#theme")
    settle(page)
    assert light(style()) == dark and {light(c) for c in labels()} == {not dark}


def test_the_keyboard_goes_through_the_step(open_page, gpt):
    page = open_page("gpt")
    page.focus("body")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.focus("[data-do=peak]")
    page.keyboard.press("Enter")
    said = lambda: page.get_attribute("#cursor", "aria-valuetext")
    assert f"{amount(gpt.estimate.peak_bytes)} in memory" in said()
    assert f"the peak: {amount(gpt.estimate.peak_bytes)} of 4 GB allowed" in page.inner_text("#at h3")
    largest = max(gpt.estimate.memory, key=lambda m: m.size_bytes)
    assert largest.memory_class in page.inner_text("#at")
    page.focus("#cursor")
    heard = {said()}
    for _ in range(6):
        page.keyboard.press("ArrowRight")
        settle(page)
        heard.add(said())
    assert len(heard) > 2
    page.keyboard.press("Home")
    assert said().startswith(("0,", "0 "))


def test_the_mouse_moves_the_cursor_and_a_click_holds_it(open_page):
    page = open_page("gpt")
    plot = page.query_selector('[data-figure="step"]')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    at = lambda share: (box["x"] + share * box["width"], box["y"] + 120)
    told = lambda: page.inner_text("#at h3")
    page.mouse.move(*at(0.3))
    page.mouse.move(*at(0.31))
    settle(page)
    before = told()
    page.mouse.move(*at(0.7))
    settle(page)
    held = told()
    assert held != before
    page.mouse.click(*at(0.7))
    page.mouse.move(*at(0.4))
    settle(page)
    assert told() == held


def test_enlarging_shows_less_of_the_step(open_page):
    page = open_page("gpt")
    time = "Bokeh.documents.map(d => d.get_model_by_name('time')).find(Boolean)"
    width = lambda: page.evaluate(f"{time}.end - {time}.start")
    whole = width()
    page.click("[data-do=in]")
    assert width() == pytest.approx(0.4 * whole)
    page.click("[data-do=out]")
    page.click("[data-do=all]")
    assert width() == pytest.approx(whole)


def test_paths_are_searched(open_page, gpt):
    page = open_page("gpt")
    page.fill("#search", "blocks.2.mlp.up.kernel")
    wanted = [a for a in gpt.arguments if ".mlp.up.kernel" in a.name]
    assert page.inner_text("#found").startswith(f"{len(wanted)} tensors of 3 kinds"), "weights and two moments"
    assert "models/layers.py" in page.inner_text("#tree")
    page.fill("#search", "no such path")
    assert page.inner_text("#found").startswith("0 tensors")
    page.fill("#search", "")
    assert page.query_selector_all("#tree button[aria-expanded=true]")
    page.click("#unfold")
    assert len(page.query_selector_all("#tree tbody tr")) > 30
    assert page.query_selector_all("#tree button[aria-expanded=false]") == []


def test_a_collective_leads_to_its_tensor_and_its_time(open_page):
    page = open_page("gpt")
    for button in page.query_selector_all("#collective-table td button.plain"):
        button.click()
        if page.query_selector("#collective-table .detail button:has-text('in the model')"):
            break
        button.click()
    link = page.query_selector("#collective-table .detail button:has-text('in the model')")
    path = link.inner_text().removeprefix("Show ").removesuffix(" in the model")
    link.click()
    row = page.evaluate("document.activeElement.innerText")
    assert row.strip().startswith(path.split(".")[-1]) and ("float32" in row or "int32" in row)
    page.click("#collective-table .detail button:has-text('over time')")
    assert page.evaluate("document.activeElement.id") == "cursor"
    settle(page)
    assert "waited for" in page.inner_text("#at") or "runs beside kernels" in page.inner_text("#at")


def test_programs_of_a_plan_in_stages_are_chosen(open_page, staged):
    page = open_page("staged")
    shown = lambda: page.evaluate(
        "[...document.querySelectorAll('section[data-program]:not([hidden])')].map(s => s.id)"
    )
    before, said = shown(), page.inner_text("#at h3")
    assert {name.rpartition("-")[2] for name in before} == {"0"}
    last = str(len(staged.programs) - 1)
    page.select_option("#program", last)
    settle(page)
    assert {name.rpartition("-")[2] for name in shown()} == {last} and page.inner_text("#at h3") != said
