"""A SuperNode takes the place of the one before it, where that is surely dead."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from stratafl.deploy.supernode import BEFORE, _succeeding
from stratafl.store import files


class Parent:
    """What a SuperLink was asked, in order."""

    def __init__(self, problem: Exception | None = None):
        self.asked: list[Any] = []
        self._problem = problem

    def DeactivateNode(self, request: Any) -> None:
        self.asked.append(request.node_id)
        if self._problem is not None:
            raise self._problem

    def activate(self, request: str) -> SimpleNamespace:
        self.asked.append(request)
        return SimpleNamespace(node_id=2**64 - 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BEFORE.parent.mkdir()


def let_in(parent: Parent) -> list[Any]:
    assert _succeeding(Parent.activate)(parent, "in").node_id == 2**64 - 1
    return parent.asked


def test_the_first_has_nobody_to_sign_off_and_the_second_the_first() -> None:
    assert let_in(Parent()) == ["in"]
    assert let_in(Parent()) == [2**64 - 1, "in"]


def test_a_copy_of_the_folder_on_another_host_does_not_drive_the_first_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(Parent())
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert let_in(Parent()) == ["in"]


def test_a_parent_that_does_not_know_the_one_before_lets_the_next_one_in() -> None:
    files.write_json(BEFORE, {"host": socket.gethostname(), "node": 5})
    refusal = httpx.HTTPStatusError("401", request=httpx.Request("POST", "https://a"), response=httpx.Response(401))
    assert let_in(Parent(refusal)) == [5, "in"]


def test_a_parent_that_does_not_answer_is_asked_from_the_start_again() -> None:
    files.write_json(BEFORE, {"host": socket.gethostname(), "node": 5})
    parent = Parent(httpx.ConnectError("nobody there"))
    with pytest.raises(httpx.ConnectError):
        let_in(parent)
    assert parent.asked == [5]
