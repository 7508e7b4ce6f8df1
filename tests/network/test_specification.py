"""Networks and distributions: accepted values, and the messages for others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.network.instance import instantiate_network
from stratafl.network.specification import Distribution, Network, network, presets

SHARES = np.array([0.001, 0.1, 0.5, 0.9, 0.999])
GOOD: dict[str, Any] = {"tier": [{"up_mbit_s": 10}], "leaf": {"step_s": 0.1}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3.5, lambda u: np.full_like(u, 3.5)),
        ({"name": "uniform", "low": 1, "high": 3}, scipy.stats.uniform(1, 2).ppf),
        ({"name": "lognormal", "median": 4, "sigma": 0.7}, scipy.stats.lognorm(0.7, scale=4).ppf),
        ({"name": "pareto", "least": 2, "alpha": 1.5}, scipy.stats.pareto(1.5, scale=2).ppf),
        ({"name": "normal", "mean": 1, "deviation": 2}, scipy.stats.truncnorm(-0.5, np.inf, 1, 2).ppf),
        (
            {"name": "normal", "mean": 1, "deviation": 2, "low": 8, "high": 9},
            scipy.stats.truncnorm(3.5, 4, 1, 2).ppf,
        ),
        ({"name": "uniform", "low": 1, "high": 3, "shift": 2, "at_most": 4}, lambda u: np.minimum(3 + 2 * u, 4)),
        ({"name": "empirical", "values": [5, 1, 3]}, lambda u: np.array([1, 1, 3, 5, 5])),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_distributions(value: Any, expected: Any) -> None:
    np.testing.assert_allclose(Distribution.of("x", value).quantile(SHARES), expected(SHARES), rtol=1e-9)


def test_values_from_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("site,mbit\na,3\nb,1\nc,2\n")
    (tmp_path / "net.toml").write_text(
        '[leaf]\nstep_s = 1\n[[tier]]\nup_mbit_s = { name = "empirical", file = "links.csv", column = "mbit" }\n'
    )
    distribution = network(tmp_path / "net.toml").tiers[0].up_mbit_s
    assert distribution is not None and distribution.values == (1, 2, 3)
    instance = instantiate_network(network(tmp_path / "net.toml"), Topology.of("300"), 0)
    assert set(instance.link(1).up_N * 8 / 1e6) == {1, 2, 3}


@pytest.mark.parametrize(
    "text",
    ["\ufeffsite,mbit\na,3\nb,1\n", "site, mbit \r\na, 3\r\n\r\nb,1 \r\n  \r\n", '"site","mbit"\n"a","3"\n"b","1"\n'],
    ids=["a mark before it", "spaces and empty lines", "quoted"],
)
def test_tables_as_programs_write_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text(text)
    value = {"name": "empirical", "file": "links.csv", "column": "mbit"}
    assert Distribution.of("x", value, tmp_path).values == (1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a line with the names of its columns, and one with numbers"),
        ("mbit\n", "needs a line with the names of its columns, and one with numbers"),
        ("3\n1\n2\n", "begins with 3: its first line must name its columns"),
        ("mbit\n3\nmany\n", "has 'many' where a number should be"),
        ("site,mbit\na,3\nb\n", "has 'a' where a number should be"),
        ("mbit\nnan\n", "x.values = nan: must be a finite number"),
        ("mbit\n\xe9\n", "is no CSV file"),
    ],
    ids=["nothing", "no numbers", "no names", "words", "the first column", "no number", "another encoding"],
)
def test_a_table_that_cannot_be_used_gets_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_bytes(text.encode("latin1"))
    with pytest.raises(InvalidInput) as problem:
        Distribution.of("x", {"name": "empirical", "file": "links.csv"}, tmp_path)
    assert message in str(problem.value)


def test_a_node_may_be_different_and_a_pattern_names_many() -> None:
    tree = Topology.of({"paris": ["a", "b"], "rome": ["c"]})
    nodes = {"paris/*": {"up_mbit_s": 1, "gflop_s": 2, "flops_per_sample": 1e9}, "paris/b": {"step_s": 7}}
    instance = instantiate_network(Network.of({**GOOD, "nodes": {**nodes, "rome": {"merge_s": 3}}}), tree, 0, [4, 4, 4])
    np.testing.assert_allclose(instance.link(2).up_N * 8 / 1e6, [1, 1, 10])
    np.testing.assert_allclose(instance.devices.step_s_N, [2, 7, 0.1])
    np.testing.assert_allclose(instance.link(2).merge_s_M, [0, 3])


def test_later_tables_win_also_with_another_unit_of_speed() -> None:
    tree, fast = Topology.of({"paris": ["a", "b"], "rome": ["c"]}), {"gflop_s": 2, "flops_per_sample": 1e9}
    instance = instantiate_network(
        Network.of({**GOOD, "nodes": {"paris/b": {"step_s": 7}, "*": fast}}), tree, 0, [4, 4, 4]
    )
    np.testing.assert_allclose(instance.devices.step_s_N, 2)


def test_a_nodes_own_way_up_is_its_way_down_unless_that_is_given() -> None:
    tree, nodes = Topology.of("3"), {"0": {"down_mbit_s": 5}, "[01]": {"up_mbit_s": 1}}
    instance = instantiate_network(Network.of({**GOOD, "nodes": nodes}), tree, 0)
    np.testing.assert_allclose(instance.link(1).up_N * 8 / 1e6, [1, 1, 10])
    np.testing.assert_allclose(instance.link(1).down_N * 8 / 1e6, [5, 1, 10])
    tier = {"up_mbit_s": 10, "down_mbit_s": 20}
    instance = instantiate_network(Network.of({**GOOD, "tier": [tier], "nodes": nodes}), tree, 0)
    np.testing.assert_allclose(instance.link(1).down_N * 8 / 1e6, [5, 20, 20])


def test_numbers_of_numpy_are_numbers() -> None:
    jitter = {"name": "empirical", "values": np.array([3, 1], dtype=np.float32)}
    tier = {"up_mbit_s": np.int64(10), "latency_s": np.float16(0.5), "jitter_s": jitter}
    value = Network.of({"tier": [tier], "leaf": {"step_s": {"name": "pareto", "least": np.float32(0.5), "alpha": 2}}})
    tier |= {"up_mbit_s": 10, "latency_s": 0.5, "jitter_s": {"name": "empirical", "values": [1, 3]}}
    assert value == Network.of({"tier": [tier], "leaf": {"step_s": {"name": "pareto", "least": 0.5, "alpha": 2}}})


BAD = [
    ({"tier": [{"up_mbit_s": -1}]}, "tier 1.up_mbit_s = -1.0: must be a finite number above 0"),
    ({"tier": [{"up_mbit_s": 0}]}, "tier 1.up_mbit_s = 0.0: must be a finite number above 0"),
    ({"tier": [{"up_mbit_s": math.nan}]}, "tier 1.up_mbit_s = nan: must be a finite number"),
    ({"tier": [{"up_mbit_s": 1, "latency_s": math.inf}]}, "tier 1.latency_s = inf: must be a finite number"),
    ({"tier": [{"up_mbit_s": 1, "latency_s": -0.1}]}, "tier 1.latency_s = -0.1: must be a finite number at least 0"),
    ({"tier": []}, "tier = []: needs one"),
    ({"tier": [{"latency_s": 1}]}, "needs up_mbit_s"),
    ({"tier": [{"up_mbits": 1}]}, "did you mean 'up_mbit_s'?"),
    ({"tier": [{"up_mbit_s": {"name": "lognorm"}}]}, "up_mbit_s.name = 'lognorm': unknown; did you mean 'lognormal'?"),
    ({"tier": [{"up_mbit_s": {"name": "pareto", "least": 1}}]}, "pareto needs alpha"),
    ({"tier": [{"up_mbit_s": {"name": "pareto", "least": 1, "alfa": 1}}]}, "did you mean 'alpha'?"),
    ({"tier": [{"up_mbit_s": {"name": "uniform", "low": 2, "high": 1}}]}, "must be below high"),
    ({"tier": [{"up_mbit_s": {"name": "uniform", "low": -1, "high": 1}}]}, "of which uniform can give"),
    ({"tier": [{"up_mbit_s": {"name": "empirical", "values": []}}]}, "must be a list of numbers"),
    ({"tier": [{"up_mbit_s": {"name": "empirical", "file": "no.csv"}}]}, "no such file"),
    ({"leaf": {}}, "needs either step_s or gflop_s"),
    ({"leaf": {"step_s": 1, "dropout": 1}}, "leaf.dropout = 1: must be a finite number at least 0 and below 1"),
    ({"leaf": {"step_s": 1, "availability": 1.5}}, "at most 1"),
    ({"leaf": {"step_s": "fast"}}, "leaf.step_s.name = 'fast': unknown"),
    ({"leafs": {}}, "did you mean 'leaf'?"),
    ({"nodes": {"a": {"step": 1}}}, "did you mean 'step_s'?"),
    ({"tier": [{"up_mbit_s": 1e300}]}, "1e+300: must be a finite number at least 1e-60 and at most 1e+60"),
    ({"tier": [{"up_mbit_s": 5e-324}]}, "must be a finite number at least 1e-60"),
    ({"leaf": {"step_s": 1, "watts": 1e308}}, "leaf.watts = 1e+308: must be a finite number at least 0 and at most"),
    ({"tier": [{"up_mbit_s": 1, "latency_s": {"name": "lognormal", "median": 1, "sigma": 100}}]}, "can give = inf"),
    ({"leaf": {"step_s": {"name": "pareto", "least": 1, "alpha": 0.01}}}, "of which pareto can give = inf"),
    ({"leaf": {"step_s": {"name": "uniform", "low": 1, "high": 2, "at_least": 5, "at_most": 3}}}, "at_least = 5.0"),
    ({"about": "one\x1b[31m"}, "about = 'one\\x1b[31m': must be a line of printable text"),
    ({"name": "x" * 400}, "of at most 300 characters"),
    ({"nodes": {"a": {"step_s": 1, "gflop_s": 1}}}, "takes either step_s or gflop_s"),
    ({"name": 3}, "name = 3: must be a text"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_network_gets_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        Network.of({**GOOD, **change})
    assert message in str(problem.value) and "\n" not in str(problem.value)


def test_what_only_a_tree_can_tell() -> None:
    with pytest.raises(InvalidInput, match="no node of the tree has this name"):
        instantiate_network(Network.of({**GOOD, "nodes": {"mars": {"step_s": 1}}}), Topology.of("3"), 0)
    with pytest.raises(InvalidInput, match="flops_per_sample = None: must be given"):
        instantiate_network(Network.of({**GOOD, "leaf": {"gflop_s": 1}}), Topology.of("3"), 0)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[tier")
    for value, message in (
        (tmp_path / "bad.toml", "not valid TOML"),
        (tmp_path / "none.toml", "no such file"),
        ("lan_wa", "did you mean 'lan_wan'?"),
    ):
        with pytest.raises(InvalidInput, match=message):
            network(value)


def test_a_preset_may_be_told_about(tmp_path: Path) -> None:
    described = network({"name": "lan_wan", "about": "our two offices"})
    assert described.same_parameters(network("lan_wan"))
    assert (described.name, described.about) == ("lan_wan", "our two offices")
    with pytest.raises(InvalidInput, match="did you mean 'lan_wan'"):
        network({"name": "lanwan", "about": "our two offices"})


@pytest.mark.parametrize("name", presets())
def test_presets_fit_any_depth_and_name_their_source(name: str) -> None:
    preset = network(name)
    assert preset.name == name and preset.about and preset.source
    for shape in ("4", "2x2", "2x2x2", "2x1x2x1"):
        instance = instantiate_network(preset, Topology.of(shape), 3, [10] * Topology.of(shape).leaves, flops=1e6)
        assert all(np.isfinite(link.up_N).all() and (link.up_N > 0).all() for link in instance.links)
        assert np.isfinite(instance.devices.step_s_N).all()
