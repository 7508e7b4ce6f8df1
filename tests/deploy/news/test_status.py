"""What an operator sees of a tree when asking: its sites, and who never took part in the run."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from stratafl.base import files
from stratafl.base.version import __version__
from stratafl.cli.main import app
from stratafl.deploy.host import attendance, this_machine, view
from stratafl.deploy.host.newsroom import NEWS, parents
from stratafl.deploy.host.supervise import Supervisor
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.sites.site import tree_of
from stratafl.deploy.sites.state_file import Durable
from stratafl.experiment.experiment import Experiment
from tests.deploy.host.folders import deploy, running
from tests.deploy.news.conftest import WELL, write_news


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock by which news become older, so that a busy machine changes no text."""
    monkeypatch.setattr(time, "time", lambda: 1e9)


def test_status_shows_the_whole_tree_that_the_root_knows(sites: Path) -> None:
    failing = dataclasses.replace(
        WELL, state="failing", problem="no data\x07", problem_for=3.0, waited=6.0, why="not connected"
    )
    write_news(sites / "root", {"root": WELL, "paris": WELL, "paris/0": failing})
    for name in ("paris", "paris_0", "paris_1", "rome", "rome_0"):
        files.remove_tree(sites / name)  # they are on other hosts
    ran = CliRunner().invoke(app, ["deploy", "status", "--out", str(sites)])
    assert ran.exit_code == 0, ran.exception
    assert (
        "paris/0: no data\\x07 (for 3 s)" in ran.output
        and "paris has waited for it for 6 s: not connected" in ran.output
    )
    assert "rome/0: nothing was heard from it" in ran.output
    document = json.loads(CliRunner().invoke(app, ["deploy", "status", "--json", "--out", str(sites)]).output)
    assert list(document["sites"]) == ["root", "paris", "rome", "paris/0", "paris/1", "rome/0"]
    seen = document["sites"]["paris/0"]
    fields = {each.name for each in dataclasses.fields(Entry)}
    assert set(seen) == fields | {"parent", "here", "missing"}
    assert seen["parent"] == "paris" and not seen["here"] and seen["problem"] == "no data\\x07"
    assert document["sites"]["rome/0"]["missing"] and document["sites"]["rome/0"]["age"] is None


def test_without_the_root_s_folder_status_shows_what_this_host_knows(sites: Path) -> None:
    files.remove_tree(sites / "root")
    files.remove_tree(sites / "paris_0")
    write_news(sites / "paris", {"paris": WELL, "paris/0": dataclasses.replace(WELL, state="round", round=2, age=1.0)})
    found = view.seen(this_machine.sites(sites))["sites"]
    assert found["paris/0"]["state"] == "round" and found["paris"]["state"] == "stopped"
    assert set(found) == {"paris", "paris/0", "paris/1", "rome", "rome/0"}


