"""The page in a real browser, over odd stored runs: it says what they lack, and runs nothing a user
wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratafl.reports.page import json_for_html
from tests.reports.conftest import SETTINGS, Page, edit, write

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
    assert "<" not in json_for_html({"name": "</script><script>"}) and "&" not in json_for_html({"name": "&lt;"})
    assert json.loads(json_for_html({"name": "</script>&"})) == {"name": "</script>&"}


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
