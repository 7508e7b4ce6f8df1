"""The architecture page says how packages are layered and which files a round goes through."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import torch
from torch import nn

import stratafl as fl
from tests.commands import command
from tests.docs.blocks import ROOT
from tests.test_architecture import FILES, LAYERS, PACKAGE

PAGE = (ROOT / "docs/architecture.md").read_text()
BLOCKS = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
ROW = re.compile(r"^ *([\w/]+\.py) +(\w+(?:, \w+)*)(?:  |$)", flags=re.MULTILINE)


class Call(NamedTuple):
    """Call of a function of the package."""

    file: str
    function: str
    """Name of the function, or of the class that is made."""
    caller: str
    """File of the calling function; empty where that is not in the package."""


def test_picture_and_table_have_all_packages_in_order() -> None:
    picture = [name for line in BLOCKS[0].splitlines() for name in line[22:].split()]
    assert picture == LAYERS
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, _ in rows] == LAYERS[::-1]
    for package, contents in rows:
        inside = {path.stem for path in (PACKAGE / package).rglob("*")}
        assert set(re.findall(r"`([a-z_]+)`", contents)) - {"simulate"} <= inside, package


def definitions(path: Path) -> set[str]:
    """Names of all functions and classes that a file defines."""
    return set(re.findall(r"^ *(?:def|class) (\w+)", path.read_text(), flags=re.MULTILINE))


def test_named_files_define_the_functions_beside_them() -> None:
    rows = ROW.findall("".join(BLOCKS[1:]))
    assert len(rows) > 50
    for file, functions in rows:
        assert set(functions.split(", ")) <= definitions(PACKAGE / file), file
    named = re.findall(r"`(\w+/[\w/]+\.py)`", PAGE)
    assert {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()


def traced(function: Callable[[], object]) -> list[Call]:
    """The calls of functions of the package while a function runs."""
    files = {str(path): path.relative_to(PACKAGE).as_posix() for path in FILES}
    calls = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in files:
            name = code.co_qualname.partition(".")[0] if code.co_name == "__init__" else code.co_name
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            calls.append(Call(files[code.co_filename], name, files.get(caller, "")))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def check_order(leg: str, calls: Sequence[Call]) -> int:
    """Check that every file of a leg stands there once, and that its first function is first called
    after that of the file above; returns the place of the last of these calls."""
    rows = ROW.findall(leg)
    files = [file for file, _ in rows]
    assert len(set(files)) == len(files)
    called = [(call.file, call.function) for call in calls]
    places = [called.index((file, functions.split(", ")[0])) for file, functions in rows]
    assert places == sorted(places), [rows[place] for place in range(1, len(rows)) if places[place] < places[place - 1]]
    assert all((file, name) in called for file, functions in rows for name in functions.split(", "))
    return places[-1]


def traced_round() -> list[Call]:
    """The calls of a global round of four clients, whose only edge level synchronises once."""
    torch.manual_seed(0)
    data = torch.randn(40, 4), torch.randint(0, 3, (40,))
    parts = [range(10 * client, 10 * client + 10) for client in range(4)]
    simulation = fl.simulate(
        nn.Linear(4, 3),
        fl.Data(data, test=data, partition=[list(part) for part in parts]),
        "4",
        rounds=1,
        schedule=[2],
        client=fl.Client(batch_size=5),
        evaluation=fl.Evaluation(levels=[1]),
        execution=fl.Execution(engine="loop"),
    )
    return traced(simulation.advance)


def test_a_round_enters_the_files_in_the_order_given() -> None:
    calls, start = traced_round(), 0
    legs = dict(re.findall(r"^(down|up|record): .*\n((?:  .*\n)+)", "".join(BLOCKS[1:3]), flags=re.MULTILINE))
    assert list(legs) == ["down", "up", "record"]
    for leg in legs.values():
        start += check_order(leg, calls[start:]) + 1


(WALK,) = [block for block in BLOCKS if "run_command" in block]
"""The way from a command to a simulation."""


def test_a_command_enters_the_files_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "[tree]\nshape = 2\n[data]\nsource = 'synthetic'\n[model]\nname = 'logistic'\n[schedule]\nperiods = [1]\n"
    (tmp_path / "run.toml").write_text(f"rounds = 1\n{config}")
    arguments = ["run", str(tmp_path / "run.toml"), "--runs", str(tmp_path / "runs"), "--quiet"]
    calls = traced(lambda: command(monkeypatch, *arguments))
    assert calls[check_order(WALK, calls)].function == "Simulation"


def test_simulate_goes_the_same_way_from_build_on() -> None:
    calls = traced(lambda: fl.simulate("logistic", "synthetic", 2, rounds=1, schedule=[1]))
    begin = [(call.file, call.function) for call in calls].index(("experiment/experiment.py", "simulate"))
    assert calls[begin + check_order(WALK[WALK.index("simulation/build.py") :], calls[begin:])].function == "Simulation"


def test_a_synchronisation_enters_the_federation_once() -> None:
    calls = traced_round()
    training = calls[: [call.function for call in calls].index("_rank_records")]
    entered = [
        call
        for call in training
        if (call.caller, call.file) == tuple(f"{n}/{n}.py" for n in ("simulation", "federation"))
    ]
    assert [call.function for call in entered] == ["train_and_synchronize"]
