"""`deploy up` with one leaf without data, one with a wrong clock, one never started and one on a
full disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from stratafl.deploy.host.attendance import INCOMPLETE
from stratafl.deploy.sites.provision import DeploymentTopology, provision

pytestmark = pytest.mark.deploy
LIMIT = 240
CONFIG = """
rounds = 2
[tree]
shape = { paris = 2, rome = 3 }
[model]
name = "mlp"
hidden = [8]
[schedule]
periods = [1, 3]
"""
SECRET = "Jane Doe, born 1961-04-02"
HOOK = '''
"""The clock of rome/0 is 8 s ahead, and the disk of paris/1 is full, as its processes see them."""
import datetime, errno, os, time

def here(name):
    try:
        return os.path.basename(os.getcwd()) == name
    except OSError:
        return False

def shifted(now, one_second):
    return lambda: now() + (8 * one_second if here("rome_0") else 0)

time.time, time.time_ns = shifted(time.time, 1), shifted(time.time_ns, 10**9)

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

datetime.datetime = Shifted
replace = os.replace

def refusing(source, target, **given):
    if here("paris_1") and str(target).endswith("state.safetensors"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    replace(source, target, **given)

os.replace = refusing
'''


def stratafl(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = [str(folder / "hook"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return subprocess.Popen(
        [sys.executable, "-m", "stratafl", "deploy", *arguments, "--out", str(folder / "sites")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def status(folder: Path) -> dict[str, Any]:
    shown, _ = stratafl(folder, "status", "--json").communicate(timeout=LIMIT)
    found: dict[str, Any] = json.loads(shown)["sites"]
    return found


def test_the_console_says_who_is_missing_and_why(tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    (tmp_path / "run.toml").write_text(CONFIG)
    port = 33000 + os.getpid() % 1000
    (tmp_path / "patients.py").write_text(f"def load():\n    raise ValueError('{SECRET}')\n")
    topology = f'config = "run.toml"\nbase_port = {port}\ndeadline = [40, 10]\n[data]\n"paris/0" = "patients.py"\n'
    (tmp_path / "topology.toml").write_text(topology)
    folders = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    folders["rome/1"].rename(tmp_path / "rome_1")  # as if it were for another host, where nobody starts it

    up = stratafl(tmp_path, "up", str(tmp_path / "topology.toml"), "--local")
    console: list[str] = []
    told: dict[str, Any] = {}
    with up:
        assert up.stdout is not None
        for line in up.stdout:
            console.append(line.rstrip("\n"))
            while line.startswith("round 1 of 2") and not told.get("rome/2", {}).get("took_part"):
                told = status(tmp_path)  # news of who was there is seconds behind the round's line
                assert up.poll() is None, told
    code = up.returncode
    print("\n".join(console))

    warned = [line for line in console if re.match(r"\S+T\S+[+-]\d\d:\d\d WARNING ", line)]
    text = "\n".join(warned)
    assert re.search(r"paris/0: data of this leaf = .*\(ValueError in the function load of patients.py, line 2; ", text)
    assert "paris/0: its node was started again" in text
    # in its own words, or in its parent's if these come first: one trouble is told once
    assert re.search(r"paris/1: (refused|waited for, for \d+ s): file = .*No space left on device", text)
    assert re.search(r"the clock of rome/0 is (7\.\d|8\.\d) s ahead of that of rome", text)
    assert "rome/1 is missing: nothing was heard from it" in text
    assert code == INCOMPLETE and len(console) < 40
    named = warned[-1].partition("never took part in this run: ")[2].split(", ")
    assert console[-1] == warned[-1] and set(named) - {"rome/0"} == {"paris/0", "paris/1", "rome/1"}

    assert told["paris/0"]["state"] == told["paris/1"]["state"] == "failing"
    assert told["rome/1"]["missing"] and told["rome/1"]["why"] in ("", "not connected")
    assert abs(told["rome/0"]["clock"] - 8) < 2 and told["rome/2"]["took_part"]
    assert not told["rome/2"]["problem"] and not told["rome/2"]["missing"]

    files = [path for path in (tmp_path / "sites").rglob("*") if path.is_file()]
    quoting = {path.relative_to(tmp_path / "sites") for path in files if SECRET.encode() in path.read_bytes()}
    assert quoting == {Path("paris_0", "logs", "node.log")} and SECRET not in "\n".join(console) + json.dumps(told)


def test_a_site_that_is_killed_is_missing_and_back_within_seconds(tmp_path: Path) -> None:
    """Its supervisor alone, by the news of its parent: the root and one leaf are started apart."""
    config = (
        CONFIG.replace("{ paris = 2, rome = 3 }", '"1"').replace("[1, 3]", "[3]").replace("rounds = 2", "rounds = 500")
    )
    (tmp_path / "run.toml").write_text(config)
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {34000 + os.getpid() % 1000}\n')
    folders = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")

    def site(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stratafl", "deploy", "site", str(folders[name])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    root, leaf = site("root"), site("0")
    try:
        give_up = time.monotonic() + LIMIT
        while not status(tmp_path)["0"]["took_part"]:
            assert time.monotonic() < give_up
            time.sleep(0.5)
        leaf.kill()
        leaf.communicate()
        began = time.monotonic()
        said = first(root, "0 is missing: nothing was heard from it")
        assert time.monotonic() - began < 20 and "before that" in said
        leaf = site("0")
        first(root, "0 is back after")
    finally:
        for process in (root, leaf):
            process.terminate()
            process.communicate(timeout=60)


def first(process: subprocess.Popen[str], text: str) -> str:
    """The first line of its console with this text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"ended without {text}")
