"""Results are the same as before: fingerprints of many small runs, and their sensitivity."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from stratafl import mtgc
from tests.fingerprint_runs import RANKED, REGISTERED, RUNS, SHAPES, make, simulated
from tests.fingerprints import RANKS, TABLE, Table, as_text, computed, differences, fingerprint


@cache
def table() -> Table:
    return json.loads(TABLE.read_text())


def test_every_run_ends_as_it_did() -> None:
    """One test for all runs, since one process computes them all."""
    lines = differences(table(), computed())
    assert not lines, "\n".join(lines)


def test_the_table_has_every_run_rule_and_depth() -> None:
    ranked = {f"{name}, {count}" for name in RANKED for count in ("one rank", f"{RANKS} ranks")}
    assert set(table()["runs"]) == {*RUNS, *ranked}
    assert len(REGISTERED) >= 12 and {int(shape.split(",")[0][-1]) for shape in SHAPES} == {1, 2, 3, 4}
    assert TABLE.read_text() == as_text(table())


SAME = [
    ("three rules", "resumed, three rules"),
    ("mtgc, depth 2, uneven", "resumed, mtgc"),
    ("by the command", "by the command, interrupted"),
    ("deployed, buffers", "deployed, restarted"),
]


@pytest.mark.parametrize(("uninterrupted", "in_two_goes"), SAME)
def test_a_resumed_run_has_the_same_fingerprint(uninterrupted: str, in_two_goes: str) -> None:
    assert table()["runs"][uninterrupted] == table()["runs"][in_two_goes]


def off_by(amount: float, canary: str = "") -> Table:
    """Table of one run whose rule adds `amount` to the models of groups."""
    rule = mtgc()

    def merge(*arguments: Any) -> Any:
        memory, model = rule.merge(*arguments)
        return memory, model + amount if amount else model

    left = simulated(make("depth 2", [mtgc(), rule._replace(merge=merge)]))
    return {"canary": canary, "runs": {"run": fingerprint(left)}}


def test_an_error_in_the_twelfth_digit_shows() -> None:
    right = off_by(0.0)
    assert differences(right, off_by(0.0)) == []
    wrong = differences(right, off_by(1e-12))
    assert wrong == [f"run: {part}: in the last digits" for part in ("model", "nodes", "records")]


def test_another_machine_shows_errors_in_the_first_digits_only() -> None:
    right = off_by(0.0)
    assert differences(right, off_by(1e-12, "another")) == []
    wrong = differences(right, off_by(1e-4, "another"))
    assert [line.split(":")[1].strip() for line in wrong] == ["model", "nodes", "records"]


def test_missing_states_and_names_show_on_any_machine() -> None:
    right, other = off_by(0.0), off_by(0.0, "another")
    del other["runs"]["run"]["nodes"]["coarse"]["correction"]
    other["runs"]["run"]["records"]["words"] = "others"
    assert differences(right, other) == ["run: nodes: correction", "run: records: names"]
    assert differences(right, {"canary": "", "runs": {}}) == ["run: not run any more"]
    assert differences({"canary": "", "runs": {}}, right) == ["run: not in the table"]
