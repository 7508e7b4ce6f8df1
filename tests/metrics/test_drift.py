"""Drift diagnostics against the paper's definitions, written down again with dictionaries and
loops."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from stratafl import InvalidInput, ParticipationContext, Topology, corrections, median
from stratafl.core.client_update import ClientUpdate
from stratafl.core.optimizer import constant
from stratafl.metrics.drift import Drift
from tests.flat import client_options, simulate
from tests.problems import PERIODS, SHAPES, LeastSquares, random_weights
from tests.rules.test_parity import problem_and_setting
from tests.slow import slow
from tests.transcriptions import Node, Setting

LR, ROUNDS = 0.05, 3


def away(level: int, round: int, node: int) -> bool:
    """Whether a node is absent; never the first child, so that every parent has a child present."""
    return (level + 2 * round + node) % 3 == 0


def participation(draw: ParticipationContext) -> np.ndarray:
    parents = draw.tree.parents[draw.level]
    first = np.r_[True, parents[1:] != parents[:-1]]
    return np.array([bool(first[i]) or not away(draw.level, draw.round, i) for i in range(len(parents))])


class Transcription:
    """MTGC, corrections restarting at zero, and what its analysis looks at; levels count from the
    root."""

    def __init__(self, s: Setting, corrected: set[int], partial: bool):
        self.s, self.corrected, self.partial = s, corrected, partial
        self.held = {node: s.x0 for m in range(s.M) for node in self.nodes(m)}
        self.nu = {node: 0 * s.x0 for m in range(1, s.M + 1) for node in self.nodes(m)}
        self.begun = dict.fromkeys(range(1, s.M + 1), 0)
        self.there: dict[int, set[Node]] = {0: {()}}
        self.squares: dict[tuple[int, str], list[float]] = {}

    def nodes(self, m: int) -> list[Node]:
        return [()] if m == 0 else self.s.level(m)

    def draw(self, m: int) -> None:
        round, self.begun[m] = self.begun[m], self.begun[m] + 1
        self.there[m] = {
            node
            for number, node in enumerate(self.nodes(m))
            if node[:-1] in self.there[m - 1] and not (self.partial and node[-1] != 0 and away(m, round, number))
        }

    def path_weight(self, node: Node) -> float:
        return float(np.prod([self.s.weight[node[:m]] for m in range(1, len(node) + 1)]))

    def note(self, m: int, name: str, square: dict[Node, float]) -> None:
        """The level's mean: parents by their weight in the tree, children as their parent weighs
        those that came."""
        parents = {node[:-1] for node in square}
        total = sum(self.path_weight(parent) for parent in parents)
        value = 0.0
        for parent in parents:
            children = [node for node in square if node[:-1] == parent]
            weight = sum(self.s.weight[node] for node in children)
            mean = sum(self.s.weight[node] / weight * square[node] for node in children)
            value += self.path_weight(parent) / total * mean
        self.squares.setdefault((m, name), []).append(value)

    def note_parents(self, m: int, square: dict[Node, float]) -> None:
        total = sum(self.path_weight(node) for node in square)
        value = sum(self.path_weight(node) / total * norm for node, norm in square.items())
        self.squares.setdefault((m, "progress"), []).append(value)

    def gradient(self, node: Node, x: np.ndarray) -> np.ndarray:
        if len(node) == self.s.M:
            return self.s.gradient(node, x)
        return sum(self.s.weight[child] * self.gradient(child, x) for child in self.s.children[node])

    def mean_model(self, node: Node) -> np.ndarray:
        if len(node) == self.s.M - 1:
            return self.held[node]
        return sum(self.s.weight[child] * self.mean_model(child) for child in self.s.children[node])

    def compare(self) -> dict[int, float]:
        cosines = {}
        for m in self.corrected:
            bias, angle, weights = {}, [], []
            for node in self.nodes(m):
                point = self.mean_model(node[:-1])
                ideal = self.gradient(node[:-1], point) - self.gradient(node, point)
                bias[node] = float(np.sum((self.nu[node] - ideal) ** 2))
                length = np.linalg.norm(self.nu[node]) * np.linalg.norm(ideal)
                if length > 0:
                    angle.append(self.nu[node] @ ideal / length)
                    weights.append(self.path_weight(node))
            self.note(m, "bias", bias)
            if angle:
                cosines[m] = float(np.average(angle, weights=weights))
        return cosines

    def meet(self, m: int, at: dict[Node, np.ndarray], relayed: bool) -> None:
        s = self.s
        drift, length, moved = {}, {}, {}
        for parent in self.nodes(m - 1):
            present = [child for child in s.children[parent] if child in self.there[m]]
            if not present:
                continue
            weight = sum(s.weight[child] for child in present)
            mean = sum(s.weight[child] / weight * at[child] for child in present)
            for child in present:
                drift[child] = float(np.sum((at[child] - mean) ** 2))
                length[child] = float(np.sum(self.nu[child] ** 2))
                if m in self.corrected and not relayed:
                    self.nu[child] = self.nu[child] + (at[child] - mean) / (s.lr * s.P[m - 1])
            moved[parent] = float(np.sum((mean - self.held[parent]) ** 2))
            at[parent] = mean
        self.note(m, "drift", drift)
        if m in self.corrected:
            self.note(m, "correction", length)
        self.note_parents(m - 1, moved)
        self.held.update({parent: at[parent] for parent in moved})

    def round(self) -> dict[str, dict[str, float]]:
        s = self.s
        self.squares = {}
        cosines: dict[int, float] = {}
        top = 1
        for done in range(s.P[-1], s.P[0] + 1, s.P[-1]):
            for m in range(top, s.M + 1):
                self.draw(m)
            top = next(m for m in range(1, s.M + 1) if done % s.P[m - 1] == 0)
            if top == 1:
                cosines = self.compare()
            at, moved = {}, {}
            for node in self.there[s.M]:
                x = self.held[node[:-1]]
                path = sum(self.nu[node[:m]] for m in range(1, s.M + 1))
                for _ in range(s.P[-1]):
                    x = x - s.lr * (s.gradient(node, x) + path)
                at[node], moved[node] = x, float(np.sum((x - self.held[node[:-1]]) ** 2))
            self.note(s.M, "progress", moved)
            for m in range(s.M, top - 1, -1):
                self.meet(m, at, relayed=m > top)
            for m in range(top + 1, s.M + 1):
                for node in self.nodes(m):
                    self.nu[node] = 0 * s.x0
                    self.held[node[:-1]] = self.held[node[: top - 1]]
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for (m, name), squares in self.squares.items():
            means[str(m)][name] = float(np.sqrt(np.mean(squares)))
        for m, cosine in cosines.items():
            means[str(m)]["cosine"] = cosine
        return means


METHODS = {
    "mtgc": lambda M: set(range(1, M + 1)),
    "local_correction": lambda M: {M},
    "hfedavg": lambda M: set(),
}


@pytest.mark.parametrize("partial", [slow(False), True], ids=["all", "partial"])
@pytest.mark.parametrize("weighted", [slow("uniform"), "given"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_paper_s_quantities(shape: str, method: str, weighted: str, partial: bool) -> None:
    problem, setting = problem_and_setting(shape, weighted)
    settings = {"participation": [participation] * setting.M} if partial else {}
    simulation = problem.simulation(method, rounds=ROUNDS, lr=LR, drift="ideal", **settings)
    transcription = Transcription(setting, METHODS[method](setting.M), partial)
    for result in simulation:
        expected = transcription.round()
        assert set(result.drift) == {str(m) for m in range(setting.M + 1)}
        for m, quantities in result.drift.items():
            assert quantities == pytest.approx(expected[m], rel=1e-9, abs=1e-12), f"round {result.round}, level {m}"
            assert set(quantities) == set(expected[m])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", ["mtgc", "scaffold", "hfedavg"])
def test_looking_changes_no_bit(method: str, engine: str) -> None:
    problem = LeastSquares("2x3", random_weights("2x3"))
    runs = [
        problem.run(method, drift=diagnose, engine=engine, batch=2, participation=0.7)
        for diagnose in ("none", "drift", "ideal")
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0].models, other.models, strict=True):
            assert torch.equal(a, b)
    assert all(record.drift == {} for record in runs[0].history)
    assert all("drift" in record.drift["2"] for record in runs[1].history)
    assert "bias" not in runs[1].history[0].drift["2"]


def test_families_of_any_size_are_measured_alike() -> None:
    """Equal families take a shorter way; a tree with one more group cannot."""
    maker = torch.Generator().manual_seed(0)
    x_NP = torch.randn(7, 5, generator=maker, dtype=torch.float64)
    of_MP = torch.randn(3, 5, generator=maker, dtype=torch.float64)
    equal = Drift(Topology.of("2x3"))._squared_distances(2, x_NP[:6], of_MP[:2])
    unequal = Drift(Topology.of([3, 3, 1]))._squared_distances(2, x_NP, of_MP)
    assert torch.allclose(equal, unequal[:6], rtol=1e-14)


def test_large_models_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = LeastSquares([2, 3, 1])
    at_once = [record.drift for record in problem.simulation("mtgc")]
    monkeypatch.setattr("stratafl.core.rows.BLOCK", 1)
    blocks = [record.drift for record in problem.simulation("mtgc")]
    for one, other in zip(at_once, blocks, strict=True):
        for m in one:
            assert one[m] == pytest.approx(other[m], rel=1e-12)


def test_a_reducer_of_its_own_is_no_mean() -> None:
    """A leaf's progress is then measured, not derived from the mean."""
    problem = LeastSquares(3)
    simulation = problem.simulation([median()], rounds=1, lr=LR)
    result = next(simulation)
    moved = simulation.federation.levels[1].model - torch.tensor(problem.x0)
    assert result.drift["1"]["progress"] == pytest.approx(float(moved.square().sum(dim=1).mean().sqrt()))
    assert result.drift["1"]["progress"] ** 2 != pytest.approx(
        result.drift["1"]["drift"] ** 2 + result.drift["0"]["progress"] ** 2, rel=1e-6
    )


