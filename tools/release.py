"""Set the version of the next release: `make release VERSION=1.2.3`.

One step for the three files that state it: the package's version, the changelog's heading and the
citation. Nothing is written where one of them is not as expected."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_FILE = "stratafl/base/version.py"
UNRELEASED = "## [Unreleased]\n"


def parse(version: str) -> tuple[int, ...]:
    """Numbers of a version such as 1.2.3."""
    if re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version) is None:
        raise SystemExit(f"VERSION is {version!r}; expected three numbers, as in make release VERSION=1.2.3")
    return tuple(map(int, version.split(".")))


def replaced(file: str, pattern: str, text: str) -> str:
    """Content of a file with the one match of a pattern replaced."""
    content, count = re.subn(pattern, text, (ROOT / file).read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{file}: expected one line {pattern}, found {count}")
    return content


def release(version: str, date: str) -> None:
    """Write a version and its date into all files that state them."""
    (old,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / VERSION_FILE).read_text(), flags=re.MULTILINE)
    if parse(version) <= parse(old):
        raise SystemExit(f"VERSION is {version}; expected one after {old}")
    _, _, changes = (ROOT / "CHANGELOG.md").read_text().partition(UNRELEASED)
    if not changes.partition("\n## ")[0].strip():
        raise SystemExit("CHANGELOG.md: nothing stands under [Unreleased]")
    contents = {
        VERSION_FILE: replaced(VERSION_FILE, r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        "CHANGELOG.md": replaced("CHANGELOG.md", r"^## \[Unreleased\]$", f"{UNRELEASED}\n## [{version}] - {date}"),
        "CITATION.cff": replaced(
            "CITATION.cff", r"^version: .*\ndate-released: .*$", f"version: {version}\ndate-released: {date}"
        ),
    }
    for file, content in contents.items():
        (ROOT / file).write_text(content)
    print(f"{', '.join(contents)}: {version}")


if __name__ == "__main__":
    release(" ".join(sys.argv[1:]), datetime.date.today().isoformat())
