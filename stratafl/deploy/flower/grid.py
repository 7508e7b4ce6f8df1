"""Flower's grid, a parent's way to its children, without its waiting.

A reply is announced before its parts are there. Flower's own then waits for them, minutes if need
be, and nothing can interrupt it: one child that announces a reply and dies would hold up its parent
and everybody else. This one looks, takes what is there, and comes back to the rest at the next
look. What this calls is not Flower's public interface: the version is pinned.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid import HttpGrid

from stratafl.base.errors import InvalidInput

PATIENCE = 30.0
"""Seconds that the SuperLink beside gets for an answer; less where less is left."""
LEAST = 0.5
"""Seconds that it gets however little is left."""
RUN_IS_OVER = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
"""What it then answers to everything."""

Came = tuple[str, Message | Exception]
"""The message that was answered, and its reply, or why that cannot be read."""


@dataclass
class Announced:
    """A reply, and what is there of it."""

    message: str
    parts: list[str]
    here: dict[str, bytes] = field(default_factory=dict)


class PromptGrid(HttpGrid):
    """Every call of it ends soon: when it was answered, or with an httpx.HTTPError."""

    def __init__(self, *where: Any, token: str):
        super().__init__(*where, token=token)
        self._retry_invoker = None  # whoever calls knows how long it is worth trying
        self._announced: dict[str, Announced] = {}
        self._until = math.inf

    def hurry(self, until: float) -> None:
        """Wait for no answer of the SuperLink much longer than until then, from now on."""
        self._until = until

    @property
    def _runtime_client(self) -> Any:
        client = super()._runtime_client
        client._client.timeout = min(max(self._until - time.monotonic(), LEAST), PATIENCE)
        return client

    def look(self, asked: Collection[str]) -> list[Came]:
        """What came whole of the replies to these messages. Halves of replies to any other are
        forgotten."""
        self._forget([answered for answered in self._announced if answered not in asked])
        came = self._look_for_new([each for each in asked if each not in self._announced])
        with contextlib.suppress(httpx.TransportError):  # what came already is not lost; the rest is there later
            for answered, announced in list(self._announced.items()):
                if time.monotonic() > self._until:
                    break
                try:
                    if self._is_whole(announced):
                        came.append((answered, _inflated(announced)))
                except httpx.TransportError:
                    raise
                except Exception as problem:
                    came.append((answered, problem))
        with contextlib.suppress(httpx.TransportError):
            self._forget([answered for answered, _ in came])
        return came

    def withdraw(self, messages: Iterable[str]) -> None:
        """Messages that nobody will be asked for any more; who is just reading one will not find
        the rest."""
        with contextlib.suppress(httpx.HTTPError):
            for message in messages:
                self._delete(message)

    def _look_for_new(self, asked: list[str]) -> list[Came]:
        """Note which replies were announced; those whose announcement cannot be read are
        returned."""
        if not asked:
            return []
        try:
            found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        except httpx.HTTPStatusError as problem:
            if problem.response.status_code in RUN_IS_OVER:
                raise
            if len(asked) == 1:
                return [(asked[0], problem)]
            return [each for one in asked for each in self._look_for_new([one])]
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            answered = message.metadata.reply_to_message_id
            if answered in asked:
                parts = [each.object_id for each in iterate_object_tree(tree)]
                self._announced[answered] = Announced(message.metadata.message_id, parts)
        return []

    def _is_whole(self, announced: Announced) -> bool:
        """Whether all parts of a message have come, after taking those that are there now."""
        for part in announced.parts:
            if part in announced.here:
                continue
            request = PullObjectRequest(node=self.node, run_id=self.run.run_id, object_id=part)
            found = self._runtime_client.PullObject(request)
            if not found.object_found:
                raise InvalidInput("reply", announced.message, "a part of it is gone: its sender took too long")
            if not found.object_available:
                return False
            announced.here[part] = found.object_content
        return True

    def _forget(self, answered: list[str]) -> None:
        for each in answered:
            announced = self._announced.pop(each, None)
            if announced is not None:
                self._delete(announced.message)

    def _delete(self, message: str) -> None:
        """Delete a message at the SuperLink, with all its parts."""
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=message)
        )


def _inflated(announced: Announced) -> Message:
    message = inflate_object_from_contents(announced.message, dict(announced.here))
    if not isinstance(message, Message):
        raise InvalidInput("reply", type(message).__name__, "must be a message")
    message.metadata.__dict__["_message_id"] = announced.message
    return message
