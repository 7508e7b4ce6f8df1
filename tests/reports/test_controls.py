"""Controls of the page: sorting, exports, targets, axes and the slider."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratafl.reports.summary import as_csv, as_latex, columns, default_targets
from stratafl.runs.groups import collect_runs, group_runs, select_metric
from stratafl.runs.session import RunSession
from tests.reports.conftest import METHODS, ROUNDS, Page, edit, experiment, write

SAVED = """(() => {
  window.saved = {};
  download = (name, text) => { window.saved[name] = text; };
})()"""


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every node was evaluated."""
    folder = tmp_path_factory.mktemp("nodes") / "runs"
    RunSession.start(experiment(evaluation={"levels": [1, 2]}), "nodes", folder).run()
    return folder


def column(page: Page, number: int) -> list[str]:
    cells = f"#summary tbody tr > :nth-child({number})"
    return page.js(f"[...document.querySelectorAll('{cells}')].map((cell) => cell.textContent)")


def heads(page: Page) -> list[str]:
    return page.js(
        "[...document.querySelectorAll('#summary th button')].map((button) => button.firstChild.textContent)"
    )


def test_settings_have_one_name_everywhere(page: Page, report: Path) -> None:
    page.open(report)
    assert column(page, 1) == list(METHODS)
    chips = (
        "[...document.querySelectorAll('#curves-title ~ .chips span:nth-of-type(1)')].map((each) => each.textContent)"
    )
    assert page.js(chips) == [line["label"] for line in page.drawn("curve-loss")] == list(METHODS)
    assert sorted(page.js("[...document.querySelectorAll('.bar-name')].map((each) => each.title)")) == sorted(METHODS)
    assert page.js("[...document.querySelectorAll('#differences th')].map((each) => each.textContent)")[1:] == list(
        METHODS
    )
    runs = page.js("[...document.querySelectorAll('#split option')].map((each) => each.textContent)")
    assert runs == [f"{name}, seed {seed}" for name in METHODS for seed in (0, 1)]


def test_the_table_is_sorted_by_click_and_by_key(page: Page, copied: Path, tmp_path: Path) -> None:
    page.open(write(copied, tmp_path / "report.html"))
    for number, title in enumerate(heads(page), 1):
        before = column(page, 1)
        values = page.js(f"allColumns()[{number - 1}].cells.map((cell) => cell.mean ?? null)")
        better = page.js(f"allColumns()[{number - 1}].better")
        head = f"#summary th:nth-child({number})"
        page.press(f"{head} button", "\ue007")  # enter
        assert page.js(f"document.querySelector('{head}').ariaSort") == (
            "descending" if better == "higher" else "ascending"
        )
        if title == "setting":
            assert column(page, 1) == sorted(before)
        elif None not in values and values[0] != values[1]:
            first = before[values.index((max if better == "higher" else min)(values))]
            assert column(page, 1)[0] == first, title
            page.click(f"{head} button")
            assert column(page, 1)[1] == first, title
            page.click(f"{head} button")
        assert page.js("document.activeElement.closest('th')?.cellIndex") == number - 1, "the key can be pressed again"
        page.js("(state.sort = null, drawSummary())")
        assert column(page, 1) == before
    assert page.errors() == []


def test_the_best_of_each_column_is_marked(page: Page, report: Path, runs: Path) -> None:
    page.open(report)
    result = group_runs(collect_runs([runs])[0])
    metrics, judged = select_metric(result)
    expected = columns(result, metrics, judged, default_targets(result, judged))
    assert heads(page) == [each.title for each in expected]
    for number, each in enumerate(expected[1:], 2):
        marked = page.js(
            f"[...document.querySelectorAll('#summary tbody td:nth-child({number})')].map((c) => c.className)"
        )
        assert marked == ["best" if place in each.best else "" for place in range(len(result))], each.title
        assert column(page, number) == [cell.text for cell in each.cells], each.title


@pytest.mark.parametrize(("metric", "targets"), [("accuracy", [0.3, 0.55]), ("loss", [2.0])])
def test_exports_are_what_the_command_line_writes(
    page: Page, report: Path, runs: Path, metric: str, targets: list[float]
) -> None:
    page.open(report)
    page.js(SAVED)
    page.js(f"(document.getElementById('metric').value = '{metric}', "
            "document.getElementById('metric').dispatchEvent(new Event('change')))")  # fmt: skip
    page.browser.find_element("css selector", "#target").clear()
    page.press("#target", ", ".join(f"{100 * each if metric == 'accuracy' else each:g}" for each in targets))
    result = group_runs(collect_runs([runs])[0])
    metrics, judged = select_metric(result, metric)
    table = columns(result, metrics, judged, targets)
    for button in ("#save-csv", "#save-latex"):
        page.click(button)
    saved = page.js("window.saved")
    assert saved["summary.tex"] == as_latex(table)
    assert saved["summary.csv"] == as_csv(table)
    page.click("#copy-latex")
    page.until("['Copied', 'Not allowed'].includes(document.getElementById('copy-latex').textContent)")
    assert page.errors() == []


