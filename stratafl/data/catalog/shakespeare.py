"""Shakespeare's roles as sequences of 80 characters with the next character as target.

Sequences start at every position, so that neighbours share 79 characters and a random split would
put almost every test character into training. Each role is therefore split in time, with a gap of
one sequence length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog.archive import FileTree
from stratafl.data.catalog.storage import DatasetArrays

LENGTH = 80
TRAIN_PER_ROLE = 1_500
TEST_PER_ROLE = 300
# LEAF's alphabet, in LEAF's order: a character's code is its place here.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_OUTSIDE = 255
_FOREIGN_LIMIT = 0.01
_CODES = np.full(128, _OUTSIDE, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


class Role(NamedTuple):
    """Sequences (N, 80) of a role in time order, and the next characters.

    `test` holds the test sequences, if the source has them separately.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    test: tuple[np.ndarray, np.ndarray] | None = None


def encode(text: str) -> np.ndarray:
    """Codes of a text; 255 for a character outside the alphabet."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return np.where(points < 128, _CODES[np.minimum(points, 127)], _OUTSIDE).astype(np.uint8)


def windows(name: str, text: str) -> Role:
    """Sequences of a text, as a view; the text must be longer than one sequence."""
    view = np.lib.stride_tricks.sliding_window_view(encode(text), LENGTH + 1)
    return Role(name, view[:, :LENGTH], view[:, LENGTH])


def from_pairs(name: str, xs: list[str], ys: list[str]) -> Role:
    """Build a role from sequences and next characters, as LEAF writes them."""
    if len(xs) != len(ys) or not xs:
        raise InvalidInput("role", name, f"as many x as y expected, found {len(xs)}, {len(ys)}")
    # A table may hold gaps or numbers where text belongs.
    for texts, length in ((xs, LENGTH), (ys, 1)):
        odd = [item for item in texts if not isinstance(item, str) or len(item) != length]
        if odd:
            raise InvalidInput("role", name, f"text of {length} characters expected, found {odd[0]!r}")
    return Role(name, encode("".join(xs)).reshape(-1, LENGTH), encode("".join(ys)))


def in_time_order(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether each sequence starts one character after the one before.

    Only then does a gap separate training from test. Early versions of LEAF start anew at each line
    of a role, after spaces only.
    """
    follows = (x[1:, :-1] == x[:-1, 1:]).all(1) & (x[1:, -1] == y[:-1])
    return bool((follows | (x[1:] == ALPHABET.index(" ")).all(1)).all())


