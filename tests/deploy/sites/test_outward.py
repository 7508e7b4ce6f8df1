"""Errors at a site: their texts, which may quote its data, stay in its log, whoever raises them and
however."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict

from stratafl import InvalidInput
from stratafl.base.errors import MissingExtra
from stratafl.deploy.flower import inbox, process
from stratafl.deploy.host import supervise
from stratafl.deploy.host.newsroom import NEWS, Newsroom
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.news import entries
from stratafl.deploy.notes import boards, log, outward
from stratafl.deploy.notes.boards import Board
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.bounds import largest_message
from stratafl.deploy.protocol.messages import Begin, Bundle, Parcel, Reply, Report
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import encode
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site, slug
from stratafl.deploy.sites.state_file import Durable
from stratafl.deploy.sites.user_files import import_from

SECRET = "Jane_Doe_HIV"
"""A cell of somebody's record; a name that a class can have, too."""
RAISING = f"""
import os

def fail(where):
    kind = os.environ.get("FAILING", "").removeprefix(where + " ")
    if kind == "text":
        raise ValueError("could not convert string to float: '{SECRET}'")
    if kind == "lines":
        raise ValueError("some" + "thing " * 300 + "\\n{SECRET}")
    if kind == "note":
        problem = ValueError("something")
        problem.add_note("{SECRET}")
        raise problem
    if kind == "cause":
        raise RuntimeError("something") from KeyError("{SECRET}")
    if kind == "class":
        raise type("{SECRET}", (ValueError,), {{}})("something")
    if kind == "complaint":
        from stratafl import InvalidInput
        raise InvalidInput("labels[3]", "{SECRET}", "must be a class")
    if kind == "own complaint":
        from stratafl.base.validation import check_integer
        check_integer("labels[3]", "{SECRET}")
    if kind == "deployment's complaint":
        from pathlib import Path
        from stratafl.base.files import read_json
        read_json(Path("/nowhere/{SECRET}"))
    if kind == "code":
        exec(compile("def {SECRET}(): raise ValueError('something')\\n{SECRET}()", "{SECRET}.csv", "exec"))
    if kind == "exit":
        raise SystemExit("{SECRET}")
"""
OWN = """
from dataclasses import replace
import torch.nn.functional as F
from torch import nn
from raising import fail
from stratafl import average, register


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.last = nn.Linear(64, classes)

    def forward(self, x):
        fail("forward" if len(x) == 20 else "trial")
        return self.last(x.flatten(1))


def loss(outputs, targets):
    if len(targets) == 20:
        fail("loss")
    return F.cross_entropy(outputs, targets)


@register("leaky", levels="all")
def leaky():
    "Averaging that fails where it is told to."
    plain = average()

    def up(state, x, edge):
        if x.any():  # not where the rule is tried
            fail("up")
        return plain.up(state, x, edge)

    def merge(*given):
        fail("merge")
        return plain.merge(*given)

    return plain._replace(up=up, merge=merge)
"""
CONFIG = """
rounds = 1
plugins = ["own.py"]
loss = "own.py:loss"
[tree]
shape = "1x1"
[model]
name = "own.py:Net"
[method]
name = "leaky"
[schedule]
periods = [1, 1]
[client]
batch_size = 20
"""
LOADER = """
import numpy
from raising import fail

def load():
    fail("load")
    return numpy.zeros((20, 1, 8, 8), "float32"), numpy.arange(20) % 4
"""
WAYS = ("text", "lines", "note", "cause", "class", "complaint", "own complaint", "deployment's complaint", "code")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a root, an aggregator and a leaf whose data are its own."""
    folder = tmp_path_factory.mktemp("made")
    texts = {"run.toml": CONFIG, "own.py": OWN, "raising.py": RAISING, "loader.py": LOADER}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "topology.toml").write_text(f'config = "run.toml"\n[data]\n"0/0" = "{folder / "loader.py"}"\n')
    provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
    return folder / "sites"


@pytest.fixture
def sites(made: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(made, tmp_path / "sites")
    import_from()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    fresh = Board()
    monkeypatch.setattr(boards, "own", fresh)
    log._last.clear()
    logger = logging.getLogger("stratafl.deploy")
    before = logger.handlers[:], logger.level, logger.propagate
    log.listen(logger.name, travels=True)
    yield fresh
    logger.handlers[:], logger.level, logger.propagate = before


def told_above(folder: Path, node: Board) -> bytes:
    """All that a site's supervisor tells its parent, keeps for `deploy status` and says itself."""
    newsroom = Newsroom(folder, Site.load(folder))
    newsroom.boards["node"] = node
    newsroom.ended("node", 2)
    newsroom.look({}, stopping=True)
    found = newsroom.telling.read()
    assert found is not None
    sites = {name: entries.Entry.of(entry) for name, entry in found["sites"].items()}
    return entries.encode(sites) + newsroom.telling._memory[:] + (folder / NEWS).read_bytes()


