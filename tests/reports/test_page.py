"""The page in a real browser, opened from a file: it draws, reacts, and asks nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from stratafl import simulate
from stratafl.costs.pricing import network_axes
from stratafl.network.specification import network
from stratafl.reports.page import page as page_of
from stratafl.reports.page_data import page_data
from stratafl.runs.groups import collect_runs
from tests.reports.conftest import METHODS, ROUNDS, SETTINGS, Page


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


def test_ticks_are_told_apart(page: Page, report: Path) -> None:
    page.open(report)
    texts = "labelled([%s], %s).map((tick) => tick.text)"
    assert page.js(texts % ("0.021671, 0.021672, 0.021673", "short")) == ["0.021671", "0.021672", "0.021673"]
    assert page.js(texts % ("0.5, 0.55, 0.6", "percentText")) == ["50 %", "55 %", "60 %"]


def test_what_was_in_memory_gives_a_page_no_title(page: Page, tmp_path: Path) -> None:
    x, y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    parts = torch.arange(24).chunk(4)
    data = {"source": (x, y), "partition": parts, "test": (x, y)}
    simulate(lambda: nn.Linear(3, 2), data, "2x2", schedule=[1, 1], rounds=2, save=tmp_path / "run").run()
    written = page_of(page_data(collect_runs([tmp_path])[0]))
    (tmp_path / "page.html").write_text(written)
    page.open(tmp_path / "page.html")
    assert page.text("subtitle").startswith("1 run, 1 setting · tree 2x2 · ")


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
     ("seconds", "wall-clock seconds", None), ("traffic.1", "bytes on the top link", None)],
)  # fmt: skip
def test_curves_against_every_axis(page: Page, report: Path, axis: str, title: str, last: float | None) -> None:
    page.open(report)
    page.choose("axis", axis)
    assert page.js("document.querySelector('#curve-accuracy .xtitle').textContent") == title
    assert page.js("document.getElementById('axis').value") == axis
    values = page.drawn("curve-accuracy")[0]["x"]
    assert sorted(values) == values and len(set(values)) == ROUNDS
    assert last is None or values[-1] == last
    assert page.lines("drift-2", SETTINGS) == SETTINGS
    assert page.errors() == []


@pytest.mark.parametrize(
    ("axis", "title"), [("seconds on lan_wan", "seconds on lan_wan"), ("cost on lan_wan", "cost on lan_wan (USD)")]
)
def test_curves_against_a_network(page: Page, runs: Path, tmp_path: Path, axis: str, title: str) -> None:
    result, _ = collect_runs([runs])
    data = page_data(result, extra_axes=network_axes(result, [network("lan_wan")]))
    (tmp_path / "report.html").write_text(page_of(data), encoding="utf-8")
    page.open(tmp_path / "report.html")
    page.choose("axis", axis)
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
    page.choose("axis", "steps")
    assert page.js(f"{plot}.chart.x.domain") == [0, 24]
    ActionChains(page.browser).double_click(page.browser.find_element("css selector", "#curve-accuracy svg")).perform()
    page.choose("axis", "rounds")
    assert page.js(f"{plot}.chart.x.domain") == [1, ROUNDS]


def test_hovering_tells_the_values(page: Page, report: Path) -> None:
    from selenium.webdriver import ActionChains

    page.open(report)
    ActionChains(page.browser).move_to_element(
        page.browser.find_element("css selector", "#curve-accuracy svg")
    ).perform()
    page.until("!document.getElementById('tip').hidden")
    output = page.text("tip")
    assert output.startswith("round ") and "MTGC" in output and " % ± " in output
    ActionChains(page.browser).move_to_element(page.browser.find_element("css selector", "h1")).perform()
    page.until("document.getElementById('tip').hidden")


def test_nothing_leaves_the_machine(page: Page, report: Path) -> None:
    page.open(report)
    for selector in ('#axis option[value="seconds"]', "#theme", "#nodes summary"):
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
