"""A plan's question as it is noted, for the same question to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from stratafl.network.distributions import Distribution
from stratafl.network.specification import ZERO, Tier
from tests.tune.conftest import Asking


@dataclass(frozen=True)
class LaterTier(Tier):
    """A tier as a later version may have it: with one quantity more, which usually is 0."""

    rain: Distribution = ZERO


def test_a_new_quantity_is_no_other_question(ask: Asking) -> None:
    question = ask()
    before = question.as_dict()["networks"]
    for rain, is_same in ((Distribution.constant(0.0), True), (Distribution.constant(1.0), False)):
        later = [
            replace(network, tiers=tuple(LaterTier(**shallow(tier), rain=rain) for tier in network.tiers))
            for network in question.networks
        ]
        found = replace(question, networks=tuple(later)).as_dict()["networks"]
        assert (found == before) == is_same


def shallow(tier: Tier) -> dict[str, object]:
    return {each.name: getattr(tier, each.name) for each in fields(tier)}