def record(root: Path, *rounds: tuple[list[str], list[str]]) -> None:
    lines = [json.dumps({"round": n, "absent": a, "refused": r}) for n, (a, r) in enumerate(rounds, 1)]
    (root / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_who_was_absent_or_refused_in_every_meeting_never_took_part(sites: Path) -> None:
    root = sites / "root"
    record(root, (["paris/0"] * 2, ["rome"]), (["paris/0", "paris/0"], ["rome"]))
    assert attendance.never(root) == ["rome", "paris/0", "rome/0"]
    record(root, (["paris/0"] * 2, ["rome"]), ([], ["rome"]))
    assert attendance.never(root) == ["rome", "rome/0"]
    # in some meetings of a round only: the news know
    record(root, (["paris/0"], []), (["paris/0"], []))
    assert attendance.never(root) == ["paris/0"]
    write_news(root, {"paris/0": Entry(took_part=True)})
    assert attendance.never(root) == []


def test_who_was_never_drawn_is_not_missed(sites: Path) -> None:
    root = sites / "root"
    config = (root / "config.toml").read_text().replace("periods = [2, 1]", "periods = [2, 1]\nparticipation = [1, 1]")
    (root / "config.toml").write_text(config)
    experiment = Experiment.from_toml(root / "config.toml")
    tree = tree_of(experiment)
    above = {name: attendance._above(name, tree) for name in parents(tree, "root")}
    asked = next(attendance._drawn(experiment, tree, above))
    assert len(asked) < 5
    record(root, (sorted(asked), []))
    assert set(attendance.never(root)) == asked


def test_the_root_s_own_exit_code_says_that_a_site_never_took_part(sites: Path) -> None:
    durable = Durable(sites / "root" / "state", "run")
    durable.show(doing="done", round=1)
    durable.close()
    record(sites / "root", ([], []))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        told: list[str] = []
        assert Supervisor(sites / "root", told.append).run() == 0 and told == []
        record(sites / "root", (["paris/1"], ["rome"]))
        assert Supervisor(sites / "root", told.append).run() == attendance.INCOMPLETE
        assert told == ["never took part in this run: rome, paris/1, rome/0"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_up_of_a_run_that_is_over_says_again_who_never_took_part(sites: Path, made: Path) -> None:
    durable = Durable(sites / "root" / "state", files.read_json(sites / "root" / "site.json")["job"])
    durable.show(doing="done", round=1)
    durable.close()
    record(sites / "root", (["paris/0"] * 2, []))
    ran = CliRunner().invoke(app, ["deploy", "up", str(made.parent / "topology.toml"), "--local", "--out", str(sites)])
    assert ran.exit_code == attendance.INCOMPLETE, (ran.exception, ran.output)
    assert ran.output.splitlines()[-1].endswith("WARNING never took part in this run: paris/0")


def test_after_a_reset_nobody_has_taken_part_yet(sites: Path) -> None:
    root = sites / "root"
    record(root, ([], []))
    for name in ("root", "paris"):
        write_news(sites / name, {"paris": Entry(took_part=True), "paris/0": Entry(took_part=True)})
    this_machine.reset(["root"], sites)
    record(root, (["paris/0"] * 2, []))
    assert attendance.never(root) == ["paris/0"]
    assert not (sites / "paris" / NEWS).exists(), "it would tell the root of the run before"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"age": 20.0}, "nothing was heard from it for 20 s"),
        ({"age": None}, "nothing was heard from it"),
        ({"problem": "no data", "state": "failing"}, "no data (for 0 s)"),
        ({"state": "refused"}, "its state is refused"),
        ({"out": "out since round 3: why"}, "out since round 3: why (`stratafl deploy readmit` takes it back)"),
        ({"waited": 30.0, "why": "not connected"}, "paris has waited for it for 30 s: not connected"),
    ],
)
def test_a_monitor_is_told_what_is_wrong(sites: Path, change: dict[str, Any], said: str) -> None:
    entries = dict.fromkeys(("root", "paris", "rome", "paris/0", "paris/1", "rome/0"), WELL)
    durable = Durable(sites / "root" / "state", "run")
    with running(sites / "root"):
        for folder in sites.iterdir():
            if folder.name != "root":
                files.remove_tree(folder)
        write_news(sites / "root", entries)
        assert deploy("status", "--check", "--out", sites) == (0, "")
        write_news(sites / "root", {**entries, "paris/0": dataclasses.replace(WELL, **change)})
        assert deploy("status", "--check", "--out", sites) == (1, f"paris/0: {said}\n")
        code, text = deploy("status", "--check", "--json", "--out", sites)
        assert code == 1 and json.loads(text)["sites"]["paris/0"]
        assert deploy("status", "--out", sites)[0] == 0
        durable.show(doing="done")
        write_news(sites / "root", {**entries, "root": dataclasses.replace(WELL, state="done")})
        assert deploy("status", "--check", "--out", sites) == (0, ""), "a run that is over lacks nothing"
    durable.close()


def test_what_was_started_again_long_ago_is_no_news(sites: Path) -> None:
    often = dataclasses.replace(WELL, restarts={"supernode": 5}, up=218.0)
    for restarted, is_said in ((60.0, True), (view.RECENT + 60, False), (None, False)):
        write_news(sites / "root", {"paris/0": dataclasses.replace(often, restarted=restarted)})
        document = view.seen({"root": sites / "root"})
        found = list(view.remarks(document["sites"]["paris/0"]))
        assert found == ["its supernode was started again, 5 times in 218 s"] * is_said
        assert document["sites"]["paris/0"]["restarts"] == {"supernode": 5}


def test_status_says_who_works_with_another_version(sites: Path) -> None:
    write_news(sites / "root", {"root": WELL, "paris/0": dataclasses.replace(WELL, version="9.9")})
    assert f"paris/0: it works with stratafl 9.9, and this is {__version__}" in deploy("status", "--out", sites)[1]
