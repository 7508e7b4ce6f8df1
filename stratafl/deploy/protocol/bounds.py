"""What a message may say at all: nearly everything follows from the run's config, and is held
against it.

A seal proves whom a message is from, not that it is true. Whoever has all keys of a site may still
send what would take all weight, overflow a number or blame somebody else: such a message is refused
before anything is done with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_integer, check_number
from stratafl.core.rule import Rows
from stratafl.deploy.protocol.counts import MOST_SHIFTS
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import PROTOCOL, Answer, Begin, Bundle, Reply, Report

MOST_SAMPLES = 10**9
"""The most samples of a leaf whose number was not declared when the folders were made."""
LARGEST_RATE = 1e6
"""The largest sum of learning rates, where they are not known."""
SMALLEST_RATE = 1e-30
ROUNDING = 1e-6
"""The share by which a sum of learning rates may differ from what it must be."""
OFFENCES = 20
"""Messages signed with a child's own key that break these bounds: after so many it is asked no
more, until its parent is told to readmit it. What anybody else could have sent in its place does
not count, nor does an update that is far larger than its siblings': an honest child may have
one."""
NAMES = 10
"""How often, in one report, a name may be in `refused` or `absent` for every meeting there can have
been: an aggregator that was interrupted tells of several rounds."""
HEADER = 1 << 16
"""Bytes of a message without its arrays and its lists of names."""


# -- from a child ----------------------------------------------------------------------------------


def check_reply(job: Job, level: int, place: int, bundle: Bundle, reply: Reply) -> None:
    """Refuse a reply that the node of this level cannot truly have given to the bundle."""
    if not isinstance(reply, Reply):
        raise InvalidInput("reply", reply, "is none")
    expected = {"job": job.name, "site": bundle.site, "protocol": PROTOCOL}
    for field, value in expected.items():
        given = getattr(reply, field)
        if type(given) is not type(value) or given != value:
            raise InvalidInput(f"reply.{field}", given, f"must be {value}")
    _check_samples(job, level, place, reply.samples)
    report = reply.report
    if bundle.begin is None:
        if report is not None:
            raise InvalidInput("report", "there is one", "nobody asked for it")
        return
    if report is None:
        return
    if not isinstance(report, Report):
        raise InvalidInput("report", report, "is none")
    _check_report(job, level, place, bundle.begin.step + job.every[level], report)
    if report.buffers is None:
        return
    if reply.samples == 0:
        raise InvalidInput("reply.samples", 0, "must be at least 1, as there is a model")
    if reply.born is not None and (type(reply.born) is not int or not 0 <= reply.born <= bundle.begin.step):
        raise InvalidInput("reply.born", reply.born, f"must be a step of at most {bundle.begin.step}")
    if report.state is not None:
        check_state(job, level, "report.state", report.state)
    elif bundle.begin.samples not in (None, reply.samples):
        raise InvalidInput("report.state", None, f"must be there, as there are {reply.samples} samples now")


def _check_samples(job: Job, level: int, place: int, samples: int) -> None:
    if type(samples) is not int:
        raise InvalidInput("reply.samples", samples, "must be a whole number")
    declared = job.declared(level, place)
    most = sum(each or MOST_SAMPLES for each in declared)
    if level < job.tree.depth:
        check_integer("reply.samples", samples, at_least=0, at_most=most)
    elif declared[0]:
        if samples != declared[0]:
            raise InvalidInput("reply.samples", samples, f"must be {declared[0]}, as declared when the run was made")
    else:
        check_integer("reply.samples", samples, at_least=1, at_most=most)


def _check_report(job: Job, level: int, place: int, meeting: int, report: Report) -> None:
    if type(report.step) is not int or report.step != meeting:
        raise InvalidInput("report.step", report.step, f"must be {meeting}, the meeting it was asked for")
    for field in ("refused", "absent"):
        _check_names(job, level, place, f"report.{field}", getattr(report, field))
    if report.buffers is None:
        if level == job.tree.depth or report.message or report.rate != 0 or report.state is not None:
            raise InvalidInput("report.buffers", None, "must be there")
        return
    check_rate(job, level, meeting, "report.rate", report.rate)
    check_arrays(report, job.report_names[level - 1], job)


def _check_names(job: Job, level: int, place: int, field: str, names: tuple[str, ...]) -> None:
    """Refuse names outside the child's own subtree, and more of them than meetings can have had."""
    own = job.subtree(level, place)
    most = NAMES * len(own) * job.every[level] // job.every[-1] if level < job.tree.depth else 0
    if not isinstance(names, tuple) or len(names) > most:
        raise InvalidInput(field, names, f"must be a list of at most {most} names")
    for name in names:
        if not isinstance(name, str) or name not in own:
            raise InvalidInput(field, name, "must be names of the sender's own subtree")


def check_rate(job: Job, level: int, meeting: int, field: str, rate: float) -> None:
    """A sum of learning rates that the nodes of a level can have used up to a meeting of theirs,
    and since the last."""
    check_number(field, rate, at_least=0)
    known = job.rates(level, meeting - job.every[level])
    least, most = known or (SMALLEST_RATE, LARGEST_RATE)
    if known is None and rate == 0:
        return
    if not (1 - ROUNDING) * least <= rate <= (1 + ROUNDING) * most:
        wanted = f"must be {least:g}" if least == most else f"must be from {least:g} to {most:g}"
        raise InvalidInput(field, rate, f"{wanted} by the schedule")


