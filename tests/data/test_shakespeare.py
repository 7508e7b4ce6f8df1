"""Shakespeare: sequences, the split in time, and the two formats of its text."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog import shakespeare
from stratafl.data.catalog.prepare import load, prepare
from stratafl.data.catalog.shakespeare import ALPHABET, LENGTH, TEST_PER_ROLE, TRAIN_PER_ROLE

ENOUGH = TRAIN_PER_ROLE + LENGTH + TEST_PER_ROLE


def _text(length: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list(ALPHABET), length))


def _roles() -> dict[str, str]:
    return {
        "hamlet__HAMLET": _text(ENOUGH + 1_000, 0),
        "hamlet__OPHELIA": _text(LENGTH + ENOUGH - 200, 1),
        "hamlet__OSRIC": _text(TRAIN_PER_ROLE, 2),
        "hamlet__GHOST": "Mark me.",
    }


def _pairs(spoken: str) -> dict[str, list[str]]:
    count = len(spoken) - LENGTH
    return {
        "x": [spoken[i : i + LENGTH] for i in range(count)],
        "y": [spoken[i + LENGTH] for i in range(count)],
    }


def _leaf(users: dict[str, dict[str, list[str]]]) -> str:
    counts = [len(pairs["y"]) for pairs in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": users})


def _write_roles(folder: Path) -> Path:
    path = folder / "shakespeare_roles.json.xz"
    path.write_bytes(lzma.compress(json.dumps({"titles": {}, "roles": _roles()}).encode()))
    return path


def _assert_split_in_time(owner: int, spoken: str) -> None:
    dataset = load("shakespeare", verify=True)
    assert dataset.owner_train is not None and dataset.owner_test is not None
    starts = {}
    for part, owners in (("train", dataset.owner_train), ("test", dataset.owner_test)):
        x = getattr(dataset, f"x_{part}")[owners == owner]
        y = getattr(dataset, f"y_{part}")[owners == owner]
        decoded = ["".join(ALPHABET[c] for c in row) for row in x]
        starts[part] = [spoken.index(sequence) for sequence in decoded]
        assert [spoken[s + LENGTH] for s in starts[part]] == [ALPHABET[c] for c in y]
    assert starts["train"] == list(range(TRAIN_PER_ROLE))
    # The last training sequence and its next character end just before the first test sequence.
    assert starts["test"][0] == TRAIN_PER_ROLE + LENGTH == starts["train"][-1] + LENGTH + 1
    assert starts["test"] == list(range(starts["test"][0], starts["test"][-1] + 1))


def test_roles_are_split_in_time_without_shared_text(root: Path, tmp_path: Path) -> None:
    prepared = prepare("shakespeare", _write_roles(tmp_path))
    assert (prepared.form, prepared.train, prepared.test) == ("texts by role", 3_000, 400)
    dataset = load("shakespeare")
    assert dataset.owners == ("hamlet__HAMLET", "hamlet__OPHELIA")
    assert dataset.owner_test is not None
    assert np.bincount(dataset.owner_test).tolist() == [TEST_PER_ROLE, 100]
    assert dataset.classes == tuple(ALPHABET) and len(set(ALPHABET)) == 80
    for owner, name in enumerate(dataset.owners):
        _assert_split_in_time(owner, _roles()[name])


@pytest.mark.parametrize("place", ["all_data/all_data.json", "all_data.json"])
def test_leaf_is_split_as_its_text_would_be(root: Path, tmp_path: Path, place: str) -> None:
    prepare("shakespeare", _write_roles(tmp_path))
    expected = load("shakespeare")
    path = tmp_path / "leaf" / place
    path.parent.mkdir(parents=True)
    spoken = {name: shakespeare for name, shakespeare in _roles().items() if len(shakespeare) > LENGTH}
    path.write_text(_leaf({name: _pairs(shakespeare) for name, shakespeare in spoken.items()}))
    prepared = prepare("shakespeare", tmp_path / "leaf")
    assert prepared.form == "LEAF's JSON"
    for field in ("x_train", "y_train", "x_test", "y_test", "owner_train", "owner_test"):
        np.testing.assert_array_equal(getattr(load("shakespeare"), field), getattr(expected, field), err_msg=field)


def test_a_split_made_by_leaf_is_kept(root: Path, tmp_path: Path) -> None:
    spoken = _text(3_000, 0)
    pairs = _pairs(spoken)
    first = {k: v[:2_000] for k, v in pairs.items()}
    last = {k: v[2_079:] for k, v in pairs.items()}
    for part, users in (("train", {"A": first, "B": first}), ("test", {"A": last})):
        (tmp_path / part).mkdir()
        (tmp_path / part / f"all_data_niid_0_keep_0_{part}_9.json").write_text(_leaf(users))
    prepared = prepare("shakespeare", tmp_path)
    assert (prepared.train, prepared.test, prepared.owners) == (TRAIN_PER_ROLE, TEST_PER_ROLE, 1)
    assert any("as the files give them" in note for note in prepared.notes)
    decoded = "".join(ALPHABET[code] for code in load("shakespeare").x_test[0])
    assert decoded == spoken[2_079 : 2_079 + LENGTH]


def test_lines_that_start_anew_are_in_order(root: Path, tmp_path: Path) -> None:
    """Early versions of LEAF put 80 spaces before each line, and no sequence crosses its end."""
    lines = [_text(60, seed).replace("\n", "!") + "\n" for seed in range(40)]
    pairs = [_pairs(" " * LENGTH + line) for line in lines]
    user = {key: [item for pair in pairs for item in pair[key]] for key in ("x", "y")}
    (tmp_path / "all_data.json").write_text(_leaf({"A": user}))
    prepared = prepare("shakespeare", tmp_path)
    assert (prepared.train, prepared.test) == (TRAIN_PER_ROLE, TEST_PER_ROLE)
    decoded = "".join(ALPHABET[code] for code in load("shakespeare").x_test[0])
    assert decoded == user["x"][TRAIN_PER_ROLE + LENGTH]


def test_a_split_at_random_is_refused(root: Path, tmp_path: Path) -> None:
    pairs = _pairs(_text(4_000, 0))
    chosen = np.random.default_rng(0).random(len(pairs["y"])) < 0.8
    for part, mask in (("train", chosen), ("test", ~chosen)):
        picked = {key: [items[i] for i in np.flatnonzero(mask)] for key, items in pairs.items()}
        (tmp_path / f"all_data_niid_2_keep_0_{part}_8.json").write_text(_leaf({"A": picked}))
    with pytest.raises(InvalidInput, match=r"found a break; LEAF's all_data can be split in time"):
        prepare("shakespeare", tmp_path)


def _spoiled(change: str) -> dict[str, Any]:
    pairs = _pairs(_text(ENOUGH + LENGTH, 0))
    user: dict[str, Any] = dict(pairs)
    if change == "order":
        user["x"][5], user["x"][9] = user["x"][9], user["x"][5]
    elif change == "short x":
        user["x"][3] = user["x"][3][:-1]
    elif change == "uneven":
        user["y"] = user["y"][:-1]
    elif change == "numbers":
        user["x"] = list(range(len(user["y"])))
    elif change == "text":
        user["x"] = "".join(user["x"])
    elif change == "foreign":
        return {"A": _pairs("ÿ" * (ENOUGH + LENGTH))}
    elif change == "no y":
        del user["y"]
    elif change == "few":
        return {"A": _pairs(_text(TRAIN_PER_ROLE, 0))}
    return {"A": user}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("order", "sequences in time order expected, found a break"),
        ("short x", "text of 80 characters expected, found "),
        ("uneven", "as many x as y expected, found 1880, 1879"),
        ("numbers", "text of 80 characters expected, found 0"),
        ("text", "x and y of 'A' as lists"),
        ("foreign", "text in LEAF's alphabet expected"),
        ("no y", "expected x and y of 'A'"),
        ("few", "at least one role with 1,500 sequences"),
    ],
)
def test_what_is_not_leafs_is_refused(root: Path, tmp_path: Path, change: str, complaint: str) -> None:
    users = _spoiled(change)
    (tmp_path / "all_data.json").write_text(json.dumps({"users": ["A"], "user_data": users}))
    with pytest.raises(InvalidInput, match=complaint):
        prepare("shakespeare", tmp_path / "all_data.json")
    assert not root.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xfd7zXZ\0 cut", "a whole compressed file"),
        (lzma.compress(b'{"roles": {'), "a JSON document"),
        (lzma.compress(b"[1]"), "a JSON object"),
        (lzma.compress(b'{"roles": [1]}'), '"roles" mapping each role to its text'),
    ],
)
def test_a_damaged_roles_file_is_refused(root: Path, tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "shakespeare_roles.json.xz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=complaint):
        prepare("shakespeare", path)


def test_a_few_foreign_characters_become_spaces_and_are_counted() -> None:
    spoken = "é" + _text(ENOUGH + LENGTH, 0)[1:]
    samples = shakespeare.split_roles([shakespeare.windows("A", spoken)])
    assert ALPHABET[samples.x_train[0, 0]] == " "
    assert any(note.startswith("1 characters") for note in samples.notes)


@given(st.text(st.sampled_from(ALPHABET + "é\u2014~\0"), min_size=1))
def test_codes_are_places_in_the_alphabet(spoken: str) -> None:
    places = [ALPHABET.find(character) for character in spoken]
    assert shakespeare.encode(spoken).tolist() == [255 if place < 0 else place for place in places]
