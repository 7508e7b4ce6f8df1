"""Chart of a global round on the page: its rows, their contents and controls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratafl.base.topology import Topology
from stratafl.core.schedule import SyncSchedule
from stratafl.costs import figures
from stratafl.costs.costs import PriceableRun
from stratafl.costs.figures import GroupOnNetwork, timelines
from stratafl.costs.pricing import network_axes
from stratafl.network.messages import message_sizes
from stratafl.network.specification import Network, network
from stratafl.network.waiting import WAIT_FOR_ALL, WaitPolicy
from stratafl.reports.page import page as page_of
from stratafl.reports.page_data import page_data
from stratafl.rules.registry import rules_for
from stratafl.runs import list_runs
from stratafl.runs.groups import collect_runs
from tests.reports.conftest import METHODS, ROUNDS, Page

VARIED = Network.of(
    {
        "name": "varied",
        "leaf": {"step_s": {"name": "lognormal", "median": 1, "sigma": 0.5}, "availability": 0.7, "away_s": 3},
        "tier": [{"up_mbit_s": 1, "latency_s": 0.01, "merge_s": 0.2, "pipe_up_mbit_s": 2}, {"up_mbit_s": 0.5}],
    }
)


def on_tree(runs: Path, shape: str, **changes: Any) -> list[dict[str, Any]]:
    """The rounds of a stored run as if it had another tree."""
    ready, tree = PriceableRun.of(list_runs(runs)[0]), Topology.of(shape)
    periods = [2] * (tree.depth - 1) + [3]
    given = {"participation": (None,) * tree.depth, "wait": (), **changes}
    workload = replace(
        ready.recovered.workload,
        tree=tree,
        schedule=SyncSchedule.of(periods, tree.depth),
        steps_N=np.full(tree.leaves, 3),
        samples_N=np.full(tree.leaves, 10),
        sizes=message_sizes(rules_for("mtgc", tree.depth), 10_000, 0),
        **given,
    )
    return timelines(
        [GroupOnNetwork("it", replace(ready, recovered=replace(ready.recovered, workload=workload)), VARIED)]
    )


def bars(row: dict[str, Any]) -> Iterator[tuple[float, float, str]]:
    """Start, end and kind of each activity, in order."""
    result = [(times[n], times[n] + times[n + 1], what) for what, times in row["bars"].items()
             for n in range(0, len(times), 2)]  # fmt: skip
    yield from sorted(result)


def spent(row: dict[str, Any], what: str) -> float:
    return sum(row["bars"].get(what, [])[1::2])


def test_every_node_of_a_small_tree_has_a_row_below_its_parent(runs: Path) -> None:
    first, middle, last = on_tree(runs, "2x3")
    assert [each["round"] for each in (first, middle, last)] == [1, 2, ROUNDS]
    assert [row["name"] for row in first["rows"]] == ["root", "0", "0/0", "0/1", "0/2", "1", "1/0", "1/1", "1/2"]
    assert [row["level"] for row in first["rows"]] == [0, 1, 2, 2, 2, 1, 2, 2, 2]
    assert first["nodes"] == 9 and not any(row["role"] for row in first["rows"])


def test_bars_are_what_the_price_is_made_of(runs: Path) -> None:
    ready = PriceableRun.of(list_runs(runs)[0])
    costs = ready.cost_on(VARIED)
    for shown in timelines([GroupOnNetwork("it", ready, VARIED)]):
        place = shown["round"] - 1
        assert shown["seconds"] == pytest.approx(costs.seconds_R[place])
        leaves = [row for row in shown["rows"] if row["level"] == 2]
        for what in ("away", "compute", "down", "up", "wait"):
            mean = np.mean([spent(row, what) for row in leaves])
            assert mean == pytest.approx(costs.parts[what, 2][place], rel=1e-3), what
        assert spent(shown["rows"][0], "merge") == pytest.approx(costs.parts["merge", 1][place], rel=1e-3)


LATER = WaitPolicy(first=1, late="counts")
NESTED = {"a buffer": (WAIT_FOR_ALL, LATER), "buffers": (LATER, LATER), "late groups": (LATER, WAIT_FOR_ALL)}


@pytest.mark.parametrize("wait", [(), (WAIT_FOR_ALL, WaitPolicy(first=1)),
                                  (WaitPolicy(deadline=2.0), WaitPolicy(deadline=4.0)), *NESTED.values()],
                         ids=["all", "first", "deadline", *NESTED])  # fmt: skip
def test_a_node_does_one_thing_at_a_time_within_the_round(runs: Path, wait: tuple[WaitPolicy, ...]) -> None:
    for shown in on_tree(runs, "3x3", wait=wait):
        for row in shown["rows"]:
            before = 0.0
            for begin, end, _ in bars(row):
                assert before <= begin + 1e-3 and begin < end <= shown["seconds"] + 1e-3
                before = end


@pytest.mark.parametrize("wait", NESTED.values(), ids=NESTED)
def test_who_is_late_and_counts_later_works_on_whatever_its_parent_does(
    runs: Path, wait: tuple[WaitPolicy, ...]
) -> None:
    """A client has nothing to do only from a meeting that merged its work to its next model; where
    its group is late, as long as that goes on for itself."""
    goes_on = 0
    for shown in on_tree(runs, "3x4", wait=wait):
        merges = {row["name"]: [end for _, end, what in bars(row) if what == "merge"] for row in shown["rows"]}
        for row in shown["rows"]:
            if row["level"] < 2 or not row["bars"]:
                continue
            did = list(bars(row))
            for (_, end, what), (begin, _, after) in itertools.pairwise(did):
                assert end == pytest.approx(begin, abs=1e-3) or (what in ("up", "wait") and after in ("away", "down"))
            end, what = did[-1][1:]
            assert end == pytest.approx(shown["seconds"], rel=1e-3) or what in ("up", "wait")
            assert did[0][0] == 0.0 or did[0][2] in ("away", "down")
            closed = max(merges[row["name"].rpartition("/")[0]], default=0.0)
            goes_on += closed < shown["seconds"] - 0.1 and end > closed + 0.1
    assert goes_on > 3


def test_of_large_groups_three_stand_for_all(runs: Path) -> None:
    for shown in on_tree(runs, "3x40"):
        assert shown["nodes"] == 1 + 3 + 120
        assert [row["role"] for row in shown["rows"]] == ["", *["", "fastest", "median", "slowest"] * 3]
        assert [row["siblings"] for row in shown["rows"]][:3] == [1, 3, 40]
        for group in range(3):
            fast, middle, slow = (spent(row, "wait") for row in shown["rows"][4 * group + 2 : 4 * group + 5])
            assert fast > middle > slow


def test_who_does_not_take_part_has_no_row(runs: Path) -> None:
    for shown in on_tree(runs, "2x4", participation=(1, 2)):
        groups = [row["name"] for row in shown["rows"] if row["level"] == 1]
        assert len(groups) == 1 and all(row["name"].startswith(groups[0]) for row in shown["rows"][1:])
        assert shown["nodes"] == len(shown["rows"]) <= 1 + 1 + 4


def test_a_deep_tree_shows_the_slowest_alone_at_its_lowest_levels(runs: Path) -> None:
    for shown in on_tree(runs, "4x4x4x4"):
        levels = [row["level"] for row in shown["rows"]]
        assert [levels.count(level) for level in range(5)] == [1, 3, 9, 9, 9]
        assert {row["role"] for row in shown["rows"] if row["level"] > 2} == {"slowest"}


@pytest.mark.parametrize(("room", "shown"), [(60_000, [1, 2, ROUNDS]), (500, [1, 2, ROUNDS]), (0, [2])])
def test_a_page_with_many_has_fewer_rows_and_rounds(
    runs: Path, monkeypatch: pytest.MonkeyPatch, room: int, shown: list[int]
) -> None:
    monkeypatch.setattr(figures, "MAX_BARS", room)
    result = on_tree(runs, "2x10")
    assert [each["round"] for each in result] == shown
    assert {len(each["rows"]) for each in result} == {1 + 2 * (11 if room == 60_000 else 4)}


def test_the_payload_has_one_run_of_each_setting_on_each_network(runs: Path) -> None:
    result, _ = collect_runs([runs])
    assert page_data(result)["timelines"] == []
    shown = page_data(result, extra_axes=network_axes(result, [network("lan_wan"), VARIED]))["timelines"]
    assert [(each["run"], each["network"], each["round"]) for each in shown] == [
        (method, name, round) for method in METHODS for name in ("lan_wan", "varied") for round in (1, 2, ROUNDS)
    ]


@pytest.fixture(scope="session")
def clocked(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two networks."""
    result, _ = collect_runs([runs])
    path = tmp_path_factory.mktemp("clocked") / "report.html"
    extra_axes = network_axes(result, [network("lan_wan"), VARIED])
    path.write_text(page_of(page_data(result, extra_axes=extra_axes)), encoding="utf-8")
    return path