def failing(inputs: torch.Tensor, seed: int, client: int, step: int) -> torch.Tensor:
    return inputs * torch.nan if client == 1 else inputs


def test_refused_clients_are_counted_and_left_out() -> None:
    problem = LeastSquares("2x2")
    history = problem.run("mtgc", rounds=1, augment=failing).history
    drift = history[0].drift
    assert drift["2"]["refused"] == len(history[0].refused) == PERIODS[2][0]
    assert "refused" not in drift["1"]
    assert all(np.isfinite(value) for level in drift.values() for value in level.values())


@pytest.mark.parametrize(("norm", "share"), [(1e-6, 1.0), (1e6, 0.0)])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("rules", ["mtgc", "fedprox"])
def test_clipped_steps(norm: float, share: float, engine: str, rules: str) -> None:
    problem = LeastSquares("2x2")
    simulation = problem.simulation(rules, rounds=1, lr=client_options(0.05, clip_norm=norm), engine=engine)
    assert next(simulation).drift["2"]["clipped"] == share


def test_the_engines_clip_the_same_steps() -> None:
    problem = LeastSquares("2x2")
    shares = [
        next(problem.simulation("mtgc", rounds=1, lr=client_options(0.05, clip_norm=1.0), engine=engine)).drift["2"][
            "clipped"
        ]
        for engine in ("loop", "stacked")
    ]
    assert shares[0] == shares[1] and 0 < shares[0] < 1


