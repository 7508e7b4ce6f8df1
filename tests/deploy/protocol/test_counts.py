"""Children whose count changes while the corrections that were made under the old ones are in use:
what sums to zero does so again, in every family, whatever happens to whom.

Every save of a parent is held against that, see `tests.deploy.balance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stratafl import ParticipationContext, rules
from stratafl.deploy.protocol.bounds import OFFENCES
from stratafl.deploy.protocol.counts import MOST_SHIFTS
from stratafl.deploy.protocol.job import Patience
from stratafl.deploy.protocol.messages import Bundle, Reply, Shift
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode, receive_bundle, receive_reply
from tests.deploy.protocol.fallible import Died, FallibleTree
from tests.deploy.protocol.test_hostile import Lying, reported
from tests.deploy.trees import PERIODS, TOLERANCE, simulation
from tests.flat import client_options
from tests.slow import slow

every_depth = pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
KEEP = {"name": "mtgc", "restart": "keep"}
METHODS: list[Any] = ["mtgc", KEEP, "scaffold", "feddyn"]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


def everywhere(method: Any, depth: int) -> Any:
    """The rule on every edge, but for one that only leaves can have."""
    return method if method == "feddyn" else [method] * depth


def tree(method: Any, depth: int, undeclared: Any = (), **settings: Any) -> FallibleTree:
    sim = simulation(everywhere(method, depth), depth, rounds=12, batch=None)
    return FallibleTree(sim, by_samples=True, undeclared=undeclared, **settings)


def last(tree: FallibleTree) -> str:
    return tree.job.tree.names[-1][-1]


def rounds(tree: FallibleTree, count: int) -> None:
    for _ in range(count):
        tree.root.one_round()


@every_depth
@every_method
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_leaf_that_starts_late(is_declared: bool, method: Any, depth: int) -> None:
    late = tree(method, depth, () if is_declared else range(6))
    late.away = {last(late)}
    late.root.greet()
    rounds(late, 2)
    late.away = set()
    rounds(late, 4)
    late.root.end()
    assert [child.samples for child in late.root.down.now.children] == by_hand(late)


def by_hand(tree: FallibleTree) -> list[int]:
    first = tree.job.tree.ancestors(1)
    return np.bincount(first, weights=tree.counts).astype(int).tolist()


@every_depth
@pytest.mark.parametrize("method", ["mtgc", KEEP, "scaffold"], ids=str)
def test_a_late_leaf_ends_where_the_simulation_without_it_ends(method: Any, depth: int) -> None:
    """Left out of the same meetings by a participation function."""
    late_rounds = 2
    meetings = late_rounds * int(np.prod(PERIODS[depth][:-1]))

    def here(draw: ParticipationContext) -> np.ndarray:
        mask_N = np.ones(draw.tree.sizes[-1], dtype=bool)
        mask_N[-1] = draw.round >= meetings
        return mask_N

    some = [None] * (depth - 1) + [here]
    sim = simulation([method] * depth, depth, rounds=6, batch=None, participation=some)
    late = FallibleTree(simulation([method] * depth, depth, rounds=6, batch=None), by_samples=True)
    late.away = {last(late)}
    late.root.greet()
    rounds(late, late_rounds)
    late.away = set()
    rounds(late, 4)
    sim.run()
    torch.testing.assert_close(late.model(), sim.result().models[0][0], **TOLERANCE)


@every_depth
@every_method
@pytest.mark.parametrize("factor", [0.3, 5])
def test_a_leaf_whose_data_grew_or_shrank(factor: float, method: Any, depth: int) -> None:
    grown = tree(method, depth, range(6))
    grown.root.greet()
    rounds(grown, 2)
    grow(grown, factor)
    away = grown.job.tree.names[-1][0]
    grown.away = {away}
    rounds(grown, 1)
    grown.away = set()
    rounds(grown, 3)
    assert [child.samples for child in grown.root.down.now.children] == by_hand(grown)


def grow(tree: FallibleTree, factor: float = 5) -> None:
    """The last leaf has other data when it is started again."""
    tree.counts[-1] = int(tree.counts[-1] * factor) + 1
    tree.restart(last(tree))


def test_what_is_learnt_under_new_weights_is_the_mean_less_the_own_gradient() -> None:
    """At once, in the meeting at which the count changes."""
    sim = simulation("mtgc", 1, rounds=6, batch=None, leaf=client_options(1e-3))
    grown = FallibleTree(sim, by_samples=True, undeclared=range(3))
    grown.root.greet()
    rounds(grown, 1)
    grow(grown)
    rounds(grown, 1)
    x_P, weights = grown.model().clone(), np.array(grown.counts) / sum(grown.counts)
    rounds(grown, 1)
    grown.root.end()
    gradient = []
    for number, part in enumerate(grown.parts):
        training = sim.engine.training
        inputs, targets = training.batch(number, 0, torch.as_tensor(part))
        module = sim.flat.build(x_P, torch.zeros(0))
        loss = torch.nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        gradient.append(torch.cat([each.grad.flatten() for each in module.parameters()]))
    mean_P = sum(float(w) * g for w, g in zip(weights, gradient, strict=True))
    for number in range(3):
        z_P = grown.correction(1, number)
        torch.testing.assert_close(z_P, mean_P - gradient[number], rtol=0.02, atol=2e-3)


@every_method
def test_a_refused_report_changes_no_count(method: Any) -> None:
    poisoned = tree(method, 2, range(6))
    poisoned.root.greet()
    rounds(poisoned, 2)
    grow(poisoned)
    before = [child.samples for child in poisoned.kept["1"].below.children]  # type: ignore[union-attr]
    parent, name = poisoned.links["1"], last(poisoned)
    honest = parent.children[name]
    for lie in (reported(state=nan), reported(state=huge), reported(message=nothing), reported(state=None)):
        parent.children[name] = Lying(honest, lie)
        refused, _ = poisoned.root.one_round()
        assert set(refused) == {name}
        assert [child.samples for child in poisoned.kept["1"].below.children] == before  # type: ignore[union-attr]
    parent.children[name] = honest
    rounds(poisoned, 1)
    assert [child.samples for child in poisoned.kept["1"].below.children] == poisoned.counts[2:]  # type: ignore[union-attr]


def nan(report: Any, bundle: Bundle) -> Any:
    return {name: rows * float("nan") for name, rows in report.state.items()}


def huge(report: Any, bundle: Bundle) -> Any:
    return {name: rows + 1e20 for name, rows in report.state.items()}


def nothing(report: Any, bundle: Bundle) -> Any:
    return {name: rows * float("nan") for name, rows in report.message.items()}


@every_method
def test_too_few_children_change_no_count(method: Any) -> None:
    few = tree(method, 2, range(6), patience=Patience(min_children=2))
    few.root.greet()
    rounds(few, 2)
    grow(few)
    few.away = {"1/0", "1/1"}
    before = few.kept["1"].below.children[2].samples  # type: ignore[union-attr]
    rounds(few, 1)
    assert few.kept["1"].below.children[2].samples == before  # type: ignore[union-attr]
    few.away = set()
    rounds(few, 1)
    assert few.kept["1"].below.children[2].samples == few.counts[-1]  # type: ignore[union-attr]


@every_depth
@every_method
@pytest.mark.parametrize("older", [False, True])
def test_a_lost_state(older: bool, method: Any, depth: int) -> None:
    """Of every node once: its family begins anew, since nobody knows what it had of the sum."""
    lost = tree(method, depth)
    lost.root.greet()
    rounds(lost, 1)
    backups = {name: decode(encode(kept), NodeState) for name, kept in lost.kept.items()}
    rounds(lost, 1)
    for name in ("0/0/0"[: 2 * depth - 1], "0/0"[: 2 * depth - 3])[: 1 + (depth > 1)]:
        lost.kept.pop(name)
        if older:
            lost.kept[name] = backups[name]
        lost.restart(name)
        rounds(lost, 2)
        _, number = lost.job.tree.find(name)
        assert lost.kept[name].above is not None and number == 0


@pytest.mark.parametrize("method", ["mtgc", "scaffold"])
def test_a_lost_state_is_known_of_though_the_parent_dies_over_it(method: str) -> None:
    """It asks again after its restart, and the child, which began anew, repeats its reply."""
    lost = tree(method, 1)
    lost.root.greet()
    rounds(lost, 2)
    lost.kept.pop("0")
    lost.restart("0")

    def dies(kept: NodeState) -> None:
        raise Died

    lost.root._save = dies
    with pytest.raises(Died):
        lost.root.one_round()
    lost.restart("root")
    rounds(lost, 1)
    assert [shift.rows for shift in lost.root.down.now.shifts] == [None]
    rounds(lost, 1)


@every_method
def test_who_is_out_counts_for_nothing_until_it_is_back(method: Any) -> None:
    out = tree(method, 1, range(6))
    out.job = dataclasses.replace(out.job, rounds=OFFENCES + 8)
    for number in (2, 1, 0):
        out.make(1, number)
    out.make(0, 0)
    out.links["root"].ask = out.asking(out.links["root"])  # type: ignore[method-assign]
    out.root.greet()
    rounds(out, 2)
    children = out.links["root"].children
    honest = children["0"]
    children["0"] = Lying(honest, reported(step=lambda report, bundle: report.step + 2))
    rounds(out, OFFENCES + 1)
    assert out.root.down._weights(np.array(out.counts))[0] == 0
    state = out.kept["root"]
    assert state.below is not None
    state.below.children[0].offences = 0
    children["0"] = honest
    grow(out)
    rounds(out, 4)
    assert out.root.down._weights(np.array(out.counts))[0] > 0


@every_method
def test_who_goes_out_at_a_meeting_of_too_few(method: Any) -> None:
    """Weights change although nothing came of the meeting."""
    few = tree(method, 1, range(6), patience=Patience(min_children=2))
    few.root.greet()
    rounds(few, 3)
    few.kept["root"].below.children[0].offences = OFFENCES - 1  # type: ignore[union-attr]
    children, few.away = few.links["root"].children, {"1"}
    children["0"] = Lying(children["0"], reported(step=lambda report, bundle: report.step + 2))
    rounds(few, 1)
    assert few.root.down.is_out("0")
    few.away = set()
    rounds(few, 3)


@pytest.mark.parametrize("name", ["root", "0", "1", "0/1", "1/2"])
@pytest.mark.parametrize("saves", range(1, 8))
@pytest.mark.parametrize("method", ["mtgc", "scaffold"])
def test_kills_between_every_save(method: str, saves: int, name: str) -> None:
    def run(kill: bool) -> FallibleTree:
        changing = tree(method, 2, range(6))
        changing.away = {"1/0"}
        changing.root.greet()
        rounds(changing, 1)
        left = changing.die(name, after=saves) if kill else [0]
        for number in range(4):
            if number == 1:
                changing.away = set()
            if number == 2 and name != last(changing):
                grow(changing)
            try:
                rounds(changing, 1)
            except Died:  # the root, whose round was saved
                changing.restart("root")
        assert left == [0] or name == "root"
        return changing

    assert torch.equal(run(True).model(), run(False).model())


def test_shifts_that_wait_for_one_that_is_away_are_few() -> None:
    away = tree(KEEP, 1, range(6))
    away.root.greet()
    rounds(away, 1)
    away.away = {"0"}
    for number in range(MOST_SHIFTS + 1):
        assert len(away.root.down.now.shifts) == number
        grow(away, 2)
        rounds(away, 1)
    assert [shift.rows for shift in away.root.down.now.shifts] == [None]
    away.away = set()
    rounds(away, 2)
    assert away.root.down.now.shifts == ()


def test_a_shift_meets_the_restarts_in_the_order_in_which_they_were() -> None:
    """A rule of one's own whose restart halves: what was taken from a state is halved, too."""

    def halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"z": state["z"] / 2}

    rule = rules.mtgc("keep")._replace(relay=halved)
    sim = simulation([rule, rule], 2, rounds=6, batch=None)
    halving = FallibleTree(sim, by_samples=True, undeclared=range(6))
    halving.root.greet()
    rounds(halving, 1)
    halving.away = {"1/0"}
    grow(halving)
    rounds(halving, 2)
    halving.away = set()
    rounds(halving, 2)


