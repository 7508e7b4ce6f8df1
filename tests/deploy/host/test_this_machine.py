"""The sites of one machine: which folders are meant, what is stopped, and what looking costs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from stratafl.base import files
from stratafl.deploy.host import this_machine
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from tests.deploy.host.folders import deploy, running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a topology is, and the sites made of it."""
    (tmp_path / "run.toml").write_text(
        '[tree]\nshape = "2"\n[schedule]\nperiods = [1]\n[model]\nname = "mlp"\nhidden = [2]\n'
    )
    (tmp_path / "topology.toml").write_text('config = "run.toml"\nbase_port = 23800\n')
    provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    return tmp_path


@pytest.mark.parametrize("name", ["backup", "root.bak"])
def test_two_folders_of_one_site_are_an_error(folder: Path, name: str) -> None:
    out = folder / "sites"
    shutil.copytree(out / "root", out / name)
    with running(out / "root") as process:
        for command in (["status"], ["down"], ["up", folder / "topology.toml", "--local"], ["reset", "0"]):
            code, said = deploy(*command, "--out", out)
            assert code != 0 and f"{out}: has two folders of site root" in said.replace("'", ""), command
            assert name in said and "and it runs in root:" in said, command
        assert process.poll() is None
        # the one that is meant can be named
        assert deploy("down", out / "root") == (0, "root: stopped\n")
        process.wait(20)


@pytest.mark.parametrize("name", ["current", "z"])
def test_a_link_to_a_site_is_no_second_folder_of_it(folder: Path, name: str) -> None:
    out = folder / "sites"
    (out / name).symlink_to(out / "root")
    assert this_machine.sites(out)["root"] == out / "root"
    assert set(this_machine.chosen([str(out / name)], out)) == {"root"}


def test_only_one_folder_of_a_site_is_started(folder: Path) -> None:
    out = folder / "sites"
    shutil.copytree(out / "0", out / "copy")
    code, said = deploy("site", out / "0", out / "1", out / "copy")
    assert code != 0 and f"and {out / '0'} are of one site, 0: " in said and "copy" in said


def test_a_tree_without_its_root_is_not_started(folder: Path) -> None:
    out = folder / "sites"
    shutil.rmtree(out / "root")
    code, said = deploy("up", folder / "topology.toml", "--local", "--out", out)
    assert code != 0 and "the root's folder is not in it" in said


def test_down_says_what_it_stopped_and_what_runs_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "sites"
    monkeypatch.setattr(this_machine, "PATIENCE", 2.0)
    with running(out / "0"), running(out / "1", deaf=True):
        code, said = deploy("down", "--out", out)
    assert code != 0 and said.startswith("0: stopped\n") and "['1']" in said and "still run" in said
    (out / "0" / "state").mkdir()
    with running(out / "0" / "state"):  # its node is left alone
        code, said = deploy("down", "--out", out)
    assert code != 0 and "['0']" in said
    assert deploy("down", "--out", out) == (0, "nothing ran\n")


def test_sites_are_named_by_folder_or_name_or_the_folder_they_lie_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "sites"

    def shown(*words: object) -> set[str]:
        code, said = deploy("status", *words)
        assert code == 0, said
        return {line.split()[0] for line in said.splitlines() if " stopped " in line or " missing " in line}

    everything = {"root", "0", "1"}
    assert shown(out / "root") == shown("--out", out / "root") == shown(out) == everything
    assert shown(out / "0") == shown("0", "--out", out) == {"0"}
    monkeypatch.chdir(folder)
    assert shown() == shown("sites/root") == everything
    monkeypatch.chdir(out / "root")
    assert shown(".") == everything
    code, said = deploy("status", "2", "--out", out)
    assert code != 0 and "known: 0, 1, root" in said
    with running(out / "0") as zero, running(out / "1") as one:
        assert deploy("down", out / "0") == (0, "0: stopped\n")
        assert zero.wait(20) and one.poll() is None
        assert deploy("down", "1", "--out", out) == (0, "1: stopped\n")


def test_what_has_not_changed_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a tree are many and its changes few: 20 looks read what 1 does."""
    out, reads, read = folder / "sites", 0, files.read_bytes
    (out / "root" / "rounds.jsonl").write_text('{"round": 1}\n' * 100)
    for name in ("root", "0", "1"):
        (out / name / "state").mkdir()
        files.write_json(out / name / "state" / "status.json", {"doing": "waiting"})
    files.write_json(out / "root" / "news.json", {"at": 0.0, "sites": {}})
    done = f'sleep 2; echo \'{{"doing": "done"}}\' > {out}/root/state/status.json; sleep 1'

    def start(*folders: Path) -> subprocess.Popen[bytes]:
        nonlocal reads
        reads = 0
        return subprocess.Popen(["sh", "-c", done])

    def counted(path: Path, *limits: int) -> bytes:
        nonlocal reads
        reads += 1
        return read(path, *limits)

    monkeypatch.setattr(this_machine, "start", start)
    monkeypatch.setattr(files, "read_bytes", counted)
    said: list[str] = []
    this_machine.run(out, said.append)
    assert said == [] and reads < 12