def test_targets_and_metric_are_chosen_on_the_page(page: Page, report: Path) -> None:
    page.open(report)
    field = page.browser.find_element("css selector", "#target")
    field.clear()
    field.send_keys("30 55")
    assert [title for title in heads(page) if title.startswith("rounds to")] == ["rounds to 30 %", "rounds to 55 %"]
    assert page.js("document.querySelectorAll('#curve-accuracy .goal').length") >= 1
    assert page.js("[...document.querySelectorAll('#goal button')].map((each) => each.textContent)") == ["30 %", "55 %"]
    field.send_keys(" nonsense")
    assert page.js("document.getElementById('target').ariaInvalid") == "true"
    assert "rounds to 55 %" in heads(page)
    page.js("(document.getElementById('metric').value = 'loss', "
            "document.getElementById('metric').dispatchEvent(new Event('change')))")  # fmt: skip
    assert any(title.startswith("rounds to") and "%" not in title for title in heads(page))
    assert "best loss" in heads(page) and "at most" in page.text("bars-note")
    assert page.errors() == []


def test_bars_show_what_a_target_costs(page: Page, report: Path) -> None:
    page.open(report)
    page.js("chooseTargets('5')")
    costs = page.js("state.data.settings.map((setting) => costOf(setting, metricOf('accuracy'), 0.05, 'bytes'))")
    page.choose("cost", "bytes")
    row = "[row.querySelector('.bar-name').title, row.querySelector('.fill').getBoundingClientRect().width]"
    widths = page.js(f"[...document.querySelectorAll('.bar-row')].map((row) => {row})")
    assert [name for name, _ in widths] == [
        name for _, name in sorted((cost["mean"], name) for cost, name in zip(costs, METHODS, strict=True))
    ]
    assert "per client" in page.js("document.querySelector('.bar-value').textContent")
    by_name = dict(widths)
    ratio = costs[0]["mean"] / costs[1]["mean"]
    assert by_name["HFedAvg"] / by_name["MTGC"] == pytest.approx(ratio, rel=0.02), "one scale for all bars"
    page.js("chooseTargets('99.9')")
    assert f"not within {ROUNDS} rounds" in page.text("bars")
    assert page.js("document.querySelectorAll('.fill.lacking').length") == len(METHODS)
    page.js("chooseTargets('')")
    assert page.js("document.getElementById('bars').offsetParent") is None
    assert page.errors() == []


def test_logarithmic_axes(page: Page, report: Path) -> None:
    page.open(report)
    chart = "document.querySelector('#curve-loss .plot').chart"
    ends = f"[{chart}.x.domain[0] > 0, {chart}.x.log, {chart}.y.log]"
    assert page.js(ends)[1:] == [False, False]
    page.click("#log-x")
    page.click("#log-y")
    assert page.js(ends) == [True, True, True]
    assert page.js("document.querySelector('#drift-1 .plot').chart.x.log") is True
    assert page.lines("curve-loss", len(METHODS)) == len(METHODS)
    # equal factors are equal distances
    steps = page.js(f"[1, 2, 4].map((round) => {chart}.x.at(round))")
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1])
    page.click("#log-x")
    steps = page.js(f"[1, 2, 3].map((round) => {chart}.x.at(round))")
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1])
    assert page.js("document.getElementById('log-y').ariaPressed") == "true"
    assert page.errors() == []


def opacities(page: Page) -> list[float]:
    return page.js("document.getElementById('tree').cells.map(({ cell }) => Number(cell.getAttribute('fill-opacity')))")


