"""What the code computes is what it computed before: the fingerprints of many small runs, and that
they can tell."""

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
    """One test for all of them, since a process of its own runs them all."""
    said = differences(table(), computed())
    assert not said, "\n".join(said)


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


@pytest.mark.parametrize(("whole", "in_two_goes"), SAME)
def test_a_run_that_goes_on_leaves_the_same(whole: str, in_two_goes: str) -> None:
    assert table()["runs"][whole] == table()["runs"][in_two_goes]


def off_by(amount: float, canary: str = "") -> Table:
    """The table of one run in which the rule between the groups and their clients is a little
    wrong."""
    rule = mtgc()

    def merge(*given: Any) -> Any:
        memory, model = rule.merge(*given)
        return memory, model + amount if amount else model

    left = simulated(make("depth 2", [mtgc(), rule._replace(merge=merge)]))
    return {"canary": canary, "runs": {"run": fingerprint(left)}}


def test_an_error_in_the_twelfth_digit_shows() -> None:
    right = off_by(0.0)
    assert differences(right, off_by(0.0)) == []
    wrong = differences(right, off_by(1e-12))
    assert wrong == [f"run: {part}: in the last digits" for part in ("model", "nodes", "records")]


def test_on_another_machine_only_an_error_in_the_first_digits_shows() -> None:
    right = off_by(0.0)
    assert differences(right, off_by(1e-12, "another")) == []
    wrong = differences(right, off_by(1e-4, "another"))
    assert [line.split(":")[1].strip() for line in wrong] == ["model", "nodes", "records"]


def test_a_kind_of_state_or_a_name_that_is_gone_shows_on_any_machine() -> None:
    right, other = off_by(0.0), off_by(0.0, "another")
    del other["runs"]["run"]["nodes"]["coarse"]["correction"]
    other["runs"]["run"]["records"]["words"] = "others"
    assert differences(right, other) == ["run: nodes: correction", "run: records: names"]
    assert differences(right, {"canary": "", "runs": {}}) == ["run: not run any more"]
    assert differences({"canary": "", "runs": {}}, right) == ["run: not in the table"]
