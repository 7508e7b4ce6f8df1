"""Messages and states as bytes: one safetensors file whose metadata is the message itself, as JSON.

No pickle. A receiver says what type it expects, and gets that or a refusal that names the field. A
field with a default may be missing, as in what an older version wrote, and then has it; a field
that is not known, as a newer version's, is passed over. What must not be passed over raises
`FORMAT`, for states, or `PROTOCOL`, for messages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.deploy.protocol.bounds import check_arrays, check_finite, check_row, largest_header
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import PROTOCOL, Bundle, Parcel, Reply

T = TypeVar("T")


class OtherFormat(InvalidInput):
    """Something of another kind, or of a format that this version of stratafl does not read."""


MESSAGE = "message"
FORMAT = 1
"""Of states as bytes; what has no number has this one, as it was written before there were
numbers. Messages go by their protocol's alone: sites that speak the same one work together."""
LARGEST_HEADER = 100_000_000
"""Bytes of names, numbers and shapes; the format itself takes no longer header."""


def encode(value: object, once: bool = False, largest_header: int = LARGEST_HEADER) -> bytes:
    """A dataclass of plain data, tensors and other such dataclasses. `once`: a tensor that it holds
    twice is written once, which is for states; a message's bytes are those of what it says. What
    nobody could decode is refused."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_heading(type(value)) | _plain(value, "", tensors, {} if once else None))
    data = save(tensors, metadata={MESSAGE: plain})
    if (length := _header_bytes(data)) > largest_header:
        raise InvalidInput("message", f"{length:,} bytes", f"its header may have at most {largest_header:,}")
    return data


def array_bytes(data: bytes) -> int:
    """The bytes of the arrays in what `encode` made, without the header that names them."""
    return len(data) - 8 - _header_bytes(data)


def decode(data: bytes, kind: type[T], largest_header: int = LARGEST_HEADER) -> T:
    """What `encode` made of a `kind`; anything else is refused, before room is made for what it
    says it holds."""
    try:
        plain = _header(data, largest_header)
        for key, value in _heading(kind).items():
            if plain.get(key, value) != value:
                raise OtherFormat(key[1:], plain[key], f"must be {value!r} for this version of stratafl")
        return _typed(plain, kind, kind.__name__.lower(), load(data))
    except InvalidInput:
        raise
    except Exception:  # whatever it was that the bytes led to
        raise InvalidInput("message", f"{len(data)} bytes", "is damaged or is no message of ours") from None


def _heading(kind: Any) -> dict[str, Any]:
    """Words before the fields, which no field has: what kind this is, and its format, where it does
    not say its protocol."""
    is_message = any(field.name == "protocol" for field in dataclasses.fields(kind))
    return {"_kind": kind.__name__} | ({} if is_message else {"_format": FORMAT})


def _header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _header(data: bytes, largest: int) -> Any:
    """The message itself, without its arrays."""
    length = _header_bytes(data)
    if length > min(largest, len(data) - 8):
        raise InvalidInput("message", f"{len(data)} bytes", "is cut short or is no message of ours")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"][MESSAGE])


def protocol_of(data: bytes, job: Job) -> int | None:
    """Which version a message speaks, if it is one of any; the field is in all of them."""
    try:
        found = _header(data, largest_header(job))["protocol"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if type(found) is int else None


def _plain(value: object, name: str, tensors: dict[str, Tensor], seen: dict[int, str] | None) -> Any:
    if isinstance(value, Tensor):
        if seen is not None and id(value) in seen:
            return seen[id(value)]
        tensors[name] = value.detach().contiguous().clone()  # the format wants no two that share memory
        if seen is not None:
            seen[id(value)] = name
        return name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {key: _plain(each, f"{name}.{key}", tensors, seen) for key, each in parts.items()}
    if isinstance(value, dict):
        return {key: _plain(each, f"{name}.{key}", tensors, seen) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each, f"{name}.{i}", tensors, seen) for i, each in enumerate(value)]
    assert value is None or isinstance(value, bool | int | float | str), f"{name} holds a {type(value).__name__}"
    return value


def _typed(plain: Any, kind: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The value as the kind it is declared to be."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if plain is None:
            return None
        (kind,) = [each for each in of if each is not type(None)]
        return _typed(plain, kind, where, tensors)
    if kind is Tensor:
        if not isinstance(plain, str) or plain not in tensors:
            raise InvalidInput(where, plain, "must be one of the arrays that came along")
        return tensors[plain]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        needed = [each.name for each in dataclasses.fields(kind) if _has_no_default(each)]
        if not isinstance(plain, dict) or not plain.keys() >= set(needed):
            raise InvalidInput(
                where, sorted(plain) if isinstance(plain, dict) else plain, f"must have {', '.join(needed)}"
            )
        make: Any = kind
        known = {name: hints[name] for name in hints if name in plain}
        return make(**{name: _typed(plain[name], hint, f"{where}.{name}", tensors) for name, hint in known.items()})
    if origin is dict:
        if not isinstance(plain, dict):
            raise InvalidInput(where, plain, "must be a table")
        return {key: _typed(each, of[1], f"{where}.{key}", tensors) for key, each in plain.items()}
    if origin is tuple:
        if not isinstance(plain, list):
            raise InvalidInput(where, plain, "must be a list")
        return tuple(_typed(each, of[0], f"{where}[{i}]", tensors) for i, each in enumerate(plain))
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        plain = float(plain)
    if type(plain) is not kind or (kind is float and not math.isfinite(plain)):
        raise InvalidInput(where, plain, f"must be a {'finite ' if kind is float else ''}{kind.__name__}")
    return plain


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# -- what the arrays must be -----------------------------------------------------------------------


def receive_bundle(data: bytes, job: Job) -> Bundle:
    """A parent's message; its arrays must fit the model and be finite, since nothing good can come
    of others. Only buffers need not be: an attention mask among them has -inf."""
    bundle = decode(data, Bundle, largest_header(job))
    parcels = []
    if bundle.answer is not None:
        parcels.append(("answer", bundle.answer.parcel))
    if bundle.begin is not None and bundle.begin.parcel is not None:
        parcels.append(("begin", bundle.begin.parcel))
    for where, parcel in parcels:
        _check_parcel(where, parcel, job)
    if bundle.begin is not None and bundle.begin.above is not None:
        check_row("begin.above", bundle.begin.above, job.parameters, job.dtype)
        check_finite("begin.above", bundle.begin.above)
    return bundle


def receive_reply(data: bytes, job: Job, names: frozenset[str]) -> Reply:
    """A child's message; that its arrays are finite is for the parent to see, who says who is left
    out."""
    spoken = protocol_of(data, job)
    if spoken not in (None, PROTOCOL):
        # all that is read of another version's: who it is from, so that it can be told who is left
        # out
        told = _header(data, largest_header(job))
        return Reply(str(told.get("job")), str(told.get("site")), 0, made_of={"protocol": str(spoken)})
    reply = decode(data, Reply, largest_header(job))
    if reply.samples < 0:
        raise InvalidInput("reply.samples", reply.samples, "must be a number of samples")
    report = reply.report
    if report is None or report.buffers is None:
        return reply
    if report.rate < 0:
        raise InvalidInput("report.rate", report.rate, "must not be negative")
    check_arrays(report, names, job)
    return reply


def _check_parcel(where: str, parcel: Parcel, job: Job) -> None:
    arrays = {"model": parcel.model, **{f"note.{name}": rows for name, rows in parcel.note.items()}}
    for name, rows in arrays.items():
        check_row(f"{where}.{name}", rows, job.parameters, job.dtype)
        check_finite(f"{where}.{name}", rows)
    check_row(f"{where}.buffers", parcel.buffers, job.carried, job.dtype)
