"""Heterogeneity of partitions made by hand, and the figures of partitions."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.data.partition.heterogeneity import (
    MinMedianMax,
    class_counts,
    contact_sheet,
    heterogeneity,
    split_figure,
    total_variation,
)
from stratafl.data.partition.partition import partition

PARENTS = [np.empty(0, int), np.array([0, 0]), np.array([0, 0, 1])]


def test_report_of_a_partition_made_by_hand():
    labels = np.array([0, 0, 1, 1, 2, 2, 2, 2, 0])
    leaves = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5, 6, 7])]
    report = heterogeneity(labels, leaves, PARENTS)
    assert (report.samples, report.dropped, report.classes) == (8, 1, 3)
    groups, clients = report.levels
    # Global (1/4, 1/4, 1/2); groups (1/2, 1/2, 0) and (0, 0, 1); clients pure.
    assert groups.to_global == groups.to_parent == pytest.approx(0.5)
    assert clients.to_parent == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert clients.to_global == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    assert groups.classes == MinMedianMax(1, 1.5, 2) and clients.classes == MinMedianMax(1, 1.0, 1)
    assert groups.sizes == MinMedianMax(4, 4.0, 4) and clients.sizes == MinMedianMax(2, 2.0, 4)


def test_counts_add_up_towards_the_root():
    labels = np.random.default_rng(0).integers(0, 7, 500)
    leaves = partition(labels, PARENTS, ["iid", {"name": "dirichlet", "alpha": 0.1}], 0).leaves
    root, groups, clients = class_counts(labels, leaves, PARENTS)
    assert (groups[0] == clients[:2].sum(axis=0)).all()
    assert (root[0] == groups.sum(axis=0)).all() and root.sum() == sum(map(len, leaves))


def test_total_variation_is_between_nought_and_one():
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0
    assert total_variation(np.array([0.3, 0.7]), np.array([0.3, 0.7])) == 0.0


def test_leaves_must_fit_the_tree():
    with pytest.raises(InvalidInput, match="leaves = 1"):
        heterogeneity(np.zeros(3, int), [np.arange(3)], PARENTS)


@pytest.mark.parametrize("classes", [3, 30])
def test_split_figure_is_written(tmp_path, classes):
    pytest.importorskip("matplotlib")
    labels = np.arange(600) % classes
    levels = ["iid", {"name": "dirichlet", "alpha": 0.1}]
    leaves = partition(labels, PARENTS, levels, 0).leaves
    path = split_figure(tmp_path / "new" / "split.png", labels, leaves, PARENTS, title="a split")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(12, 12), (12, 12, 3)])
def test_contact_sheet_shows_the_rotation(tmp_path, shape):
    pytest.importorskip("matplotlib")
    images = np.random.default_rng(0).integers(0, 256, (60, *shape), dtype=np.uint8)
    result = partition(np.arange(60) % 3, PARENTS, ["iid", "iid"], 0, rotation={"step": 45})
    args = images, result.leaves, PARENTS
    turned = contact_sheet(tmp_path / "turned.png", *args, angles=result.angles)
    upright = contact_sheet(tmp_path / "upright.png", *args, angles=0 * result.angles)
    assert turned.read_bytes() != upright.read_bytes()
    with pytest.raises(InvalidInput, match="level = 3"):
        contact_sheet(tmp_path / "none.png", *args, level=3)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match="matplotlib"):
        split_figure(tmp_path / "x.png", np.zeros(3, int), [np.array([i]) for i in range(3)], PARENTS)
