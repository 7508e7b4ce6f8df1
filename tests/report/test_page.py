"""The page in a real browser, opened from a file: it draws, reacts, asks nobody, and runs nothing a
user wrote."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratafl.clock.model.presets import network
from stratafl.report.costs.axes import network_axes
from stratafl.report.gather import gather
from stratafl.report.page import embedded
from stratafl.report.page import page as page_of
from stratafl.report.payload import payload
from tests.report.conftest import METHODS, ROUNDS, Page, edit

SETTINGS = 2


def write(folders: Path | Sequence[Path], to: Path) -> Path:
    found, unreadable = gather([folders] if isinstance(folders, Path) else folders)
    to.write_text(page_of(payload(found, None, unreadable)), encoding="utf-8")
    return to


def clocked_data(runs: Path) -> dict[str, Any]:
    """Of a page with networks."""
    found, _ = gather([runs])
    return payload(found, further=network_axes(found, [network("lan_wan"), network("mobile_edge")]))


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(runs, tmp_path_factory.mktemp("page") / "report.html")


def test_curves_are_drawn(page: Page, report: Path) -> None:
    page.open(report)
    assert page.lines("curve-accuracy", SETTINGS) == page.lines("curve-loss", SETTINGS) == SETTINGS
    assert page.lines("drift-1", SETTINGS) == page.lines("drift-2", SETTINGS) == SETTINGS
    lines = page.drawn("curve-accuracy")
    assert [line["label"] for line in lines] == list(METHODS)
    # a mean has a band of two edges
    assert all(len(line[part]) == ROUNDS for line in lines for part in ("x", "y", "low", "high"))
    assert page.js("document.querySelectorAll('#curve-accuracy .band').length") == SETTINGS
    # each in a style of its own, and not only in a colour
    dashes = page.js(
        "[...document.querySelectorAll('#curve-loss path.line')].map((p) => p.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == SETTINGS
    assert page.js("document.querySelectorAll('#tree .cell').length") == 1 + 2 + 4
    assert page.js("document.querySelectorAll('#tree .sample').length") == 4
    assert page.js("document.querySelectorAll('#tree .share').length") > 4
    assert page.errors() == []


def test_a_setting_can_be_hidden_and_seen_alone(page: Page, report: Path) -> None:
    from selenium.webdriver import ActionChains

    page.open(report)
    chip = "#curves-title ~ .chips button:nth-child(1)"
    page.click(chip)
    for figure in ("curve-accuracy", "curve-loss", "drift-1", "drift-2"):
        assert page.lines(figure, SETTINGS - 1) == SETTINGS - 1
    assert page.js(f"document.querySelector('{chip}').getAttribute('aria-pressed')") == "false"
    time.sleep(1)  # sooner it would be a double click
    page.click(chip)
    assert page.lines("curve-accuracy", SETTINGS) == SETTINGS
    ActionChains(page.browser).double_click(
        page.browser.find_element("css selector", "#drift-title ~ .chips button:nth-child(2)")
    ).perform()
    page.until("document.querySelector('#curve-accuracy .plot').chart.lines.map(({label}) => label).join() === 'MTGC'")
    assert page.lines("curve-accuracy", 1) == 1
    assert page.errors() == []


@pytest.mark.parametrize(
    ("axis", "title", "last"),
    [("rounds", "global rounds", ROUNDS), ("steps", "local steps per client", 24), ("bytes", "bytes per client", None),
     ("seconds", "seconds", None)],
)  # fmt: skip
def test_curves_against_every_axis(page: Page, report: Path, axis: str, title: str, last: float | None) -> None:
    page.open(report)
    page.click(f'#axis [data-value="{axis}"]')
    assert page.js("document.querySelector('#curve-accuracy .xtitle').textContent") == title
    assert page.js("document.querySelector('#axis [aria-pressed=\"true\"]').dataset.value") == axis
    values = page.drawn("curve-accuracy")[0]["x"]
    assert sorted(values) == values and len(set(values)) == ROUNDS
    assert last is None or values[-1] == last
    assert page.lines("drift-2", SETTINGS) == SETTINGS
    assert page.errors() == []


@pytest.mark.parametrize(
    ("axis", "title"), [("seconds on lan_wan", "seconds on lan_wan"), ("cost on lan_wan", "cost on lan_wan (USD)")]
)
def test_curves_against_a_network(page: Page, runs: Path, tmp_path: Path, axis: str, title: str) -> None:
    found, _ = gather([runs])
    data = payload(found, further=network_axes(found, [network("lan_wan")]))
    (tmp_path / "report.html").write_text(page_of(data), encoding="utf-8")
    page.open(tmp_path / "report.html")
    page.click(f'#axis [data-value="{axis}"]')
    assert page.js("document.querySelector('#curve-accuracy .xtitle').textContent") == title
    values = page.drawn("curve-accuracy")[0]["x"]
    assert sorted(values) == values and len(set(values)) == ROUNDS
    assert page.errors() == []


def test_every_run_every_quantity_and_both_scales(page: Page, report: Path) -> None:
    page.open(report)
    page.click('#view [data-value="runs"]')
    assert page.lines("curve-accuracy", 2 * SETTINGS) == 2 * SETTINGS
    page.click("#drift-log")
    assert page.js("document.querySelector('#drift-1 .plot').chart.y.log") is True
    assert page.js("document.querySelector('#curve-loss .plot').chart.y.log") is False
    quantities = page.js("[...document.querySelectorAll('#quantity button')].map((button) => button.dataset.value)")
    assert quantities == ["drift", "correction", "progress", "clipped"]
    for quantity in quantities:
        page.click(f'#quantity [data-value="{quantity}"]')
    page.click('#quantity [data-value="progress"]')
    assert page.js("document.querySelectorAll('#drift figure').length") == 3
    page.click('#quantity [data-value="correction"]')
    assert page.js("document.querySelectorAll('#drift figure').length") == 2
    assert page.errors() == []


def test_zoom_stays_while_settings_are_hidden(page: Page, report: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    page.open(report)
    plot = "document.querySelector('#curve-accuracy .plot')"
    box = page.js(f"{plot}.chart.box")
    page.js(f"{plot}.scrollIntoView({{block: 'center'}})")
    frame = page.js(f"{plot}.getBoundingClientRect().toJSON()")
    left, right = (int(frame["left"] + box["left"] + part * (box["right"] - box["left"])) for part in (0.05, 0.6))
    drag = ActionBuilder(page.browser)
    drag.pointer_action.move_to_location(left, int(frame["top"]) + 150).pointer_down()
    drag.pointer_action.move_to_location(right, int(frame["top"]) + 150).pointer_up()
    drag.perform()
    low, high = page.js(f"{plot}.chart.x.domain")
    assert 1 < low < 1.5 < 2.5 < high < 3.5
    page.click("#curves-title ~ .chips button:nth-child(1)")
    assert page.js(f"{plot}.chart.x.domain") == [low, high]
    page.click('#axis [data-value="steps"]')
    assert page.js(f"{plot}.chart.x.domain") == [0, 24]
    ActionChains(page.browser).double_click(page.browser.find_element("css selector", "#curve-accuracy svg")).perform()
    page.click('#axis [data-value="rounds"]')
    assert page.js(f"{plot}.chart.x.domain") == [1, ROUNDS]


def test_hovering_tells_the_values(page: Page, report: Path) -> None:
    from selenium.webdriver import ActionChains

    page.open(report)
    ActionChains(page.browser).move_to_element(
        page.browser.find_element("css selector", "#curve-accuracy svg")
    ).perform()
    page.until("!document.getElementById('tip').hidden")
    told = page.text("tip")
    assert told.startswith("round ") and "MTGC" in told and " % ± " in told
    ActionChains(page.browser).move_to_element(page.browser.find_element("css selector", "h1")).perform()
    page.until("document.getElementById('tip').hidden")


def test_nothing_leaves_the_machine(page: Page, report: Path) -> None:
    page.open(report)
    for selector in ('#axis [data-value="seconds"]', "#theme", "#nodes summary"):
        page.click(selector)
    asked = page.requests()
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    assert page.js("performance.getEntriesByType('resource').filter((e) => /^https?:/.test(e.name)).length") == 0
    policy = page.js("document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert page.errors() == []


def test_light_and_dark(page: Page, report: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.open(report)
    light = page.js(background)
    page.prefer("dark")
    page.until("document.documentElement.dataset.theme === 'dark'")
    dark = page.js(background)
    assert light != dark
    page.click("#theme")
    assert page.js(background) == light
    # the reader's own choice holds, whatever the system then says
    page.prefer("light")
    page.prefer("dark")
    assert page.js(background) == light
    page.open(report)
    assert page.js(background) == dark
    line = "getComputedStyle(document.querySelector('#curve-accuracy path.line')).stroke"
    assert page.js(line) == "rgb(108, 180, 238)"
    # on paper everything is light
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.js(line) == "rgb(0, 114, 178)" and page.js(background) == "rgb(255, 255, 255)"
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert page.errors() == []


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


HOSTILE = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    '"><svg onload=window.hacked=1>',
    '<a href="javascript:window.hacked=1">click</a>',
    "%{x} ${window.hacked=1} `${window.hacked=1}` $x^2$ @@data@@ &lt;b&gt;",
]


def poison(folder: Path, text: str) -> None:
    """A run directory in which everything that is a text says the same."""

    def tree(values: Any) -> None:
        values["classes"] = [f"{text}{n}" for n in range(len(values["classes"]))]
        for level, each in enumerate(values["levels"]):
            each["names"] = [f"{text}{level}.{n}" for n in range(len(each["names"]))]

    for run in sorted(folder.iterdir()):
        edit(run / "run.json", lambda values: values.update(name=text + values["name"]))
        edit(run / "run.json", lambda values: values["config"]["method"].update(name=text + values["name"]))
        edit(run / "run.json", lambda values: values["config"]["method"].update({text: text}))
        edit(run / "run.json", lambda values: values.update(notes=[text]))
        edit(run / "run.json", lambda values: values["environment"].update({text: text}))
        edit(run / "status.json", lambda values: values.update(status="failed", reason=text))
        edit(run / "tree.json", tree)
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        for record in lines:
            record["metrics"][text] = 1.0
            record["drift"]["1"][text] = 1.0
        (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_shown_and_not_run(page: Page, copied: Path, tmp_path: Path, text: str) -> None:
    poison(copied, text)
    page.open(write(copied, tmp_path / "report.html"))
    assert page.lines("curve-accuracy", SETTINGS) == SETTINGS
    # hover builds its labels from names as well
    page.js("hover(document.querySelector('#curve-accuracy .plot'), 2)")
    assert text in page.text("tip")
    box = "document.getElementById('tree').getBoundingClientRect()"
    place = f"{{clientX: {box}.left + document.getElementById('tree').box.left + 5, clientY: {box}.top + 100}}"
    page.js(f"nodeHover(document.getElementById('tree'), {place})")
    assert text in page.text("tip")
    page.click("#nodes summary")
    assert page.js("window.hacked") is None
    assert text in page.js("document.querySelector('.chips button span').textContent")
    assert text in page.text("curves") and text in page.text("summary") and text in page.text("notes")
    assert page.js("document.querySelectorAll('script').length") == 2
    assert page.js("document.querySelectorAll('main img, main a[href], main script, [onerror], [onload]').length") == 0
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests())
    assert page.errors() == []


def test_data_cannot_end_its_element() -> None:
    assert "<" not in embedded({"name": "</script><script>"}) and "&" not in embedded({"name": "&lt;"})
    assert json.loads(embedded({"name": "</script>&"})) == {"name": "</script>&"}


def test_a_run_that_has_just_begun(page: Page, copied: Path, tmp_path: Path) -> None:
    for run in copied.iterdir():
        (run / "rounds.jsonl").write_text("")
        (run / "summary.json").unlink()
        edit(run / "status.json", lambda values: values.update(status="running", round=0))
    page.open(write(copied, tmp_path / "report.html"))
    assert "Nothing was recorded yet" in page.js("document.getElementById('curves').textContent")
    assert "interrupted" in page.js("document.getElementById('notes').textContent")
    assert page.errors() == []


def test_runs_of_an_early_version_are_shown_as_ever(page: Page, copied: Path, tmp_path: Path) -> None:
    early = {"round", "steps", "metrics", "refused", "bytes_per_client", "seconds"}
    for run in copied.iterdir():
        for key in ("how", "precision", "notes", "better"):
            edit(run / "run.json", lambda values, key=key: values.pop(key, None))
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        kept = [{key: record[key] for key in early} for record in lines]
        (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    page.open(write(copied, tmp_path / "report.html"))
    assert page.lines("curve-accuracy", SETTINGS) == page.lines("curve-loss", SETTINGS) == SETTINGS
    assert page.js("document.getElementById('drift-title').offsetParent") is None, "nothing is known of it"
    assert page.js("[...document.querySelectorAll('#colour button')].length") == 0
    assert page.js("document.querySelectorAll('#tree .cell').length") == 1 + 2 + 4
    assert page.js("document.querySelectorAll('#notes li').length") == 0
    assert page.errors() == []


def test_one_run_alone(page: Page, runs: Path, tmp_path: Path) -> None:
    page.open(write(sorted(runs.iterdir())[0], tmp_path / "report.html"))
    assert page.lines("curve-accuracy", 1) == 1
    assert page.js("document.querySelectorAll('.chips button, #view button').length") == 0
    assert "one setting only" in page.js("document.getElementById('differences').textContent")
    assert page.errors() == []


def test_numbers_that_are_not_finite_are_gaps(page: Page, copied: Path, tmp_path: Path) -> None:
    for run in copied.iterdir():
        lines = (run / "rounds.jsonl").read_text().splitlines()
        record = json.loads(lines[1])
        record["metrics"] = {"loss": float("nan"), "accuracy": float("inf")}
        lines[1] = json.dumps(record)
        (run / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    page.open(write(copied, tmp_path / "report.html"))
    assert page.drawn("curve-loss")[-1]["y"][1] is None
    assert page.lines("curve-loss", SETTINGS) == SETTINGS
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
    found, unreadable = gather([copied])
    data = payload(found, None, unreadable)
    data["timelines"] = [_odd(each, each["network"] + " a network " * 8) for each in clocked_data(runs)["timelines"]]
    (folder / "report.html").write_text(page_of(data), encoding="utf-8")
    return folder / "report.html"


def _odd(timeline: dict[str, Any], network: str) -> dict[str, Any]:
    """A round that takes for ever, of nodes with long names."""
    rows = [{**row, "name": row["name"] + "-long" * 20 * row["level"]} for row in timeline["rows"]]
    return {**timeline, "network": network, "run": timeline["run"] + " so long" * 20, "rows": rows, "seconds": 1.5e7}


CONTROLS = (
    "#metric option", "#summary th button", "#axis button", "#view button", "#log-x", "#log-y",
    "section:nth-of-type(2) .chips button", "#cost button", "#line-run option", "#line-network button",
    "#line-round button", "#split option", "#colour button", "#play", "#over button", "#quantity button", "#drift-log",
    "section:nth-of-type(5) .chips button", "details summary",
)  # fmt: skip
"""Every button, option and fold of the page but the theme's and those that save a file."""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
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
    """One chart has the row to itself; when a second comes, both are drawn at half the width at
    once."""
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


def test_a_run_that_diverged_is_marked_and_its_curve_ends(page: Page, copied: Path, tmp_path: Path) -> None:
    hurt = next(run for run in copied.iterdir() if run.name.startswith("HFedAvg"))
    lines = [json.loads(line) for line in (hurt / "rounds.jsonl").read_text().splitlines()]
    for record in lines[2:]:
        record["metrics"] = {"loss": float("nan"), "accuracy": 0.3}
    (hurt / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    page.open(write(copied, tmp_path / "report.html"))
    assert "diverged at round 3" in page.js("document.getElementById('notes').textContent")
    assert "diverged at round 3" in page.js("document.querySelector('.chips button').textContent")
    assert "1 of 2 diverged" in page.js("document.getElementById('summary').textContent")
    for name in ("accuracy", "loss"):
        drawn = page.drawn(f"curve-{name}")[0]["y"]
        assert page.js(f"document.querySelectorAll('#curve-{name} .dead').length") == 1
        assert drawn[1] is not None and drawn[2:] == [None, None]
    assert page.errors() == []