NAMES = "[...document.querySelectorAll('#timeline text:not(.xtick):not(.xtitle)')].map((each) => each.textContent)"


def test_a_round_is_drawn_and_chosen(page: Page, clocked: Path) -> None:
    page.open(clocked)
    assert page.js(NAMES) == ["root", "0", "0/0", "0/1", "1", "1/0", "1/1"]
    assert "Round 1 of 4 of HFedAvg takes" in page.text("line-note") and "on lan_wan" in page.text("line-note")
    page.click('#line-network [data-value="varied"]')
    page.click('#line-round [data-value="4"]')
    page.js("document.querySelector('#line-run').value = 'MTGC'")
    page.js("document.querySelector('#line-run').dispatchEvent(new Event('change'))")
    assert "Round 4 of 4 of MTGC takes" in page.text("line-note") and "on varied" in page.text("line-note")
    assert page.js("document.querySelectorAll('#timeline path.compute').length") == 4
    assert page.js("document.querySelectorAll('#timeline path.merge').length") == 2, "this root merges in no time"
    assert page.text("line-key").split() == ["gets", "computes", "sends", "merges", "waits", "is", "away"]
    page.click("#line-rows summary")
    page.until("document.querySelector('#line-table table')")
    heads = page.js(
        "[...document.querySelectorAll('#line-table th[scope=col]')].map((e) => e.textContent.slice(0, -1))"
    )
    assert heads[:3] == ["node", "level", "gets, s"] and "waits, s" in heads
    assert page.errors() == []


