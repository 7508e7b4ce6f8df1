"""Stored description of a tuning task."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from stratafl.network.specification import ZERO, Distribution, Tier
from tests.tuning.conftest import TaskFactory


@dataclass(frozen=True)
class LaterTier(Tier):
    """Tier of a later version: with another quantity, which is 0 by default."""

    rain: Distribution = ZERO


def test_a_new_quantity_is_no_other_question(make_task: TaskFactory) -> None:
    task = make_task()
    before = task.as_dict()["networks"]
    for rain, is_same in ((Distribution.constant(0.0), True), (Distribution.constant(1.0), False)):
        later = [
            replace(network, tiers=tuple(LaterTier(**shallow(tier), rain=rain) for tier in network.tiers))
            for network in task.networks
        ]
        digests = replace(task, networks=tuple(later)).as_dict()["networks"]
        assert (digests == before) == is_same


def shallow(tier: Tier) -> dict[str, object]:
    return {field.name: getattr(tier, field.name) for field in fields(tier)}