def test_the_tree_is_coloured_round_by_round(page: Page, nodes: Path, tmp_path: Path) -> None:
    page.open(write(nodes, tmp_path / "report.html"))
    records = collect_runs([nodes])[0][0].rounds
    assert page.js("[...document.querySelectorAll('#colour button')].map((each) => each.dataset.value)") == [
        "accuracy", "loss", "drift.drift", "drift.correction", "drift.progress", "samples",
    ]  # fmt: skip
    assert f"round {ROUNDS} of {ROUNDS}" in page.text("stop-text")
    last = opacities(page)
    assert len(last) == 1 + 2 + 4
    page.press("#stop", "\ue011")  # home
    assert f"round 1 of {ROUNDS}" in page.text("stop-text")
    first = opacities(page)
    assert first != last
    # the more accurate, the darker: order as in the record
    clients = [records[0]["nodes"][name]["accuracy"] for name in ("0/0", "0/1", "1/0", "1/1")]
    assert sorted(range(4), key=clients.__getitem__) == sorted(range(4), key=first[3:].__getitem__)
    page.click('#colour [data-value="drift.drift"]')
    assert len(set(opacities(page)[3:])) == 1, "drift is known of a level"
    page.click('#colour [data-value="samples"]')
    assert page.js("document.getElementById('slider').offsetParent") is None
    assert page.errors() == []


def test_nodes_are_told_by_hover_and_in_a_table(page: Page, nodes: Path, tmp_path: Path) -> None:
    page.open(write(nodes, tmp_path / "report.html"))
    record = collect_runs([nodes])[0][0].rounds[-1]
    page.click("#nodes summary")
    page.until("document.querySelector('#node-table tbody')")
    assert page.js("document.querySelectorAll('#node-table tbody tr').length") == 1 + 2 + 4
    accuracy = [f"{100 * record['nodes'][name]['accuracy']:.3g} %" for name in ("0", "1", "0/0", "0/1", "1/0", "1/1")]
    cells = "[...document.querySelectorAll('#node-table tbody td:nth-child(4)')].map((cell) => cell.textContent)"
    assert page.js(cells) == [f"{100 * record['metrics']['accuracy']:.3g} %", *accuracy]
    page.click("#node-table th:nth-child(4) button")
    numbers = [float(text.split()[0]) for text in page.js(cells) if text != "—"]
    assert numbers == sorted(numbers)
    tree = "document.getElementById('tree')"
    left, top = page.js(f"[{tree}.getBoundingClientRect().left + {tree}.box.left, {tree}.getBoundingClientRect().top]")
    page.js(f"nodeHover({tree}, {{clientX: {left + 4}, clientY: {top + 100}}})")
    assert "0/0" in page.text("tip") and accuracy[2] in page.text("tip") and "samples" in page.text("tip")
    assert page.errors() == []


def test_mean_worst_and_spread_over_nodes(page: Page, nodes: Path, tmp_path: Path) -> None:
    page.open(write(nodes, tmp_path / "report.html"))
    values = [[result["accuracy"] for name, result in record["nodes"].items() if name.count("/") == 1]
              for record in collect_runs([nodes])[0][0].rounds]  # fmt: skip
    assert page.drawn("over-2")[0]["y"] == pytest.approx([sum(each) / 4 for each in values], abs=1e-5)
    page.click('#over [data-value="worst"]')
    assert page.drawn("over-2")[0]["y"] == pytest.approx([min(each) for each in values], abs=1e-5)
    page.click('#over [data-value="spread"]')
    assert "percentage points" in page.js("document.querySelector('#over-2 .ytitle').textContent")
    assert page.errors() == []


def test_a_report_without_nodes_has_nothing_on_them(page: Page, report: Path) -> None:
    page.open(report)
    assert page.js("document.getElementById('over-title').offsetParent") is None
    assert page.js("document.querySelector('#colour [aria-pressed=\"true\"]').dataset.value") == "drift.drift"


