"""Graceful interruption: the first Ctrl-C or SIGTERM asks a run to stop, the second stops it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupted(Exception):
    """A run was stopped by a signal; not a KeyboardInterrupt, which Typer handles itself."""

    def __init__(self, signal_number: int, message: str = ""):
        self.number, self.message = signal_number, message
        super().__init__(message or "interrupted")

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for a process ended by this signal."""
        return 128 + self.number


class InterruptExit(KeyboardInterrupt, SystemExit):
    """`Interrupted` in a user's own program, which ends as a command does, without a traceback.

    The program may catch it as a `KeyboardInterrupt`.
    """

    def __init__(self, interrupted: Interrupted):
        super().__init__(interrupted.message)
        self.code = interrupted.exit_code


class InterruptHandler:
    """Signal handler: `signal` is the first signal received (0 for none).

    A second signal raises `Interrupted`.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.signal = 0
        self._say = say
        self._before: dict[int, object] = {}

    def __enter__(self) -> InterruptHandler:
        # only the main thread gets signals; a run in another one is stopped by whoever started it
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                # a parent that told us to ignore a signal means it; and a handler that is not
                # Python's, which it shows as None, could not be put back
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise Interrupted(number)
        self.signal = number
        # the signal may have come in the middle of a print, and files refuse a second one inside it
        with contextlib.suppress(RuntimeError):
            self._say("stopping when the clients next synchronise; once more to stop at once")
