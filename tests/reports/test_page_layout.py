"""The page in a real browser: its charts have the room they need, at every width and on paper."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratafl.costs.pricing import network_axes
from stratafl.network.specification import network
from stratafl.reports.page import page as page_of
from stratafl.reports.page_data import page_data
from stratafl.runs.groups import collect_runs
from tests.reports.conftest import SETTINGS, Page, edit
from tests.slow import slow, slow_unless


@pytest.mark.parametrize("width", [320, 390, 768])
def test_fits_a_phone(page: Page, report: Path, width: int) -> None:
    page.size(width, 800, phone=True)
    page.open(report)
    assert page.js("document.documentElement.scrollWidth") <= width
    right = page.js("Math.max(...[...document.querySelectorAll('figure, .choice, .chips, .plot')]"
                    ".map((e) => e.getBoundingClientRect().right))")  # fmt: skip
    assert right <= width
    assert page.lines("curve-accuracy", SETTINGS) == SETTINGS
    assert page.errors() == []


WIDTHS = (400, 1000, 1440, 1920)
FAULTS = """
window.faults = () => {
  const found = [];
  const box = (each) => each.getBoundingClientRect();
  const name = (each) => each.id || each.closest('[id]').id;
  const within = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
    && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
  const cards = [...document.querySelectorAll('.card')].filter((card) => box(card).width);
  const charts = [...document.querySelectorAll('svg.chart')].filter((svg) => box(svg).width);
  for (const svg of charts) {
    const card = svg.closest('.card');
    if (!within(box(svg), box(card))) {
      found.push(`${name(svg)}: svg ${box(svg).width}x${box(svg).height}, card ${box(card).width}x${box(card).height}`);
    }
    for (const text of svg.querySelectorAll('text')) {
      if (text.textContent.trim() && !text.closest('.rule') && !within(box(text), box(svg))) {
        found.push(`${name(svg)}: "${text.textContent}" is cut off`);
      }
    }
  }
  cards.forEach((card, place) => cards.slice(place + 1).forEach((other) => {
    const [a, b] = [box(card), box(other)];
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1) {
      found.push(`${name(card)} lies over ${name(other)}`);
    }
  }));
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) found.push(`scrolls to ${page.scrollWidth} of ${page.clientWidth}`);
  if (!charts.length) found.push('no charts');
  if (window.resized) found.push('the window was resized');
  return found;
};
window.addEventListener('resize', () => { window.resized = true; });
document.addEventListener('DOMContentLoaded', () => { window.atFirst = window.faults(); });
"""


@pytest.fixture
def measured(page: Page) -> Iterator[Page]:
    """A page that knows from its first paint on whether something lies where it must not."""
    script = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FAULTS})
    yield page
    page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.fixture(scope="session")
def odd_report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long names, huge and tiny numbers, and so many charts that the last has a row to itself."""
    folder = tmp_path_factory.mktemp("odd")
    copied = Path(shutil.copytree(runs, folder / "runs"))
    for run in copied.iterdir():
        name = " with a name " + "as-long" * 20
        edit(run / "run.json", lambda values: values["config"]["method"].update(name=values["name"] + name))
        edit(run / "tree.json", lambda tree: tree.update(classes=[f"{n}: {'WIDE ' * 5 * n}" for n in range(10)]))
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        for number, record in enumerate(lines):
            record["metrics"].update({"huge " * 30: 1.23456789e12 + 1e3 * number, "tiny": 1e-9 * 3.0**number})
            record["metrics"]["negative"] = -1234.5678 * number
        (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    result, unreadable = collect_runs([copied])
    data = page_data(result, None, unreadable)
    clocked = collect_runs([runs])[0]
    rounds = page_data(clocked, extra_axes=network_axes(clocked, [network("lan_wan"), network("mobile_edge")]))[
        "timelines"
    ]
    data["timelines"] = [_odd(each, each["network"] + " a network " * 8) for each in rounds]
    (folder / "report.html").write_text(page_of(data), encoding="utf-8")
    return folder / "report.html"


def _odd(timeline: dict[str, Any], network: str) -> dict[str, Any]:
    """A round that takes for ever, of nodes with long names."""
    rows = [{**row, "name": row["name"] + "-long" * 20 * row["level"]} for row in timeline["rows"]]
    return {**timeline, "network": network, "run": timeline["run"] + " so long" * 20, "rows": rows, "seconds": 1.5e7}


CONTROLS = (
    "#metric option", "#summary th button", "#shown option", "#axis option", "#view button", "#log-x", "#log-y",
    "section:nth-of-type(2) .chips button", "#cost option", "#line-run option", "#line-network button",
    "#line-round button", "#split option", "#colour button", "#play", "#over button", "#quantity button", "#drift-log",
    "section:nth-of-type(5) .chips button", "#run-list thead button", "#run-list tbody tr:nth-child(-n+3) input",
    "#compare button", "details summary",
)  # fmt: skip
"""Every button, option and fold of the page but the theme's and those that save a file."""


@pytest.mark.parametrize("theme", ["light", slow("dark")])
@pytest.mark.parametrize("width", slow_unless(lambda width: width in (400, 1440), WIDTHS))
def test_every_chart_stays_in_its_card(measured: Page, odd_report: Path, width: int, theme: str) -> None:
    page = measured
    page.prefer(theme)
    page.size(width)
    page.open(odd_report)
    assert page.js("window.atFirst") == []
    for selector in CONTROLS:
        shown = [
            n for n, each in enumerate(page.browser.find_elements("css selector", selector)) if each.is_displayed()
        ]
        for number in shown:
            page.browser.find_elements("css selector", selector)[number].click()
            assert page.js("faults()") == [], (selector, number)
    page.click("#theme")
    assert page.js("document.documentElement.dataset.theme") != theme
    assert page.js("faults()") == []
    assert page.errors() == []


def test_charts_that_come_and_go_share_the_row(measured: Page, report: Path) -> None:
    """Layout of charts: a single one has the full width, two have half of it each."""
    page = measured
    page.open(report)
    page.js("(window.every = state.data.metrics, state.data.metrics = every.slice(1), drawAll())")
    alone = page.js("document.querySelector('#curves svg.chart').clientWidth")
    assert alone > 1000 and page.js("faults()") == []
    page.js("(state.data.metrics = every, drawAll())")
    assert page.js("[...document.querySelectorAll('#curves figure')].map(({id}) => id)") == [
        "curve-accuracy",
        "curve-loss",
    ]
    assert page.js("document.querySelector('#curve-loss svg.chart').clientWidth") < alone / 2
    assert page.js("faults()") == [] and page.errors() == []


def test_charts_follow_the_room_they_have(page: Page, report: Path) -> None:
    svg = "[...document.querySelectorAll('svg.chart')]"
    fits = f"{svg}.every((svg) => Math.abs(svg.clientWidth - svg.closest('.plot').clientWidth) <= 1)"
    page.open(report)
    for width in (700, 1500, 400, 1280):
        page.size(width)
        page.until(fits)
    # without the window's help
    page.js("document.querySelector('main').style.maxWidth = '700px'")
    page.until(f"{fits} && document.querySelector('#tree').clientWidth < 700")


def test_charts_on_paper_keep_their_shape(page: Page, report: Path) -> None:
    shapes = "[...document.querySelectorAll('svg.chart')].map((svg) => svg.clientHeight / svg.clientWidth)"
    page.open(report)
    before = page.js(shapes)
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.size(700)
    page.until("document.querySelector('#curve-loss svg').clientWidth < 400")
    assert page.js(shapes) == pytest.approx(before, rel=0.03)
    assert page.js("document.querySelector('#axis').offsetParent") is None
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
