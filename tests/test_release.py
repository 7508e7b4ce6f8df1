"""`tools/release.py` sets the version in all files, or in none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("stratafl/base/version.py", "CHANGELOG.md", "CITATION.cff", "tools/release.py")
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="no checkout")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.1.0] - 2026-11-16\n")
    (tmp_path / FILES[0]).write_text('__version__ = "0.1.0"\n')
    return tmp_path


def release(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/release.py", *words]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_a_release_sets_version_changelog_and_citation(checkout: Path) -> None:
    assert release(checkout, "0.2.0").returncode == 0
    version, changelog, citation = ((checkout / name).read_text() for name in FILES[:3])
    assert version == '__version__ = "0.2.0"\n'
    date = changelog.partition("\n\n## [0.2.0] - ")[2].partition("\n")[0]
    assert f"## [Unreleased]\n\n## [0.2.0] - {date}\n\n- New.\n\n## [0.1.0]" in changelog
    assert f"\nversion: 0.2.0\ndate-released: {date}\n" in citation
    assert "nothing stands under [Unreleased]" in release(checkout, "0.3.0").stderr


@pytest.mark.parametrize("words", [(), ("0.1",), ("v0.2.0",), ("0.1.0",), ("0.0.9",)], ids="-".join)
def test_a_bad_version_changes_nothing(checkout: Path, words: tuple[str, ...]) -> None:
    before = [(checkout / name).read_text() for name in FILES]
    refused = release(checkout, *words)
    assert refused.returncode == 1 and refused.stderr.startswith("VERSION is")
    assert [(checkout / name).read_text() for name in FILES] == before
