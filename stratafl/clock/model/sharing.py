"""Transfers that share a pipe.

A pipe is shared fairly at every moment: nobody gets more than its own link takes, and what one
cannot use is divided among the others in equal parts (max-min fairness, processor sharing). Rates
change whenever a transfer begins or ends.

Shape suffixes: G pipes, each by itself; K transfers over each.
"""

from __future__ import annotations

import numpy as np


def finished(
    start_GK: np.ndarray, bytes_GK: np.ndarray, link_GK: np.ndarray, pipe_G: np.ndarray, there_GK: np.ndarray
) -> np.ndarray:
    """When each transfer ends that is there; the others' times mean nothing."""
    end_GK = np.where(there_GK, start_GK + bytes_GK / link_GK, start_GK)
    # a pipe that takes all links together at once is none
    tight_G = (link_GK * there_GK).sum(axis=1) > pipe_G
    # those that begin together and are alike end together: the usual case, and no need for steps
    alike_G = tight_G & np.logical_and.reduce([_is_even(each, there_GK) for each in (start_GK, bytes_GK, link_GK)])
    together_GK = start_GK + bytes_GK * (there_GK.sum(axis=1) / pipe_G)[:, None]
    end_GK = np.where(alike_G[:, None] & there_GK, together_GK, end_GK)
    apart_G = tight_G & ~alike_G
    if apart_G.any():
        never_G = np.full_like(pipe_G, np.inf)
        given = (values[apart_G] for values in (start_GK, bytes_GK, link_GK, pipe_G, there_GK, never_G))
        end_GK[apart_G], _ = _shared(*given)
    return end_GK


def left(
    start_GK: np.ndarray,
    bytes_GK: np.ndarray,
    link_GK: np.ndarray,
    pipe_G: np.ndarray,
    there_GK: np.ndarray,
    at_G: np.ndarray,
) -> np.ndarray:
    """The bytes of each transfer that are not yet sent at a moment of its pipe; of one that is not
    there, none.

    What is left, begun then or at its own later start, ends when `finished` says.
    """
    at_G1 = at_G[:, None]
    sent_GK = link_GK * np.maximum(at_G1 - start_GK, 0.0)
    is_over_GK = ~there_GK | (start_GK + bytes_GK / link_GK <= at_G1)
    left_GK = np.where(is_over_GK, 0.0, np.maximum(bytes_GK - sent_GK, 0.0))
    tight_G = (link_GK * there_GK).sum(axis=1) > pipe_G
    if tight_G.any():
        given = (values[tight_G] for values in (start_GK, bytes_GK, link_GK, pipe_G, there_GK, at_G))
        _, left_GK[tight_G] = _shared(*given)
    return left_GK


def _is_even(values_GK: np.ndarray, there_GK: np.ndarray) -> np.ndarray:
    """Over which pipes all transfers that are there have the same value."""
    largest_G = np.where(there_GK, values_GK, -np.inf).max(axis=1)
    return np.asarray(np.where(there_GK, values_GK, np.inf).min(axis=1) == largest_G)


def _shared(
    start_GK: np.ndarray,
    bytes_GK: np.ndarray,
    link_GK: np.ndarray,
    pipe_G: np.ndarray,
    there_GK: np.ndarray,
    until_G: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """From one beginning or end of a transfer to the next, in all pipes side by side, up to some
    moment of each: when transfers end that end by then, and what is left of the others."""
    order_GK = np.argsort(link_GK, axis=1, kind="stable")
    start, link = (np.take_along_axis(values, order_GK, axis=1) for values in (start_GK, link_GK))
    left = np.take_along_axis(np.where(there_GK, bytes_GK, 0.0), order_GK, axis=1)
    end, now_G = start.copy(), np.where(left > 0, start, np.inf).min(axis=1)
    rows = np.flatnonzero(now_G < until_G)
    while len(rows):
        # rows whose transfers are all over are left behind
        pending, begun = left[rows], start[rows] <= now_G[rows, None]
        live = begun & (pending > 0)
        rate = _rates(link[rows], live, pipe_G[rows])
        needs = np.where(live, pending / np.where(live, rate, 1.0), np.inf)
        ends = needs.min(axis=1)
        begins = np.where(~begun & (pending > 0), start[rows], np.inf).min(axis=1)
        stops = np.minimum(begins, until_G[rows])
        is_end = now_G[rows] + ends <= stops
        step = np.where(is_end, ends, stops - now_G[rows])
        now = np.where(is_end, now_G[rows] + ends, stops)
        rest = pending - rate * step[:, None]
        over = live & ((needs <= step[:, None]) | (rest <= 0))
        left[rows] = np.where(over, 0.0, np.where(live, rest, pending))
        end[rows] = np.where(over, now[:, None], end[rows])
        now_G[rows] = now
        rows = rows[(left[rows] > 0).any(axis=1) & (now < until_G[rows])]
    result = np.empty_like(end), np.empty_like(left)
    for values, sorted_values in zip(result, (end, left), strict=True):
        np.put_along_axis(values, order_GK, sorted_values, axis=1)
    return result


def _rates(link_GK: np.ndarray, live_GK: np.ndarray, pipe_G: np.ndarray) -> np.ndarray:
    """Fair rates; links come in ascending order.

    With L the most that anybody gets, the rates min(link, L) add up to the pipe, or are the links'
    own. Whichever of them are taken to be limited by their links, the others' equal parts are at
    most L, and for the right ones they are L: so L is the largest of these.
    """
    taken_GK = link_GK * live_GK
    before_GK = np.cumsum(taken_GK, axis=1) - taken_GK
    others_GK = np.cumsum(live_GK[:, ::-1], axis=1)[:, ::-1]
    parts_GK = np.where(live_GK, (pipe_G[:, None] - before_GK) / np.maximum(others_GK, 1), 0.0)
    fair_G1 = parts_GK.max(axis=1, keepdims=True)
    return np.where(live_GK, np.minimum(link_GK, fair_G1), 0.0)