class Halved:
    """A user's own stage that halves every direction, and says so."""

    def __call__(self, direction, x, correct):
        return self.shortened(direction, x, correct)[0]

    def shortened(self, direction, x, correct):
        return 0.5 * direction, torch.tensor(len(direction))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_stage_of_one_s_own_reports_what_it_shortened(engine: str) -> None:
    chain = ClientUpdate(constant(0.05), (corrections, Halved()))
    assert next(LeastSquares("2x2").simulation("mtgc", rounds=1, lr=chain, engine=engine)).drift["2"]["clipped"] == 1


def test_clipped_steps_are_left_out_where_nothing_clips() -> None:
    assert "clipped" not in next(LeastSquares("2x2").simulation("mtgc", rounds=1)).drift["2"]


def test_a_run_that_blows_up_still_has_a_diagnosis() -> None:
    problem = LeastSquares("2x2")
    for result in problem.simulation("mtgc", rounds=3, lr=1e60, drift="ideal"):
        assert all(np.isfinite(value) for level in result.drift.values() for value in level.values())


def test_what_can_be_asked_for() -> None:
    problem = LeastSquares(2)
    with pytest.raises(InvalidInput, match=r"evaluation.drift = 'everything': unknown; known: drift, ideal, none"):
        simulate(
            torch.nn.Linear(3, 1),
            problem.data,
            problem.partition,
            2,
            periods=[1],
            rounds=1,
            drift="everything",  # type: ignore[arg-type]
        )
