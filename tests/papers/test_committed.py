"""The committed results are what the code makes of the committed records of the runs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from papers.harness.report import describe, overview, results_in, stem
from papers.harness.results import measure
from papers.harness.runs import StoredRuns
from papers.harness.series import Options
from papers.mtgc.experiments import SERIES
from papers.mtgc.paper import MTGC

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMMITTED = results_in(MTGC, RESULTS, "paper")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredRuns:
    folder = tmp_path_factory.mktemp("records")
    with tarfile.open(RESULTS / "runs.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return StoredRuns.of(folder)


@pytest.mark.parametrize("name", [entry["stem"] for entry in COMMITTED])
def test_results_follow_from_the_records(name: str, stored: StoredRuns) -> None:
    committed = json.loads((RESULTS / f"{name}.json").read_text())
    what, options = MTGC.find(committed["what"]), Options(partition=committed["partition"])
    results = measure(what, what.cases(options), options, committed["seeds"], stored)
    assert json.loads(json.dumps(describe(MTGC, results, committed["seeds"]))) == committed


@pytest.mark.parametrize("line", ["fedprox", "feddyn"])
def test_runs_with_the_best_of_the_search_are_known_as_such(line: str) -> None:
    rows = json.loads((RESULTS / "fig3.json").read_text())["rows"]
    assert all(row["seeds"] for row in rows if row["line"] == line)


def test_nothing_that_was_measured_is_left_out(stored: StoredRuns) -> None:
    options = Options()
    measured = {
        stem(entry, options)
        for entry in SERIES.values()
        if measure(entry, entry.cases(options), options, 3, stored).comparable
    }
    assert measured == {entry["stem"] for entry in COMMITTED if entry["partition"] == "release_dirichlet"}


def test_the_page_of_claims_follows_from_the_results() -> None:
    assert (RESULTS / "README.md").read_text() == overview(MTGC, RESULTS, "paper")
