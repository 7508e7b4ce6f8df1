"""What `deploy init` takes, refuses and makes of a topology, and what is gone on with."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.base import files
from stratafl.deploy.sites import provision as provision_module
from stratafl.deploy.sites.address import bound, is_loopback, parted
from stratafl.deploy.sites.provision import DeploymentTopology, check_made_from, provision
from stratafl.deploy.sites.site import Site, slug

SMALL = "[model]\nname = 'mlp'\nhidden = [4]\n"


def written(folder: Path, text: str = "", shape: str = '"2x2"', periods: Any = (3, 10), options: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    config = f"{options}\nschedule.periods = {list(periods)}\n[tree]\nshape = {shape}\n{SMALL}"
    (folder / "run.toml").write_text(config)
    (folder / "topology.toml").write_text(f'config = "run.toml"\n{text}\n')
    return folder / "topology.toml"


def load(folder: Path, text: str = "", **settings: Any) -> DeploymentTopology:
    return DeploymentTopology.load(written(folder, text, **settings))


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadline", "periods", "told"),
    [
        ([60, 30], [3, 10], ["level 1 waits 60 s", "3 x 30 s", "93 s"]),
        ([90, 30], [3, 10], ["level 1 waits 90 s", "93 s"]),
        ([30, 30], [1, 10], ["level 1 waits 30 s", "1 x 30 s", "31 s"]),
        ([500, 40, 20], [5, 2, 1], ["level 2 waits 40 s", "2 x 20 s", "42 s"]),
        ([200, 42, 20], [5, 2, 1], ["level 1 waits 200 s", "5 x 42 s", "215 s"]),
        ([60, 0], [3, 10], ["level 2 waits for ever", "60 s"]),
    ],
)
def test_a_deadline_that_its_children_s_would_use_up_is_refused(
    tmp_path: Path, deadline: list[float], periods: list[int], told: list[str]
) -> None:
    with pytest.raises(InvalidInput, match=r"topology\.deadline") as refused:
        load(tmp_path, f"deadline = {deadline}", shape=f'"{"x".join("2" * len(periods))}"', periods=periods)
    assert all(each in str(refused.value) for each in told)


@pytest.mark.parametrize(
    ("deadline", "periods", "made"),
    [
        ([93, 30], [3, 10], (93, 30)),
        ([0, 30], [3, 10], (None, 30)),
        (0, [3, 10], (None, None)),
        (30, [3, 10], (93, 30)),
        (4, [5, 2, 3], (55, 10, 4)),
        (9, [7], (9,)),
    ],
)
def test_deadlines_that_are_enough_are_taken_and_a_single_one_is_the_leaves(
    tmp_path: Path, deadline: Any, periods: list[int], made: tuple[float | None, ...]
) -> None:
    shape = f'"{"x".join("2" * len(periods))}"'
    assert load(tmp_path, f"deadline = {deadline}", shape=shape, periods=periods).deadline == made


def test_the_example_s_root_waits_for_its_cities_longer_than_these_for_their_hospitals() -> None:
    made = DeploymentTopology.load(Path(__file__).parents[3] / "examples" / "topology.toml")
    assert made.deadline == (93, 30) and made.experiment.schedule.periods == [3, 10]


# -- what of a config a deployed tree does ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ('execution.device = "cuda"', r"execution\.device"),
        ('execution.device = "meta"', r"execution\.device"),
        ('execution.engine = "stacked"', r"execution\.engine"),
        ('execution.engine = "auto"', r"execution\.engine"),
        ('execution.precision = "bf16"', r"execution\.precision"),
        ('evaluation.drift = "ideal"', r"evaluation\.drift"),
        ("evaluation.levels = [1]", r"evaluation\.levels"),
        ('network = "lan"', r"network = 'lan': is a simulation's virtual time"),
        ("schedule.wait = { deadline = 3 }", r"schedule\.wait = \{'deadline': 3\}: is a simulation's virtual time"),
        ('data.source = "table.csv"', r"data\.source = 'table\.csv': would have to be at every site"),
        ("data.lazy = true", r"data\.lazy"),
        ('data.scale = "unit"', r"data\.scale"),
    ],
)
def test_what_a_deployed_tree_would_not_do_is_refused_by_name(tmp_path: Path, options: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        load(tmp_path, options=options)


def test_sites_are_told_of_what_is_sent_alone(tmp_path: Path) -> None:
    topology = written(tmp_path)
    config = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(config.replace(SMALL, SMALL + "local_parameters = ['*.bias']\n"))
    folders = provision(DeploymentTopology.load(topology), tmp_path / "sites")
    assert {Site.load(folder).parameters for folder in folders.values()} == {4 * 64 + 10 * 4}


def test_what_it_does_anyway_is_taken(tmp_path: Path) -> None:
    options = """
        execution = { device = "cpu", engine = "loop", precision = "fp32" }
        evaluation = { levels = [0], stop_when = "accuracy >= 0.9", drift = "none" }
    """
    assert load(tmp_path, options=options).experiment.evaluation.stop_when == "accuracy >= 0.9"


# -- names, hosts and paths ------------------------------------------------------------------------

NAMES = ["a b", "a-b", "a_b", "a__b", "北京", "東京", "é", "è", "...", "-", "x" * 150, "x" * 151, "a_/b", "a/_b", "a/b"]


def test_names_that_look_alike_have_folders_of_their_own() -> None:
    assert len({slug(name) for name in NAMES}) == len(NAMES)
    assert all(len(slug(name)) <= 100 and not slug(name).startswith((".", "-")) for name in NAMES)
    assert [slug(name) for name in ("root", "paris/0", "north_1/a.b")] == ["root", "paris_0", "north__1_a.b"]


def test_sites_with_names_that_look_alike_are_made(tmp_path: Path) -> None:
    shape = (
        '{ "a b" = ["北京", "東京"], "a-b" = 1, "münchen und umgebung, ein sehr langer name für einen ort dort" = 1 }'
    )
    folders = provision(load(tmp_path, shape=shape), tmp_path / "sites")
    assert len(folders) == len(set(folders.values())) == 8
    assert {Site.load(folder).name: folder for folder in folders.values()} == folders


@pytest.mark.parametrize(
    "host",
    ["http://a", "a:9400", "a/b", "a b", "-a", "a..b", "192.0.2.1:80", "300.1.1.1", "[192.0.2.1]", "0.0.0.0", "::",
     "[::1]:80", "[::1", "münchen.de", "fe80::1%eth0", "a" * 64, "user@a", "ff02::1"],
)  # fmt: skip
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidInput, match=r"topology\.hosts\.root"):
        load(tmp_path, f'[hosts]\nroot = "{host}"')


@pytest.mark.parametrize(
    ("host", "public", "listen"),
    [
        ("edge.example.org", "edge.example.org:9400", "edge.example.org:9400"),
        ("192.0.2.7", "192.0.2.7:9400", "192.0.2.7:9400"),
        ("2001:DB8::7", "[2001:db8::7]:9400", "[2001:db8::7]:9400"),
        ("[2001:db8::7]", "[2001:db8::7]:9400", "[2001:db8::7]:9400"),
        ("localhost", "localhost:9400", "127.0.0.1:9400"),
        ("node_3", "node_3:9400", "node_3:9400"),
    ],
)
def test_a_site_listens_on_the_address_it_is_reached_by(tmp_path: Path, host: str, public: str, listen: str) -> None:
    made = load(tmp_path, f'[hosts]\nroot = "{host}"', shape="2", periods=[2])
    folders = provision(made, tmp_path / "sites")
    root = Site.load(folders["root"])
    assert (root.public, root.listen) == (public, listen)
    assert Site.load(folders["0"]).parent == public


def test_bind_names_another_address(tmp_path: Path) -> None:
    made = load(tmp_path, '[hosts]\n0 = "edge.example.org"\n[bind]\n0 = "0.0.0.0"\nroot = "::1"')
    folders = provision(made, tmp_path / "sites")
    assert Site.load(folders["0"]).listen == "0.0.0.0:9403" and Site.load(folders["0/0"]).parent.startswith("edge.")
    assert Site.load(folders["root"]).listen == "[::1]:9400" and Site.load(folders["1"]).listen == "127.0.0.1:9406"
    with pytest.raises(InvalidInput, match=r"topology\.bind\.0"):
        load(tmp_path, '[bind]\n0 = "http://x"')


@pytest.mark.parametrize(
    ("address", "at"), [("localhost:0", "127.0.0.1"), ("[::1]:0", "::1"), ("0.0.0.0:0", "0.0.0.0")]
)
def test_a_socket_has_the_address_it_is_given(address: str, at: str) -> None:
    with contextlib.closing(bound(address)) as sock:
        assert sock.getsockname()[0] == at


@pytest.mark.parametrize("address", ["192.0.2.1:9400", "no-such-host.invalid:9400"])
def test_an_address_that_is_not_this_host_s_is_one_line(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"\[bind\]"):
        bound(address)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidInput, match="already in use"):
            bound(f"127.0.0.1:{taken.getsockname()[1]}")


def test_data_lies_beside_the_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "study", '[data]\n"0/0" = "own/a.npz"\n"0/1" = "/srv/b.npz"')
    monkeypatch.chdir(tmp_path)
    made = DeploymentTopology.load(Path("study/topology.toml"))
    assert made.data == {"0/0": str(tmp_path / "study/own/a.npz"), "0/1": "/srv/b.npz"}


def test_ports_that_do_not_exist_are_not_given_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"topology\.base_port"):
        load(tmp_path, "base_port = 60000", shape="2000", periods=[2])


# -- folders ---------------------------------------------------------------------------------------


def test_an_attempt_that_fails_or_is_killed_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out, calls = load(tmp_path), tmp_path / "made" / "sites", 0

    def full(folder: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(provision_module, "_start_script", full)
        with pytest.raises(InvalidInput, match="No space left"):
            provision(made, out)
    assert calls == 3 and list(out.parent.iterdir()) == []
    left = out.with_name(f".sites{files.PARTIAL}")  # as a process that was killed leaves it
    (left / "root").mkdir(parents=True)
    (left / "root" / "up.key").write_bytes(b"old")
    provision(made, out)
    assert [each.name for each in out.parent.iterdir()] == ["sites"] and not (out / "root" / "up.key").exists()
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o700


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("deadline = [200, 30]", "", "deadline was [0, 0] and is [200.0, 30.0]"),
        ("base_port = 9500", "", "base_port was 9400 and is 9500"),
        ("[hosts]\nroot = 'a.example.org'", "", "hosts.root was null and is"),
        ("[data]\n'0/1' = 'x.npz'", "", "data.0/1 was null and is"),
        ("min_children = 2", "", "min_children was [1, 1] and is [2, 2]"),
        ("", "seed = 4", "config.seed was 0 and is 4"),
    ],
)
def test_folders_made_from_something_else_are_not_gone_on_with(
    tmp_path: Path, text: str, options: str, told: str
) -> None:
    root = provision(load(tmp_path), tmp_path / "sites")["root"]
    check_made_from(root, load(tmp_path, "# a remark changes nothing"))
    with pytest.raises(InvalidInput, match="another config or topology") as refused:
        check_made_from(root, load(tmp_path, text, options=options))
    assert told in str(refused.value)


def test_what_is_on_this_machine() -> None:
    for address in ("127.0.0.1:1", "127.3.0.1:1", "localhost:1", "[::1]:1"):
        assert is_loopback(parted(address)[0])
    for address in ("10.0.0.1:1", "root.example.org:1", "[2001:db8::1]:1", "127.0.0.1.example.org:1"):
        assert not is_loopback(parted(address)[0])
