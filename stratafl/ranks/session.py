"""A command's time among its ranks: joined at its beginning, and left in peace where all of them
end alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stratafl.base.errors import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.ranks.collectives import Ranks


@contextmanager
def session() -> Iterator[Ranks]:
    """What all ranks raise together, only the first one goes on to tell."""
    ranks = Ranks.join()
    try:
        yield ranks
    except (InvalidInput, Interrupted) as problem:
        if problem is ranks.agreed_on:
            ranks.leave()
            if not ranks.is_first:
                raise SystemExit(problem.exit_code) from None
        raise
    else:
        ranks.leave()