def split_roles(roles: Iterable[Role]) -> DatasetArrays:
    """Keep roles that are long enough: 1,500 sequences of each train, up to 300 later ones test."""
    kept: list[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    seen = 0
    is_split = False
    for role in roles:
        seen += 1
        is_split = role.test is not None
        start = TRAIN_PER_ROLE + LENGTH
        later_x, later_y = role.test or (role.x[start:], role.y[start:])
        for x, y in ((role.x, role.y), (later_x, later_y)):
            if not in_time_order(x, y):
                advice = "; LEAF's all_data can be split in time" if is_split else ""
                raise InvalidInput("role", role.name, f"sequences in time order expected, found a break{advice}")
        if len(role.y) >= TRAIN_PER_ROLE and len(later_y):
            train, test = slice(TRAIN_PER_ROLE), slice(TEST_PER_ROLE)
            kept.append((role.name, role.x[train], role.y[train], later_x[test], later_y[test]))
    if not kept:
        raise InvalidInput(
            "source",
            f"{seen} roles",
            f"at least one role with {TRAIN_PER_ROLE:,} sequences to train on and some to test on",
        )
    names, x_train, y_train, x_test, y_test = zip(*kept, strict=True)
    arrays = {
        "x_train": np.concatenate(x_train),
        "y_train": np.concatenate(y_train),
        "x_test": np.concatenate(x_test),
        "y_test": np.concatenate(y_test),
    }
    characters = sum(array.size for array in arrays.values())
    foreign = sum(int((array == _OUTSIDE).sum()) for array in arrays.values())
    if foreign > _FOREIGN_LIMIT * characters:
        raise InvalidInput("source", f"{foreign:,} of {characters:,} characters", "text in LEAF's alphabet expected")
    for array in arrays.values():
        array[array == _OUTSIDE] = ALPHABET.index(" ")
    owner = np.arange(len(names), dtype=np.int32)
    return DatasetArrays(
        kind="sequence",
        x_train=arrays["x_train"],
        y_train=arrays["y_train"].astype(np.int64),
        x_test=arrays["x_test"],
        y_test=arrays["y_test"].astype(np.int64),
        classes=tuple(ALPHABET),
        owner_train=np.repeat(owner, [len(y) for y in y_train]),
        owner_test=np.repeat(owner, [len(y) for y in y_test]),
        owners=names,
        notes=_notes(seen, len(names), foreign, is_split),
    )


def _notes(seen: int, kept: int, foreign: int, is_split: bool) -> tuple[str, ...]:
    split = (
        "train and test as the files give them"
        if is_split
        else f"split in time, {LENGTH} sequences left out between so that no text is shared"
    )
    notes = [
        f"{kept} of {seen} speaking roles: {TRAIN_PER_ROLE:,} sequences to train on and some more",
        f"per role the first {TRAIN_PER_ROLE:,} train, up to {TEST_PER_ROLE} later test; {split}",
    ]
    if foreign:
        notes.append(f"{foreign:,} characters of the sequences, outside LEAF's alphabet, became spaces")
    return tuple(notes)


def _document(files: FileTree, name: str) -> dict[str, Any]:
    try:
        document = json.loads(files.read(name))
    except ValueError as error:
        raise files.corrupt(name, "a JSON document", error) from error
    if not isinstance(document, dict):
        raise files.corrupt(name, "a JSON object", type(document).__name__)
    return document


def fits_roles(files: FileTree) -> bool:
    """Whether one JSON document maps each role to its whole text."""
    return len(files.matching(r"shakespeare_roles\.json(?:\.xz|\.gz)?")) == 1


def read_roles(files: FileTree) -> DatasetArrays:
    """Read a document {"roles": {name: text}}."""
    name = files.find_one(r"shakespeare_roles\.json(?:\.xz|\.gz)?", "roles")
    roles = _document(files, name).get("roles")
    if not isinstance(roles, dict) or not all(isinstance(text, str) for text in roles.values()):
        raise files.corrupt(name, '"roles" mapping each role to its text', type(roles).__name__)
    return split_roles(windows(role, text) for role, text in sorted(roles.items()) if len(text) > LENGTH)


def _leaf_parts(files: FileTree) -> dict[str, list[str]]:
    """LEAF's documents by their part, told from the folder or else from the name."""
    names = files.matching(r".*\.json")
    return {
        part: [name for name in names if f"/{name}".rpartition("/")[0].endswith(f"/{part}")] or files.matching(pattern)
        for part, pattern in (
            ("all_data", r"all_data(?!.*_(?:train|test)_).*\.json"),
            ("train", r".*_train_\d+\.json"),
            ("test", r".*_test_\d+\.json"),
        )
    }


def fits_leaf(files: FileTree) -> bool:
    """Whether LEAF's all_data, or its train and test documents, are there."""
    parts = _leaf_parts(files)
    return bool(parts["all_data"] or (parts["train"] and parts["test"]))


def read_leaf(files: FileTree) -> DatasetArrays:
    """Read LEAF's documents, with LEAF's own split if it has one, else ours."""
    parts = _leaf_parts(files)
    if parts["train"] and parts["test"]:
        train, test = (dict(_leaf_users(files, parts[part])) for part in ("train", "test"))
        return split_roles(
            train[name]._replace(test=(test[name].x, test[name].y)) for name in sorted(train.keys() & test.keys())
        )
    return split_roles(role for _, role in sorted(_leaf_users(files, parts["all_data"])))


def _leaf_users(files: FileTree, names: list[str]) -> Iterator[tuple[str, Role]]:
    seen: set[str] = set()
    for name in names:
        document = _document(files, name)
        users, data = document.get("users"), document.get("user_data")
        if not isinstance(users, list) or not isinstance(data, dict):
            raise files.corrupt(name, "users and user_data, as LEAF writes them", sorted(document))
        for user in users:
            pairs = data.get(user)
            if not isinstance(pairs, dict) or not {"x", "y"} <= pairs.keys():
                raise files.corrupt(name, f"x and y of {user!r}", "no such entry")
            if not all(isinstance(pairs[field], list) for field in ("x", "y")):
                raise files.corrupt(name, f"x and y of {user!r} as lists", "something else")
            if user in seen:
                raise files.corrupt(name, f"{user!r} once", "a second time")
            seen.add(user)
            yield user, from_pairs(user, pairs["x"], pairs["y"])
