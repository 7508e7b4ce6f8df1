"""Appendices C to E: distribution shift, larger data sets, three levels; and the search for open
settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stratafl.paper.recipes.base import Case, Options, Recipe
from stratafl.paper.recipes.chosen import CANDIDATES
from stratafl.paper.recipes.settings import CORRECTIONS, case, eh_name, methods, sets, split

SEARCH_SEED = 1000
"""The seed of searches, which is not one of those that results are reported for."""


SHIFTED = {"paper": ((30, 20), (10, 20)), "quick": ((2, 20),)}
"""(E, H) under distribution shift: that of most of the paper's experiments, and the one that asks
least of a model."""


def _label_shift(options: Options) -> list[Case]:
    # all classes are held by somebody: ten groups, or the three of quick scale
    held = [{"name": "classes", "k": 4 if options.quick else 3}, {"name": "classes", "k": 2}]
    return _shifted(options, held)


def _feature_shift(options: Options) -> list[Case]:
    turned = {"start": -50.0, "step": 10.0 if not options.quick else 40.0, "level": 1}
    return _shifted(options, split("both", options), turned)


def _shifted(options: Options, partition: Sequence[Any], rotation: dict[str, Any] | None = None) -> list[Case]:
    data = sets(options, ("fashion_mnist",))[0]
    return [
        case((data, eh_name(e, h)), name, options, data, partition=partition, rotation=rotation,
             schedule={"periods": [e, h]})
        for e, h in SHIFTED[options.scale]
        for name in methods(options, CORRECTIONS)
    ]  # fmt: skip


def _shakespeare(options: Options) -> list[Case]:
    if options.quick:  # no text is embedded: the same shape on digits, with its longer periods
        return [
            case(("digits",), name, options, "shakespeare", partition=split("both", options),
                 schedule={"periods": [2, 40]})
            for name in methods(options, CORRECTIONS)
        ]  # fmt: skip
    roles = [{"name": "natural", "samples": 1500}] * 2
    return [
        case(("shakespeare",), name, options, "shakespeare", partition=roles, schedule={"periods": [30, 75]}, rounds=20)
        for name in methods(options, CORRECTIONS)
    ]


def _cinic10(options: Options) -> list[Case]:
    data = sets(options, ("cinic10",))[0]
    return [
        case((data,), name, options, data, partition=split("both", options)) for name in methods(options, CORRECTIONS)
    ]


def _three_level(options: Options) -> list[Case]:
    data = sets(options, ("cifar10",))[0]
    shape, steps = ((2, 3, 4), [80, 40, 20]) if options.quick else ((4, 5, 5), [500, 100, 10])
    return [
        case((data,), name, options, data, partition=split("both", options, depth=3), shape=shape,
             schedule={"steps_per_sync": steps})
        for name in methods(options, CORRECTIONS)
    ]  # fmt: skip


def _search(options: Options) -> list[Case]:
    data = sets(options, ("cifar10",))[0]
    made = []
    for name, (parameter, values) in CANDIDATES.items():
        if options.methods is not None and name not in options.methods:
            continue
        plain = case((name,), name, options, data, partition=split("both", options), rounds=5 if options.quick else 20)
        for value in values:
            config = replace(plain.config, method={"name": name, parameter: value})
            config = replace(config, run=replace(config.run, seed=SEARCH_SEED))
            made.append(Case((name,), f"{parameter}={value:g}", config))
    return made


LABEL_SHIFT = Recipe(
    "label_shift",
    "Label shift on Fashion-MNIST: 3 classes a group, 2 a client",
    "Figure 8a (Appendix C)",
    "curves",
    _label_shift,
    note="E, H and the number of rounds are not named; here (30, 20), (10, 20) and 100.",
)
FEATURE_SHIFT = Recipe(
    "feature_shift",
    "Feature shift on Fashion-MNIST: the images of each group turned",
    "Figure 8b (Appendix C)",
    "curves",
    _feature_shift,
    note="Group i is turned by -50 + 10 i degrees, counted from 0. E, H and the number of rounds are not "
    "named; here (30, 20), (10, 20) and 100.",
)
SHAKESPEARE = Recipe(
    "shakespeare",
    "100 roles of Shakespeare's, next character, LSTM",
    "Figure 9a (Appendix D)",
    "curves",
    _shakespeare,
    note="The number of rounds is not named; here 20. The test text is of all roles with enough lines.",
)
CINIC10 = Recipe("cinic10", "CINIC-10", "Figure 9b (Appendix D)", "curves", _cinic10)
THREE_LEVEL = Recipe(
    "three_level",
    "Three levels, 4 x 5 x 5, on CIFAR-10",
    "Figure 11 (Appendix E)",
    "curves",
    _three_level,
    note="P = 500, 100, 10. Group correction stands for corrections at both levels above the clients.",
)
SEARCH = Recipe(
    "search",
    "FedProx's mu and FedDyn's alpha, on CIFAR-10",
    "Figure 3 (settings left open)",
    "curves",
    _search,
)