def test_bars_tell_their_seconds_to_pointer_and_keyboard(page: Page, clocked: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    page.open(clocked)
    page.click('#line-network [data-value="varied"]')
    place = (
        "const h = document.querySelector('#timeline'), bar = h.view.rows[2].bars.find((b) => b.what === 'compute');"
    )
    page.js("document.querySelector('#round').scrollIntoView({block: 'center'})")
    x, expected = page.browser.execute_script(f"{place} return [h.across.at(bar.begin + bar.seconds / 2), bar.seconds]")
    svg = page.browser.find_element("css selector", "#timeline svg")
    width, height = page.js(
        "[document.querySelector('#timeline').clientWidth, document.querySelector('#timeline').clientHeight]"
    )
    ActionChains(page.browser).move_to_element_with_offset(
        svg, round(x - width / 2), round(8 + 20 * 2.5 - height / 2)
    ).perform()
    page.until("!document.getElementById('tip').hidden")
    assert page.text("tip").startswith("0/0computes") and f"{expected:.4g} s" in page.text("tip")
    ActionChains(page.browser).move_to_element(page.browser.find_element("css selector", "h1")).perform()
    page.until("document.getElementById('tip').hidden")

    page.js("document.querySelector('#timeline').focus()")
    page.press("#timeline", Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.HOME)
    page.until("!document.getElementById('tip').hidden")
    first = page.js("document.querySelector('#timeline').view.at")
    page.press("#timeline", Keys.ARROW_RIGHT)
    assert page.js("document.querySelector('#timeline').view.at") == [first[0], 1] and first[1] == 0
    page.press("#timeline", Keys.ESCAPE)
    assert page.js("document.getElementById('tip').hidden") is True
    assert page.errors() == []


def test_a_round_in_both_themes_and_as_a_file(page: Page, clocked: Path) -> None:
    colour = "getComputedStyle(document.querySelector('#timeline path.compute')).fill"
    page.open(clocked)
    assert page.js(colour) == "rgb(0, 114, 178)"
    page.click("#theme")
    assert page.js(colour) == "rgb(74, 159, 224)"
    page.js("window.download = (name, text) => { window.saved = [name, text]; }")
    page.click("#line-save")
    name, text = page.js("window.saved")
    assert name == "round.svg" and "var(" not in text and "#4a9fe0" in text


@pytest.mark.parametrize("width", [320, 400, 1920])
def test_a_round_fits_its_card(page: Page, clocked: Path, width: int) -> None:
    page.size(width, 800, phone=width < 400)
    page.open(clocked)
    assert page.js("document.documentElement.scrollWidth") <= width
    box = "document.querySelector('{}').getBoundingClientRect().right"
    assert page.js(box.format("#timeline svg")) <= page.js(box.format("#round"))


def test_a_page_without_networks_has_no_round(page: Page, runs: Path, tmp_path: Path) -> None:
    result, _ = collect_runs([runs])
    (tmp_path / "report.html").write_text(page_of(page_data(result)), encoding="utf-8")
    page.open(tmp_path / "report.html")
    assert page.js("document.getElementById('line-title').offsetParent") is None
    assert page.errors() == []
