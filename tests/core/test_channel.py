"""Lossy channels between rules and the network: simulated and deployed, counted, resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stratafl import Simulation
from stratafl.base.rng import Stream, uniform
from stratafl.core.channel import BUFFERS, MODEL, Channel, ChannelKey, Channels, row_bytes
from stratafl.core.rule import Edge, Rows, average
from stratafl.federation.federation import Federation
from stratafl.federation.sync import EdgeLevel
from tests.deploy.trees import Deployed, simulation

STEP = 2.0**-7


def rounding(with_reference: bool) -> Channel:
    """Stochastic rounding of models to a grid, with error feedback."""

    def encode(memory: Rows, message: Rows, edge: Edge | None, key: ChannelKey) -> tuple[Rows, Rows]:
        start = edge.model if edge is not None and with_reference else torch.zeros_like(message[MODEL])
        exact = message[MODEL] - start + memory["lost"]
        nodes_N1 = torch.as_tensor(key.nodes_N)[:, None]
        columns = torch.arange(exact.shape[1])
        dither = uniform(key.seed, Stream.TRANSFORM, key.level, key.round, nodes_N1, columns).to(exact.dtype)
        coarse = ((exact / STEP) + dither).floor() * STEP
        return {"lost": exact - coarse}, {**message, MODEL: start + coarse}

    return Channel(
        init=lambda message: {"lost": torch.zeros_like(message[MODEL])},
        encode=encode,
        decode=lambda payload, edge: payload,
    )


def halving() -> Channel:
    """Channel that sends float32 instead of float64."""

    def encode(memory: Rows, message: Rows, edge: Edge | None, key: ChannelKey) -> tuple[Rows, Rows]:
        return memory, {name: rows.float() for name, rows in message.items()}

    def decode(payload: Rows, edge: Edge | None) -> Rows:
        return {name: rows.double() for name, rows in payload.items()}

    return Channel(init=lambda message: {}, encode=encode, decode=decode)


def with_channels(sim: Simulation, channels: tuple[Channels, ...]) -> Simulation:
    """Replace the channels of a simulation."""
    before = sim.federation
    top = before.levels[0]
    edges = [replace(edge, channels=channels[level - 1]) for level, edge in before.edges.items()]
    sim.federation = Federation(before.tree, edges, top.model[0], top.buffers[0], observers=before.observers)
    return sim


LOSSY = Channels(rounding(True), rounding(False))


@pytest.mark.parametrize("rules", ["mtgc", "scaffold", "hfedavg"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("participation", [None, 0.6])
def test_deployed_and_simulated_trees_get_the_same_messages(
    rules: str, depth: int, participation: float | None
) -> None:
    channels = (LOSSY,) * depth

    def make() -> Simulation:
        return simulation([rules] * depth, depth, participation=participation)

    exact, lossy = make().run(), with_channels(make(), channels).run()
    deployed = Deployed(make(), update_limit=0, channels=channels).run()
    assert (exact.models[0] - lossy.models[0]).abs().max() > STEP / 100, "nothing was lost"
    torch.testing.assert_close(deployed.model(), lossy.models[0][0], rtol=0, atol=1e-5)


def test_corrections_sum_to_zero_over_a_lossy_channel() -> None:
    sim = with_channels(simulation("mtgc", 3), (Channels(up=rounding(True)),) * 3)
    for _ in sim:
        for level in range(1, 4):
            correction = sim.federation.levels[level].correction
            assert correction is not None
            assert sim.federation.tree.mean(level, correction).abs().max() < 1e-5
    assert max(float(level.correction.abs().max()) for level in sim.federation.levels[1:]) > 1e-3


def test_encoded_bytes_are_counted() -> None:
    double = {"model": lambda: torch.nn.Linear(4, 3).double()}
    exact = simulation("scaffold", 2, **double).run().communication
    halved = (
        with_channels(simulation("scaffold", 2, **double), (Channels(halving(), halving()),) * 2).run().communication
    )
    for level in (1, 2):
        small, large = halved.level(level), exact.level(level)
        assert (small.messages_up, small.messages_down) == (large.messages_up, large.messages_down)
        assert 2 * small.bytes_up == large.bytes_up
        assert 2 * small.bytes_down == large.bytes_down


def test_a_resumed_run_keeps_the_memory_of_channels() -> None:
    channels = (LOSSY,) * 2
    uninterrupted, first, second = (with_channels(simulation("mtgc", 2), channels) for _ in range(3))
    next(first)
    second.restore(first.state())
    assert torch.equal(second.run().models[0], uninterrupted.run().models[0])


def test_identity_changes_nothing_and_counts_rows() -> None:
    rows = {MODEL: torch.ones(3, 5), BUFFERS: torch.ones(3, 2, dtype=torch.float64)}
    edge = EdgeLevel(level=1, rule=average(), seed=0)
    memory, payload = edge.channels.up.encode({}, rows, None, edge.channel_key(1, torch.arange(3).numpy()))
    assert memory == {}
    assert edge.channels.up.decode(payload, None) is rows
    assert row_bytes(payload) == 5 * 4 + 2 * 8
