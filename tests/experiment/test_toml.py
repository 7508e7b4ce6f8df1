"""Texts of a config that are names of files, and those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stratafl.experiment.toml import with_full_paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files whose names are also those of other things."""
    for name in ("a.b", "layers.0", "train.v1", "own"):
        (tmp_path / name).write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "1").write_text("")
    return tmp_path


NO_FILES: list[dict[str, Any]] = [
    {"tree": {"shape": "sub/1"}},
    {"data": {"columns": {"inputs": ["a.b"], "targets": "train.v1"}, "augment": "a.b", "partition": ["sub/1"]}},
    {"model": {"local_parameters": ["layers.0"], "lora": {"targets": ["layers.0"], "train": "layers.0"}}},
    {"method": {"name": "a.b"}},
    {"method": {"rules": [{"name": "a.b"}]}},
    {"schedule": {"participation": "a.b"}, "evaluation": {"stop_when": "a.b"}, "execution": {"device": "a.b"}},
    {"client": {"lr_schedule": "a.b"}},
    {"network": {"about": "a.b", "source": "sub/1", "tier": [{"name": "a.b"}], "nodes": {"sub/1": {"step_s": 1}}}},
]


@pytest.mark.parametrize("tables", NO_FILES, ids=str)
def test_names_of_other_things_stay(tables: dict[str, Any], folder: Path) -> None:
    assert with_full_paths(tables, folder) == tables


FILES: list[tuple[dict[str, Any], str]] = [
    ({"data": {"source": "sub/1"}}, "sub/1"),
    ({"data": {"test": "none.csv"}}, "none.csv"),
    ({"data": {"arguments": {"parts": ["train.v1", "absent.v2"]}}}, "train.v1"),
    ({"model": {"name": "net.py:Net"}}, "net.py:Net"),
    ({"model": {"base": "x.safetensors"}}, "x.safetensors"),
    ({"method": {"name": "mine", "table": "a.b"}}, "a.b"),
    ({"loss": "own.py:loss"}, "own.py:loss"),
    ({"evaluation": {"metrics": {"worst": {"name": "own.py:worst"}}}}, "own.py:worst"),
    ({"client": {"optimizer": {"name": "own.py:make"}}}, "own.py:make"),
    ({"model": {"initial": "x.pt"}}, "x.pt"),
    ({"plugins": ["rule.py"]}, "rule.py"),
    ({"network": {"name": "ours.toml"}}, "ours.toml"),
    ({"network": {"tier": [{"up_mbit_s": {"name": "empirical", "file": "up.csv"}}]}}, "up.csv"),
]


@pytest.mark.parametrize(("tables", "name"), FILES, ids=[each[1] for each in FILES])
def test_files_get_their_full_paths(tables: dict[str, Any], name: str, folder: Path) -> None:
    assert str(with_full_paths(tables, folder)) == str(tables).replace(repr(name), repr(str(folder / name)))