# -- what a site says that does not start ----------------------------------------------------------


def started(folder: Path, **changes: Any) -> tuple[str, bytes]:
    """A leaf's own process, which ends as its data cannot be read: its log, and what is told of
    it."""
    dataclasses.replace(Site.load(folder), **changes).write(folder)
    node = Board()

    def live() -> None:
        sys.stderr = os.fdopen(2, "w", closefd=False)  # not what this test runner has put there
        boards.use(node, Board())
        process.live(folder)

    assert Forked(live, folder / "node.log", folder).wait(60) in (1, 2)
    return (folder / "node.log").read_text(), told_above(folder, node)


@pytest.mark.parametrize(("where", "way"), [*(("load", way) for way in (*WAYS, "exit")), ("trial", "text")])
def test_what_its_own_code_says_at_the_start_stays_at_the_site(
    where: str, way: str, sites: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("FAILING", f"{where} {way}")
    kept, above = started(sites / slug("0/0"))
    assert SECRET in kept
    assert SECRET.encode() not in above and b"its text is in this site's log" in above
    assert SECRET not in capfd.readouterr().err, "the supervisor's own log is shown by its host"
    if way == "text":
        assert b"ValueError in the function fail of raising.py, line 7; its text" in above


def write_table(folder: Path) -> Path:
    (folder / "table.csv").write_text(f"1,2\n3,{SECRET}\n")
    code = f"import numpy\ndef load():\n    return numpy.loadtxt('{folder / 'table.csv'}', delimiter=',')\n"
    (folder / "table.py").write_text(code)
    return folder / "table.py"


def write_columns(folder: Path) -> Path:
    np.savez(folder / "own.npz", x=np.zeros(3, [(SECRET, "f4")]), y=np.array([SECRET] * 3))
    return folder / "own.npz"


def write_member(folder: Path) -> Path:
    np.savez(folder / "own.npz", **{SECRET: np.zeros(3)})
    return folder / "own.npz"


@pytest.mark.parametrize("write", [write_table, write_columns, write_member])
def test_a_table_is_quoted_to_nobody(write: Callable[[Path], Path], sites: Path, tmp_path: Path) -> None:
    _, above = started(sites / slug("0/0"), data=str(write(tmp_path)))
    assert SECRET.encode() not in above and b"data of this leaf" in above


def test_a_site_may_share_its_texts(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILING", "load text")
    _, above = started(sites / slug("0/0"), share_errors=True)
    assert SECRET.encode() in above


# -- what a site says to a request -----------------------------------------------------------------


class Link:
    """An aggregator's way to a leaf in this process."""

    def __init__(self, job: Any):
        self._job = job

    def ask(self, bundles: Any, deadline: float | None) -> dict[str, Reply]:
        job = self._job
        report = Report(1, job.rates(2, 0)[0], {"model": torch.ones(1, job.parameters)}, torch.zeros(1, 0))
        return {name: Reply(job.name, name, 4, report, job.fingerprint) for name in bundles}


def asked(folder: Path) -> tuple[bool, bytes]:
    """Whether a site refuses the first request for training, and all bytes of what it answers."""
    here = Assembled.of(folder)
    try:
        node: Any = here.leaf() if here.site.is_leaf else here.aggregator(Link(here.job))  # type: ignore[arg-type]
        app = inbox.client_app(here.sealed(node, lambda: None), largest_message(here.job) + seal.SEAL, log.fail)
        parcel = Parcel(torch.zeros(1, here.job.parameters), torch.zeros(1, 0), {})
        bundle = encode(Bundle(here.site.job, here.site.name, begin=Begin(0, None, parcel, None)))
        record = ConfigRecord({"data": seal.WORK.seal_request(here.key("up.key"), bundle)})
        message = Message(RecordDict({inbox.RECORD: record}), 1, "train", ttl=10.0)
        message.metadata.__dict__["_message_id"] = "message"
        answer: Any = app(message, None).content[inbox.RECORD]  # type: ignore[arg-type]
        return bool(answer["refused"]), bytes(answer["data"])
    finally:
        here.durable.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["forward", "loss", "up", "merge"])
@pytest.mark.usefixtures("in_a_task")
def test_what_its_own_code_says_of_a_request_stays_at_the_site(
    where: str, way: str, sites: Path, board: Board, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A leaf refuses; of an aggregator that cannot merge, nobody took part."""
    monkeypatch.setenv("FAILING", f"{where} {way}")
    folder = sites / ("0" if where == "merge" else slug("0/0"))
    refused, answer = asked(folder)
    assert refused == (where != "merge")
    above = answer + board._memory[:] + told_above(folder, board)
    assert SECRET in capfd.readouterr().err
    assert SECRET.encode() not in above and b"its text is in this site's log" in above


# -- which words are ours --------------------------------------------------------------------------


def raised(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except BaseException as problem:
        # the way up to here, which is the test's own code, is none in a site's process
        way = problem.__traceback__
        assert way is not None
        return problem.with_traceback(way.tb_next)
    raise AssertionError("nothing was raised")


def test_the_deployment_s_own_complaints_are_told_as_they_are(tmp_path: Path) -> None:
    problem = raised(partial(Site.load, tmp_path))
    assert outward.outward(problem) == str(problem) and "no site.json in it" in str(problem)
    (tmp_path / "site.json").write_text("{")
    problem = raised(partial(Site.load, tmp_path))
    assert outward.outward(problem) == str(problem) and "not valid JSON" in str(problem)
    durable = Durable(tmp_path / "state", "job")
    shutil.rmtree(tmp_path / "state")
    problem = raised(partial(durable.write, NodeState()))
    assert outward.outward(problem) == str(problem) and "cannot be written: No such file" in str(problem)


def test_a_complaint_that_quotes_its_cause_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of the deployment's own."""

    def fail(path: Path) -> None:
        raise ValueError(SECRET)

    def load(path: Path) -> None:
        try:
            fail(path)
        except ValueError as cause:
            raise InvalidInput("file", path, f"cannot be read: {cause}") from cause

    monkeypatch.setattr(outward, "_is_ours", lambda problem: True)
    problem = raised(partial(load, Path("site.json")))
    assert SECRET in str(problem) and SECRET not in outward.outward(problem)


def test_a_missing_package_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise.importlib.util, "find_spec", lambda name: None)
    problem = raised(partial(supervise._import_what_they_need, []))
    assert isinstance(problem, MissingExtra) and outward.outward(problem).endswith(str(problem))


def test_an_error_from_nowhere_is_its_class() -> None:
    assert outward.outward(KeyError(SECRET)) == f"KeyError; {outward.IN_LOG}"
    problem = InvalidInput("field", SECRET, SECRET)
    problem.__cause__ = problem
    assert outward.outward(problem) == f"InvalidInput; {outward.IN_LOG}"


def test_sites_that_share_are_named_or_all(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[tree]\nshape = "2"\n[schedule]\nperiods = [1]\n')

    def shared(given: str) -> list[str]:
        (tmp_path / "topology.toml").write_text(f'config = "run.toml"\n{given}\n')
        topology = DeploymentTopology.load(tmp_path / "topology.toml")
        assert ("share_errors" in topology.as_dict()) == bool(topology.share_errors)
        return list(topology.share_errors)

    assert shared("") == shared("share_errors = false") == []
    assert shared("share_errors = true") == ["root", "0", "1"] and shared('share_errors = ["1"]') == ["1"]
    for wrong in ('"1"', "1", "[1]", '["2"]'):
        with pytest.raises(InvalidInput, match=r"topology\.share_errors"):
            shared(f"share_errors = {wrong}")
    assert shared('share_errors = ["1"]')
    folders = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    assert [json.loads((each / "site.json").read_text())["share_errors"] for each in folders.values()] == [0, 0, 1]
