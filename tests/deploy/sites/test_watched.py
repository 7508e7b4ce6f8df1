"""Files that are looked at often are read when they have changed, and only what is new of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratafl.base import files
from stratafl.deploy.sites.watched import NewLines, WatchedTable


def test_a_table_is_read_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads, read = tmp_path / "status.json", [0], files.read_json

    def counted(path: Path) -> object:
        reads[0] += 1
        return read(path)

    monkeypatch.setattr(files, "read_json", counted)
    table = WatchedTable(path)
    assert table.read() == {} and reads == [0]
    for number in (1, 2):
        files.write_json(path, {"round": number})
        assert [table.read() for _ in range(5)] == [{"round": number}] * 5 and reads == [number]
    for text in ("[1]", "{"):
        path.write_text(text)
        assert table.read() == {}
    path.unlink()
    assert table.read() == {}


def test_each_line_is_taken_once_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    lines = NewLines(path)
    assert lines.take() == []
    path.write_bytes(b"one\ntw")
    assert lines.take() == ["one"] and lines.take() == []
    with path.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert lines.take() == ["two", "�"] and lines.take() == []


def test_a_file_that_is_written_anew_goes_on_after_what_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    lines = NewLines(path)
    for text, new in (("1\n2\n3\n", ["1", "2", "3"]), ("1\n2\n", []), ("1\n2\n3\n4\n", ["3", "4"])):
        (tmp_path / "aside").write_text(text)
        os.replace(tmp_path / "aside", path)
        assert lines.take() == new
    path.write_text("1\n")  # the same file, cut short
    assert lines.take() == []
    with path.open("a") as file:
        file.write("2\n")
    assert lines.take() == ["2"]
    path.unlink()  # a run that begins anew
    assert lines.take() == []
    path.write_text("1\n")
    assert lines.take() == ["1"]


def test_no_more_is_read_than_is_new(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b"one\n" * 1000)
    lines = NewLines(path)
    assert len(lines.take()) == 1000
    with path.open("r+b") as file:
        file.write(b"two")  # what was taken is not looked at again
    with path.open("ab") as file:
        file.write(b"three\n")
    assert lines.take() == ["three"]


def test_what_is_no_plain_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("1\n")
    (tmp_path / "rounds.jsonl").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for name in ("rounds.jsonl", "pipe", "."):
        assert NewLines(tmp_path / name).take() == []