def test_nothing_more_travels_where_no_count_changes() -> None:
    quiet = tree("mtgc", 3)
    seen: list[Any] = []
    for name, node in quiet.nodes.items():
        if name != "root":
            handle = node.handle

            def heard(bundle: Bundle, handle: Callable[[Bundle], Reply] = handle) -> Reply:
                reply = handle(bundle)
                seen.append((bundle.begin and bundle.begin.shifts, reply.report and reply.report.state))
                return reply

            node.handle = heard
    quiet.run()
    assert len(seen) > 50 and all(not shifts and state is None for shifts, state in seen)


def test_shifts_and_states_travel_as_bytes() -> None:
    spoken = tree("mtgc", 2, range(6))
    grown: list[int] = []
    for name, node in spoken.nodes.items():
        if name == "root":
            continue
        level, handle = spoken.job.tree.find(name)[0], node.handle

        def heard(bundle: Bundle, level: int = level, handle: Callable[[Bundle], Reply] = handle) -> Reply:
            request = receive_bundle(encode(bundle), spoken.job)
            grown.extend([1] * bool(request.begin and request.begin.shifts))
            return receive_reply(encode(handle(request)), spoken.job, spoken.job.report_names[level - 1])

        node.handle = heard
    spoken.away = {"1/0"}
    spoken.root.greet()
    rounds(spoken, 2)
    spoken.away = set()
    rounds(spoken, 2)
    assert grown


@pytest.mark.parametrize(
    ("shift", "named"),
    [
        (Shift(2, {"q": torch.zeros(1, 15)}), "begin.shifts"),
        (Shift(2, {"z": torch.zeros(1, 14)}), "begin.shifts.z"),
        (Shift(2, {"z": torch.full((1, 15), float("nan"))}), "begin.shifts"),
        (Shift(99, None), "begin.shifts"),
    ],
)
def test_a_parent_s_odd_shifts_are_refused(shift: Shift, named: str) -> None:
    odd = tree("mtgc", 1)
    odd.root.greet()
    rounds(odd, 2)
    (bundle,) = odd.root.down.bundles(["0"], None).values()
    assert bundle.begin is not None
    told = dataclasses.replace(bundle, begin=dataclasses.replace(bundle.begin, shifts=(shift,)))
    with pytest.raises(ValueError, match=named):
        odd.nodes["0"].handle(told)