def test_a_run_with_something_to_say_has_a_line(page: Page, copied: Path, tmp_path: Path) -> None:
    one, two, *_ = sorted(copied.iterdir())
    edit(one / "run.json", lambda values: values.update(notes=["the transforms were read once"]))
    edit(two / "status.json", lambda values: values.update(status="failed", reason="no room left"))
    lines = [json.loads(line) for line in (one / "rounds.jsonl").read_text().splitlines()]
    lines[1]["absent"] = ["1/0"]
    (one / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    page.open(write(copied, tmp_path / "report.html"))
    output: list[Any] = page.js(
        "[...document.querySelectorAll('#notes li')].map((each) => [each.className, each.textContent])"
    )
    assert [kind for kind, _ in output] == ["bad", ""], "what went wrong is first, and the others say nothing"
    assert "seed 1 failed after 4 of 4 rounds: no room left" in output[0][1]
    assert "seed 0 absent: 1/0 in round 2; the transforms were read once" in output[1][1]
    assert page.errors() == []


def test_a_chart_is_saved_as_a_file_that_stands_alone(page: Page, report: Path) -> None:
    page.open(report)
    page.js(SAVED)
    page.js("document.querySelector('#curve-loss .save').click()")
    saved = page.js("window.saved")["curve-loss.svg"]
    assert saved.startswith("<svg") and "var(" not in saved and "test" not in saved.lower()[:4]
    assert saved.count('class="line"') == len(METHODS)


def shown_runs(page: Page) -> list[str]:
    """Titles of the rows of the table of runs that are not filtered out."""
    rows = "[...document.querySelectorAll('#run-list tbody tr')].filter((row) => !row.hidden)"
    return page.js(f"{rows}.map((row) => row.querySelector('.lead span').textContent)")


def test_runs_are_filtered_by_words_and_by_column(page: Page, copied: Path, tmp_path: Path) -> None:
    for number, folder in enumerate(sorted(copied.iterdir())):
        tags = ["base", f"lot{number}"]
        edit(folder / "run.json", lambda values, tags=tags: values["config"].update(storage={"tags": tags}))
    page.open(write(copied, tmp_path / "report.html"))
    runs = [f"{name}, seed {seed}" for name in METHODS for seed in (0, 1)]
    heads = page.js("[...document.querySelectorAll('#run-list thead button')].map((b) => b.firstChild.textContent)")
    assert heads[:6] == ["run", "tags", "method", "seed", "status", "rounds"] and "bytes on the top link" in heads
    assert sorted(shown_runs(page)) == runs and page.text("run-count") == "4 runs"
    page.press("#run-filter", "mtgc DONE base")
    assert shown_runs(page) == runs[2:] and page.text("run-count") == "2 of 4 runs"
    page.press("#run-list [data-column=seed]", ">=1")
    assert shown_runs(page) == runs[3:]
    page.js("drawAll()")  # as when new rounds come in
    assert page.js("document.activeElement.dataset.column") == "seed" and shown_runs(page) == runs[3:]
    page.browser.find_element("css selector", "#run-filter").clear()
    page.press("#run-list [data-column=seed]", "\b\b\b")
    page.press("#run-list [data-column=tags]", "=base, lot2")
    assert len(shown_runs(page)) == 1
    page.press("#run-list [data-column=status]", "<5")
    assert shown_runs(page) == [], "a text is no number"
    assert page.errors() == []


def test_configs_of_chosen_runs_stand_side_by_side(page: Page, report: Path) -> None:
    page.open(report)
    table = "[...document.querySelectorAll('#differences tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    assert page.js(table) == [["key", *METHODS], ["method.name", *METHODS.values()]]
    for place in (0, 1):
        page.press(f"#run-list tbody tr:nth-child({place + 1}) input", " ")
    assert page.js(table) == [["key", "HFedAvg, seed 0", "HFedAvg, seed 1"], ["seed", "0", "1"]]
    page.click('#compare [data-value="all"]')
    rows = {row[0]: row[1:] for row in page.js(table)}
    assert rows["method.name"] == ["hfedavg"] * 2 and rows["rounds"] == [str(ROUNDS)] * 2
    assert page.js("[...document.querySelectorAll('.differing')].map((row) => row.cells[0].textContent)") == ["seed"]
    page.click("#choose-none")
    assert page.js(table)[0] == ["key", *METHODS] and page.js("state.chosenRuns.size") == 0
    assert page.errors() == []


def test_any_recorded_value_is_drawn_against_any_axis(page: Page, copied: Path, tmp_path: Path) -> None:
    old = sorted(copied.iterdir())[:2]
    for folder in old:
        records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        lines = [json.dumps({key: value for key, value in r.items() if key != "traffic"}) for r in records]
        (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    page.open(write(copied, tmp_path / "report.html"))
    lacking = {folder.name.partition("-")[0] for folder in old}
    assert page.text("curves-note") == ""
    page.choose("axis", "traffic.1")
    assert {line["label"] for line in page.drawn("curve-accuracy")} == set(METHODS) - lacking
    assert all(name in page.text("curves-note") for name in lacking)
    page.choose("shown", "drift.2.drift")
    assert page.js("[...document.querySelectorAll('#curves figure')].map(({id}) => id)") == ["curve-drift.2.drift"]
    page.choose("axis", "rounds")
    page.choose("cost", "seconds")
    assert page.js("document.querySelectorAll('.bar-value .quiet').length") == 0, "nobody is ahead by the wall clock"
    alone = write(old, tmp_path / "old.html")
    page.open(alone)
    assert "bytes on the top link" in page.text("curves-note")
    assert not page.js("[...document.getElementById('axis').options].some(({value}) => value.startsWith('traffic'))")
    assert page.errors() == []
