"""Import of a user's Python files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stratafl import InvalidInput
from stratafl.base.user_code import load_attribute, load_module

FILE = """
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Settings:
    widths: list[int] = field(default_factory=lambda: [3, 4])
"""


@pytest.mark.parametrize("name", ["settings_of_a_user.py", "json.py"])
def test_a_file_may_have_dataclasses_with_postponed_annotations(tmp_path: Path, name: str) -> None:
    """Also if its name is that of a module which is imported already, which stays."""
    before = sys.modules.get(Path(name).stem)
    (tmp_path / name).write_text(FILE)
    assert load_attribute("model", f"{tmp_path / name}:Settings")().widths == [3, 4]
    assert sys.modules.get(Path(name).stem) is before


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    path = tmp_path / "broken_file_of_a_user.py"
    path.write_text("raise ValueError('no')")
    with pytest.raises(InvalidInput, match="cannot be imported"):
        load_module("plugins", path)
    assert path.stem not in sys.modules
