"""The report as a reader sees it: on a desk, on a phone, in the dark and on paper, with no network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import KEPT
from lab.compare.browser import Browser, missing
from lab.compare.example import KINDS, made

from hocket.lab.compare import html_report, pictures, summary
from hocket.lab.compare.looks import LIGHT, STRATEGY_TONES

COMPARISON = made()
CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = parse(getComputedStyle(document.body).backgroundColor);
const found = {};
const texts = 'h1, h2, h3, p, li, th, td, small, dt, dd, code, figcaption, summary, svg text';
for (const e of document.querySelectorAll(texts)) {
  const style = getComputedStyle(e);
  const [a, b] = [light(parse(e instanceof SVGElement ? style.fill : style.color)), light(ground)];
  const name = e.tagName + ' ' + (e instanceof SVGElement ? style.fill : style.color);
  found[name] = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
}
return found;
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return html_report.write(COMPARISON, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser() as started:
        KEPT.add(started.pid)
        yield started
    KEPT.remove(started.pid)
    assert not started.processes()


@pytest.fixture
def browser(started: Browser, written: Path) -> Browser:
    started.open(written)  # a test before may have shown another one
    return started


@pytest.fixture
def desk(browser: Browser) -> Browser:
    browser.width(1280)
    browser.media()
    return browser


def boxes(browser: Browser, selector: str) -> list[dict[str, Any]]:
    return list(
        browser.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => ({id: e.id, text: e.textContent.trim(),"
            " ...e.getBoundingClientRect().toJSON()}))",
            selector,
        )
    )


def test_every_curve_is_seen_in_its_colour(desk: Browser) -> None:
    found = desk.run(
        "return [...document.querySelectorAll('g[id*=\"-curve-\"]')].map(g => {const p = g.querySelector('path');"
        "const b = p.getBoundingClientRect(); return [g.id, b.width, b.height, getComputedStyle(p).stroke]})"
    )
    strategies = [LIGHT["ink"], *(LIGHT[name] for name in list(STRATEGY_TONES)[: len(KINDS)])]
    colours = [f"rgb({int(c[1:3], 16)}, {int(c[3:5], 16)}, {int(c[5:7], 16)})" for c in strategies]
    assert len(found) == 4 * len(colours)
    for name, width, height, stroke in found:
        assert width > 50 and height > 50, name
        assert stroke == colours[int(name.rpartition("-")[2])], name


def test_every_bar_is_as_long_as_its_value(desk: Browser) -> None:
    widths = [box["width"] for box in boxes(desk, '[id^="time-to-target-bar-0-"] path')]
    times = [entry.time_to_target.median for entry in COMPARISON.entries if entry.time_to_target]
    assert len(widths) == len(times)
    for width, time in zip(widths, times, strict=True):
        assert width / widths[0] == pytest.approx(time / times[0], rel=0.02)


def test_the_numbers_are_in_the_table(desk: Browser) -> None:
    rows = desk.run("return [...document.querySelectorAll('.summary tr')].map(r => [...r.cells].map(c => c.innerText))")
    columns, expected = summary.of(COMPARISON)
    assert [" ".join(cell.split()) for cell in rows[0]] == [column.title for column in columns]
    assert rows[1:] == expected
    assert desk.run("return document.querySelector('.answer').innerText").startswith(
        "local_sgd(period=16) on 4 workers"
    )


def test_all_pictures_are_shown_with_titles(desk: Browser) -> None:
    shown = boxes(desk, "figure > svg")
    assert len(shown) == len(pictures.pictures(COMPARISON))
    assert all(box["width"] > 380 and box["height"] > 100 for box in shown)
    assert all(desk.run("return [...document.querySelectorAll('svg')].map(s => s.querySelector('title').textContent)"))


def test_legends_and_texts_cover_nothing(desk: Browser) -> None:
    overlaps = desk.run(
        """
        const found = [], drawn = '[id*="-curve-"] path, [id*="-bar-"], [id*="-axes_"] > [id*="-patch_"]';
        const meet = (a, b, by) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > by
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > by;
        for (const svg of document.querySelectorAll('svg.plot')) {
          const box = e => e.getBoundingClientRect(), all = box(svg);
          const texts = [...svg.querySelectorAll('text')];
          for (const legend of svg.querySelectorAll('[id*="-legend_"]'))
            for (const data of svg.querySelectorAll(drawn))
              if (!legend.contains(data) && meet(box(legend), box(data), 1)) found.push([legend.id, data.id]);
          texts.forEach((a, i) => {
            const b = box(a);
            if (b.left < all.left - 1 || b.right > all.right + 1 || b.top < all.top - 1 || b.bottom > all.bottom + 1)
              found.push([svg.id, 'cut', a.textContent]);
            for (const other of texts.slice(i + 1))
              if (meet(b, box(other), 2.5)) found.push([a.textContent, other.textContent]);
          });
        }
        return found;
        """
    )
    assert len(boxes(desk, '[id*="-legend_"]')) == 8  # four curves, shares, speed-up, efficiency, processes
    assert overlaps == []


def test_nothing_is_asked_of_any_network(desk: Browser) -> None:
    assert desk.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert desk.run("return location.protocol") == "file:"


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_any_screen(browser: Browser, width: int) -> None:
    browser.width(width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    columns = {round(box["left"]) for box in boxes(browser, "figure")}
    assert len(columns) == (1 if width == 360 else 2)
    assert all(box["right"] <= width + 1 for box in boxes(browser, "figure > svg"))
    if width == 360:  # the table is as wide as it is, in a box of its own
        assert browser.run("const b = document.querySelector('.summary'); return b.scrollWidth > b.clientWidth")
        sizes = browser.run(
            "return [...document.querySelectorAll('svg text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
            " * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b))"
        )
        assert min(sizes) > 10.5  # pixels


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(desk: Browser, scheme: str) -> None:
    desk.media(scheme=scheme)
    found = desk.run(CONTRAST)
    assert len(found) > 10 and min(found.values()) >= 4.5, found
    dark = desk.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_paper_is_light_and_cuts_no_picture(desk: Browser) -> None:
    desk.media("print", "dark")
    assert desk.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(desk.run(CONTRAST).values()) >= 4.5
    styles = desk.run("return [...document.querySelectorAll('figure')].map(f => getComputedStyle(f).breakInside)")
    assert set(styles) == {"avoid"}
    made_pdf = desk.pdf()
    assert made_pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", made_pdf)) <= 8


def test_a_failure_with_a_tag_in_its_reason(browser: Browser, tmp_path: Path) -> None:
    from lab.compare.test_report import changed

    evil = "<script>document.title = 'run'</script>"
    first, second, *_ = COMPARISON.entries
    browser.open(html_report.write(made(entries=(first, changed(second, failure=evil))), tmp_path))
    assert evil in browser.run("return document.querySelector('ul.failed').innerText")
    assert browser.run("return document.title").startswith("Comparison of")