# -- from the parent -------------------------------------------------------------------------------


def check_bundle(job: Job, level: int, bundle: Bundle) -> None:
    """Refuse what no parent of this run can have to say to a node of this level."""
    if bundle.begin is not None:
        _check_begin(job, level, bundle.begin)
    if bundle.answer is not None:
        _check_answer(job, level, bundle.answer)


def _check_begin(job: Job, level: int, begin: Begin) -> None:
    every, end = job.every[level], job.rounds * job.every[0]
    if type(begin.step) is not int or not 0 <= begin.step < end or begin.step % every:
        raise InvalidInput("begin.step", begin.step, f"rounds of this node begin at multiples of {every} below {end}")
    if begin.heard is not None and (type(begin.heard) is not int or begin.heard > begin.step):
        raise InvalidInput("begin.heard", begin.heard, f"must be a step of at most {begin.step}")
    if begin.known is not None and (type(begin.known) is not int or not 0 <= begin.known < end):
        raise InvalidInput("begin.known", begin.known, f"must be a step below {end}")
    if begin.parcel is not None:
        _check_rows("begin", "note", begin.parcel.note, job.note_names[level - 1], job)
    steps = [shift.step for shift in begin.shifts]
    if len(steps) > MOST_SHIFTS or any(type(step) is not int or not 0 < step <= begin.step for step in steps):
        raise InvalidInput("begin.shifts", steps, f"must be at most {MOST_SHIFTS} steps of at most {begin.step}")
    for shift in begin.shifts:
        if shift.rows is not None:
            check_state(job, level, "begin.shifts", shift.rows, some=True)
            for rows in shift.rows.values():
                check_finite("begin.shifts", rows)


def _check_answer(job: Job, level: int, answer: Answer) -> None:
    every, end = job.every[level], job.rounds * job.every[0]
    if type(answer.step) is not int or not 0 < answer.step <= end or answer.step % every:
        raise InvalidInput("answer.step", answer.step, f"meetings of this node are at multiples of {every} up to {end}")
    check_rate(job, level, answer.step, "answer.rate", answer.rate)
    _check_rows("answer", "note", answer.parcel.note, job.note_names[level - 1], job)


# -- arrays and bytes ------------------------------------------------------------------------------


def check_arrays(report: Report, names: frozenset[str], job: Job) -> None:
    """Refuse arrays that no report with a model has; that they are finite is for the parent to see,
    who says who is left out."""
    _check_rows("report", "message", report.message, names, job)
    check_row("report.buffers", report.buffers, job.carried, job.dtype)


def _check_rows(where: str, field: str, rows: Rows, names: frozenset[str], job: Job) -> None:
    if not isinstance(rows, dict) or rows.keys() != names:
        given = sorted(map(str, rows)) if isinstance(rows, dict) else rows
        raise InvalidInput(f"{where}.{field}", given, f"must have {', '.join(sorted(names)) or 'nothing'}")
    for name, row in rows.items():
        check_row(f"{where}.{name}", row, job.parameters, job.dtype)


def check_row(where: str, rows: object, width: int, dtype: torch.dtype) -> None:
    """Refuse anything but one row of so many numbers of this type."""
    if not isinstance(rows, Tensor) or rows.shape != (1, width) or rows.dtype != dtype:
        found = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else rows
        raise InvalidInput(where, found, f"must be one row of {width} numbers of type {dtype}")


def check_state(job: Job, level: int, where: str, state: object, some: bool = False) -> None:
    """Refuse what is no state of the level's rule at a child; `some`: parts of one will do."""
    form = job.states[level - 1] or {}
    if not isinstance(state, dict) or not (state.keys() <= form.keys() if some else state.keys() == form.keys()):
        given = sorted(map(str, state)) if isinstance(state, dict) else state
        raise InvalidInput(where, given, f"must have {', '.join(form) or 'nothing'}")
    for name, rows in state.items():
        check_row(f"{where}.{name}", rows, form[name].shape[1], job.dtype)


def check_finite(where: str, rows: Tensor) -> None:
    """Refuse rows with anything that is not finite."""
    if not bool(torch.isfinite(rows).all()):
        raise InvalidInput(where, "not finite", "must be finite")


def largest_message(job: Job) -> int:
    """Bytes, either way: what is longer is no message of this run, whatever is in it."""
    up = max(len(names) for names in job.report_names)
    down = 2 * (1 + max(len(names) for names in job.note_names)) + 1
    state = max(sum(rows.shape[1] for rows in (form or {}).values()) for form in job.states)
    width = max(up * job.parameters + state, down * job.parameters + MOST_SHIFTS * state) + 2 * job.carried
    return width * job.dtype.itemsize + largest_header(job)


def largest_header(job: Job) -> int:
    """Bytes of everything but the arrays: in a report those who were refused and those who were
    absent."""
    names = sum(4 * len(name.encode()) + 8 for level in job.tree.names for name in level)
    return HEADER + 2 * NAMES * names * job.every[0] // job.every[-1]
