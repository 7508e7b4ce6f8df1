"""A child, or a parent, with all its keys and no good will: what it sends is refused, it is named,
the others go on."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratafl.deploy.host.processes import Forked
from stratafl.deploy.protocol.bounds import OFFENCES
from stratafl.deploy.protocol.job import Patience
from stratafl.deploy.protocol.messages import Bundle, Reply
from stratafl.deploy.protocol.node import Root
from stratafl.deploy.sites.state_file import STATE, STATUS, Durable
from tests.deploy.trees import Deployed, simulation

Lie = Callable[[Reply, Bundle], Any]


class Lying:
    """A node whose replies are not what it has to say."""

    def __init__(self, node: Any, lie: Lie):
        self.node, self.lie, self.asked = node, lie, 0

    def handle(self, bundle: Bundle) -> Any:
        self.asked += 1
        return self.lie(self.node.handle(bundle), bundle)


def with_a_liar(liar: str, lie: Lie, method: Any = "mtgc", depth: int = 2, **settings: Any) -> Deployed:
    deployed = Deployed(simulation(method, depth), by_samples=True, **settings)
    for link in deployed.links.values():
        if liar in link.children:
            link.children[liar] = Lying(link.children[liar], lie)
    return deployed


def silent(reply: Reply, bundle: Bundle) -> Reply:
    """As if it had nothing: what a parent makes of the others then is what it must make of them
    beside a liar."""
    return dataclasses.replace(reply, report=None) if bundle.begin is not None else reply


def reported(**changes: Any) -> Lie:
    """Of every report, what is given here instead of what is true; a function gets the truth and
    the bundle."""

    def lie(reply: Reply, bundle: Bundle) -> Reply:
        if reply.report is None:
            return reply
        made = {name: each(reply.report, bundle) if callable(each) else each for name, each in changes.items()}
        return dataclasses.replace(reply, report=dataclasses.replace(reply.report, **made))

    return lie


def said(**changes: Any) -> Lie:
    """Likewise of the reply itself, wherever it came with a report."""
    return lambda reply, bundle: reply if reply.report is None else dataclasses.replace(reply, **changes)


def scaled(factor: float, entry: str = "model") -> Lie:
    """An update so many times what it is."""

    def message(report: Any, bundle: Bundle) -> dict[str, torch.Tensor]:
        rows = report.message[entry]
        start = bundle.begin.parcel.model if bundle.begin.parcel is not None else bundle.answer.parcel.model
        start = start if entry == "model" else torch.zeros_like(start)
        return {**report.message, entry: start + factor * (rows - start)}

    return reported(message=message)


LIES: dict[str, Lie] = {
    **{
        f"samples {value}": said(samples=value) for value in (10**30, 10**15, -1, 0, True, 4.0, float("nan"), "4", None)
    },
    **{f"rate {value}": reported(rate=value) for value in (1.7e308, 1e9, 0.0, 1e-300, -1.0, float("nan"), True, "1")},
    "rate of inf": reported(rate=float("inf")),
    "twice the rate": reported(rate=lambda report, bundle: 2 * report.rate),
    "somebody else": said(site="root"),
    "another run": said(job="other"),
    "another version": said(protocol=99),
    "another round": reported(step=lambda report, bundle: report.step + 2),
    "no round": reported(step="soon"),
    "no message": reported(message={}),
    "a list": reported(message=[1]),
    "one more array": reported(message=lambda report, bundle: {**report.message, "more": report.buffers}),
    "no buffers": reported(buffers=None),
    "too short": reported(message=lambda report, bundle: {k: rows[:, :-1] for k, rows in report.message.items()}),
    "two rows": reported(message=lambda report, bundle: {k: rows.repeat(2, 1) for k, rows in report.message.items()}),
    "doubles": reported(message=lambda report, bundle: {k: rows.double() for k, rows in report.message.items()}),
    "not a name": reported(refused=(3,)),
    "the root is absent": reported(absent=("root",)),
    "a neighbour is refused": reported(refused=("1/0", "1")),
    "many names": reported(absent=lambda report, bundle: (bundle.site,) * 10**5),
    "a terminal's orders": reported(absent=("\x1b[2J",)),
    "nothing of the kind": lambda reply, bundle: "hello" if bundle.begin else reply,
    "nothing at all": lambda reply, bundle: None if bundle.begin else reply,
}


@pytest.mark.parametrize("liar", ["0/1", "0"])
@pytest.mark.parametrize("what", LIES)
def test_a_lie_is_refused_and_its_teller_named(what: str, liar: str, caplog: pytest.LogCaptureFixture) -> None:
    deployed, quiet = with_a_liar(liar, LIES[what]), with_a_liar(liar, silent)
    for each in (deployed, quiet):
        each.root.greet()
    for _ in range(2):
        refused, absent = deployed.root.one_round()
        assert set(refused) == {liar} and not absent
        assert quiet.root.one_round() == ((), refused)
    deployed.root.end()
    assert torch.equal(deployed.model(), quiet.model())
    lines = [record.getMessage() for record in caplog.records]
    assert lines and all(f"{liar}: its message is refused" in line for line in lines)
    assert all(line.isprintable() and len(line) < 600 for line in lines)


@pytest.mark.parametrize("method", ["hfedavg", "mtgc", "scaffold"])
@pytest.mark.parametrize("factor", [-20.0, 20.0, 1e4, 1e30, -1e30])
@pytest.mark.parametrize(("depth", "liar"), [(1, "1"), (2, "0/1"), (2, "1/2"), (2, "0")])
def test_an_update_out_of_line_is_refused(method: str, factor: float, depth: int, liar: str) -> None:
    deployed, quiet = (with_a_liar(liar, lie, method, depth, update_factor=8) for lie in (scaled(factor), silent))
    for each in (deployed, quiet):
        each.root.greet()
    for _ in range(deployed.job.rounds):
        refused, _ = deployed.root.one_round()
        assert set(refused) == {liar}
        quiet.root.one_round()
    assert torch.equal(deployed.model(), quiet.model())


@pytest.mark.parametrize("factor", [1e-6, 0.0, 0.2, 3.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_hardly_moves_makes_nobody_else_look_large(factor: float, depth: int) -> None:
    """Of three, that is: of two nobody can say which one is right."""
    deployed = with_a_liar("1" if depth == 1 else "1/2", scaled(factor), "hfedavg", depth, update_factor=8)
    deployed.root.greet()
    for _ in range(deployed.job.rounds):
        assert deployed.root.one_round() == ((), ())


def test_a_control_variate_out_of_all_bounds_is_refused() -> None:
    deployed = with_a_liar("1", scaled(1e30, "control"), "scaffold", 1)
    deployed.root.greet()
    assert [deployed.root.one_round() for _ in range(3)] == [(("1",), ())] * 3
    assert deployed.model().abs().max() < 10


def test_buffers_out_of_all_bounds_are_refused() -> None:
    def batch_norm() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))

    deployed = Deployed(simulation("hfedavg", 1, model=batch_norm, batch=None))
    lie = reported(buffers=lambda report, bundle: torch.full_like(report.buffers, 1e30))
    deployed.links["root"].children["2"] = Lying(deployed.links["root"].children["2"], lie)
    deployed.root.greet()
    assert deployed.root.one_round() == (("2",), ())
    assert deployed.root.down.now.buffers.abs().max() < 100


@pytest.mark.parametrize("factor", [None, 0, [0, 10.0], 10.0, 3])
def test_the_bound_is_that_of_a_simulation_with_the_same_factor(factor: Any) -> None:
    """A client whose units are other ones: it is taken, unless a bound is asked for."""
    sim = simulation("hfedavg", 2, huge={3: -1e3}, batch=None, update_factor=factor)
    deployed = Deployed(sim, by_samples=True, update_factor=factor)
    deployed.root.greet()
    named = set()
    for seen in sim:
        refused, _ = deployed.root.one_round()
        assert sorted(refused) == sorted(seen.refused) == sorted(seen.too_large)
        named |= set(refused)
    assert named == ({"1/1"} if factor else set())
    torch.testing.assert_close(deployed.model(), sim.result().models[0][0])


def long_run(lie: Lie, rounds: int) -> tuple[Deployed, Lying]:
    """A star of three with as many rounds, one of which lies."""
    deployed = with_a_liar("0", lie, depth=1, patience=Patience())
    deployed.root.greet()
    for name in ("0", "1", "2"):
        deployed.nodes[name].job = dataclasses.replace(deployed.job, rounds=rounds)
    liar = deployed.links["root"].children["0"]
    assert isinstance(liar, Lying)
    return deployed, liar


def test_who_offends_too_often_is_out_until_it_is_readmitted(caplog: pytest.LogCaptureFixture) -> None:
    deployed, liar = long_run(LIES[f"samples {10**30}"], OFFENCES + 7)
    for _ in range(OFFENCES + 5):
        assert deployed.root.one_round() == (("0",), ())
    assert liar.asked == 1 + OFFENCES
    child = deployed.root.down.child("0")
    assert child.out_round == OFFENCES and "reply.samples" in child.offence
    liar.lie = lambda reply, bundle: reply
    again = Root(deployed.job, *deployed.start, deployed.root.link, print, deployed.kept["root"], lambda: ["0", "1"])
    assert again.one_round() == ((), ())
    assert liar.asked > 1 + OFFENCES and not again.down.is_out("0") and again.down.child("0").out_round is None


def test_a_large_update_is_no_offence() -> None:
    deployed, liar = long_run(scaled(1e30), OFFENCES + 5)
    for _ in range(OFFENCES + 5):
        assert deployed.root.one_round() == (("0",), ())
    assert liar.asked == 1 + OFFENCES + 5 and deployed.root.down.child("0").offences == 0


def test_what_a_rule_cannot_merge_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    from stratafl import rules

    fails = False

    def reduce(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("no")
        return weights @ rows

    deployed = Deployed(simulation([rules.average()._replace(reduce=reduce)], 1))
    fails = True  # not when the rule is tried
    before = deployed.model()
    deployed.root.greet()
    assert deployed.root.one_round() == (("root",), ())
    assert torch.equal(deployed.model(), before) and "reduce raised RuntimeError: no" in caplog.text


# -- files -----------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_state_and_logs_are_for_their_owner_alone(tmp_path: Path) -> None:
    deployed = Deployed(simulation("mtgc", 1)).run()
    before = os.umask(0o022)
    try:
        durable = Durable(tmp_path / "state", "test")
        durable.write(deployed.kept["0"])
        durable.show(doing="waiting")
        durable.close()
        (tmp_path / "old.log").write_text("from before\n")
        for name in ("new.log", "old.log"):
            assert Forked(lambda: print("hello"), tmp_path / name, tmp_path).wait(30) == 0
    finally:
        os.umask(before)
    for name in (f"state/{STATE}", f"state/{STATUS}", "new.log", "old.log"):
        assert mode(tmp_path / name) == 0o600, name
