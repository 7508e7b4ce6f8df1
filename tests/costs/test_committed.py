"""The committed page is what the code makes of the committed records."""

from __future__ import annotations

import csv
import itertools
import json

import pytest

from benchmarks.studies import waiting_policies
from benchmarks.studies.paper_with_clock import RESULTS, page, picture, results, table


@pytest.mark.slow
def test_the_page_follows_from_the_records(tmp_path) -> None:
    result = results()
    assert page(result) == (RESULTS / "priced.md").read_text()
    made, committed = (list(csv.DictReader(text.splitlines())) for text in (
        table(result), (RESULTS / "priced.csv").read_text()))  # fmt: skip
    numbers = ("seconds", "joules", "root_bytes")
    for one, other in zip(made, committed, strict=True):
        assert {k: v for k, v in one.items() if k not in numbers} == {
            k: v for k, v in other.items() if k not in numbers
        }
        known = [name for name in numbers if other[name]]
        assert [float(one[name]) for name in known] == pytest.approx([float(other[name]) for name in known], rel=1e-6)
    picture(result, tmp_path / "priced.png")
    assert (tmp_path / "priced.png").stat().st_size > 50_000


def test_the_page_of_policies_follows_from_the_runs(tmp_path) -> None:
    known = json.loads((RESULTS / "policies.json").read_text())
    assert waiting_policies.page(known) == (RESULTS / "policies.md").read_text()
    found = {(run["method"], run["policy"], run["seed"]) for run in known["runs"]}
    assert found == set(itertools.product(waiting_policies.METHODS, waiting_policies.POLICIES, waiting_policies.SEEDS))
    waiting_policies.drawn(known["runs"], tmp_path / "policies.png")
    assert (tmp_path / "policies.png").stat().st_size > 50_000
