"""Stored data sets: round trip, detection of damage, and interrupted writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog import storage
from stratafl.data.catalog.storage import DatasetArrays, StoredDataset, add_statistics, read, write


def _images(seed: int = 0, shape: tuple[int, ...] = (6, 5, 3)) -> StoredDataset:
    rng = np.random.default_rng(seed)
    samples = DatasetArrays(
        kind="image",
        x_train=rng.integers(0, 256, (20, *shape), np.uint8),
        y_train=rng.integers(0, 3, 20),
        x_test=rng.integers(0, 256, (8, *shape), np.uint8),
        y_test=rng.integers(0, 3, 8),
        classes=("a", "b", "ü"),
        notes=("made up",),
    )
    return add_statistics("cifar10", "a form", samples)


def _sequences() -> StoredDataset:
    rng = np.random.default_rng(1)
    samples = DatasetArrays(
        kind="sequence",
        x_train=rng.integers(0, 9, (6, 4), np.uint8),
        y_train=rng.integers(0, 9, 6),
        x_test=rng.integers(0, 9, (2, 4), np.uint8),
        y_test=rng.integers(0, 9, 2),
        classes=tuple("abcdefghi"),
        owner_train=np.repeat(np.arange(2, dtype=np.int32), 3),
        owner_test=np.arange(2, dtype=np.int32),
        owners=("HAMLET", "OPHELIA"),
    )
    return add_statistics("shakespeare", "a form", samples)


@pytest.mark.parametrize("dataset", [_images(), _images(shape=(7, 7)), _sequences()])
def test_what_is_written_comes_back(tmp_path: Path, dataset: StoredDataset) -> None:
    write(dataset, "somewhere", tmp_path)
    back = read(dataset.name, tmp_path, verify=True)
    for field, value in vars(dataset).items():
        if isinstance(value, np.ndarray):
            assert isinstance(getattr(back, field), np.memmap)
            assert getattr(back, field).dtype == value.dtype
            np.testing.assert_array_equal(getattr(back, field), value)
        else:
            assert getattr(back, field) == value
    meta = storage.read_meta(dataset.name, tmp_path)
    assert meta["counts"] == {"train": len(dataset.y_train), "test": len(dataset.y_test)}
    assert meta["source"] == {"form": "a form", "where": "somewhere"}


def test_statistics_are_those_of_the_training_images() -> None:
    dataset = _images()
    scaled = dataset.x_train / 255.0
    np.testing.assert_allclose(dataset.mean, scaled.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(dataset.std, scaled.std((0, 1, 2)), rtol=1e-12)


def test_tensors_are_writable_copies(tmp_path: Path) -> None:
    write(_images(), "", tmp_path)
    tensors = read("cifar10", tmp_path).tensors()
    assert tensors.x_train.dtype == torch.uint8 and tensors.y_train.dtype == torch.int64
    tensors.x_train.zero_()
    np.testing.assert_array_equal(read("cifar10", tmp_path).x_train, _images().x_train)


def test_the_checksum_is_the_one_of_standard_tools(tmp_path: Path) -> None:
    folder = write(_images(), "", tmp_path)
    command = f"cd {folder} && LC_ALL=C sha256sum *.npy | sha256sum"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[0] == storage.read_meta("cifar10", tmp_path)["checksum"]


def test_a_changed_byte_is_seen_when_verified(tmp_path: Path) -> None:
    path = write(_images(), "", tmp_path) / "x_train.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    read("cifar10", tmp_path)
    with pytest.raises(InvalidInput, match=r"x_train\.npy: expected SHA-256 .* found .* prepare"):
        read("cifar10", tmp_path, verify=True)


@pytest.mark.parametrize("change", ["shorter", "longer", "missing", "retyped", "pickled"])
def test_a_file_of_another_size_or_type_is_refused_at_once(tmp_path: Path, change: str) -> None:
    path = write(_images(), "", tmp_path) / "x_train.npy"
    data = path.read_bytes()
    if change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "longer":
        path.write_bytes(data + b"\0")
    elif change == "missing":
        path.unlink()
    elif change == "retyped":
        path.write_bytes(data.replace(b"|u1", b"|i1"))
    else:
        path.write_bytes(data.replace(b"|u1", b"|O "))
    with pytest.raises(InvalidInput, match=r"x_train\.npy: expected 1,928 bytes of \|u1 \(20, 6, 5, 3\), found"):
        read("cifar10", tmp_path)


def test_meta_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = write(_images(), "", tmp_path) / "meta.json"
    good = json.loads(path.read_text())
    for text, complaint in [
        ("{", "readable meta.json"),
        ("[]", "format 1"),
        (json.dumps(good | {"format": 2}), "expected format 1 of cifar10, found format 2"),
        (json.dumps(good | {"name": "cifar100"}), "found format 1 of cifar100"),
        (json.dumps({k: v for k, v in good.items() if k != "classes"}), "all fields"),
        (json.dumps(good | {"classes": ["a"]}), r"labels in 0\.\.0, found"),
    ]:
        path.write_text(text)
        with pytest.raises(InvalidInput, match=complaint):
            read("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("y_train", np.zeros(19, np.int64), "20 train labels"),
        ("y_test", np.full(8, 3), r"test labels in 0\.\.2, found 3\.\.3"),
        ("x_train", np.zeros((20, 6, 5, 3), np.float32), "train inputs"),
        ("x_test", np.zeros((8, 6, 6, 3), np.uint8), r"test inputs shaped \(6, 5, 3\)"),
        ("owners", ("one",), "an owner per sample"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(field: str, value: object, complaint: str) -> None:
    fields = {name: getattr(_images(), name) for name in DatasetArrays.__dataclass_fields__}
    with pytest.raises(InvalidInput, match=complaint):
        add_statistics("cifar10", "a form", DatasetArrays(**fields | {field: value}))


@pytest.mark.parametrize("before", [False, True])
def test_a_failure_at_any_step_leaves_the_old_set_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """A failure at any file-system step must not leave a mixture of two data sets."""
    old, new = _images(seed=1), _images(seed=2)
    steps_done = 0
    for failing in range(100):
        folder = tmp_path / str(failing)
        if before:
            write(old, "", folder)
        steps = 0

        def step(real, *arguments, fail_at=failing):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            if steps - 1 == fail_at:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            real_sync, real_rename, real_save = os.fsync, Path.rename, np.save
            patch.setattr(os, "fsync", lambda d, r=real_sync: step(r, d))
            patch.setattr(Path, "rename", lambda a, b, r=real_rename: step(r, a, b))
            patch.setattr(np, "save", lambda f, a, r=real_save, **k: step(r, f, a))
            try:
                write(new, "", folder)
            except KeyboardInterrupt:
                interrupted = True
            else:
                interrupted = False
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        if (folder / "cifar10").exists():
            images = read("cifar10", folder, verify=True).x_train
            expected = [new.x_train] + [old.x_train] * before
            assert any(np.array_equal(images, x) for x in expected)
        else:
            assert interrupted and not before
        if not interrupted:
            steps_done = failing
            break
    assert steps_done > 8


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
import numpy as np
from stratafl.data.catalog.storage import DatasetArrays, add_statistics, write
save = np.save
def stop(file, array, **options):
    save(file, array, **options)
    if array.ndim == 1:
        os.kill(os.getpid(), signal.SIGKILL)
np.save = stop
x, y = np.zeros((4, 2, 2), np.uint8), np.arange(4) % 2
samples = DatasetArrays(kind="image", x_train=x, y_train=y, x_test=x, y_test=y, classes=("a", "b"))
write(add_statistics("cifar10", "a form", samples), "", Path(sys.argv[1]))
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert result.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".cifar10.") and left.name.endswith(".partial")
    with pytest.raises(InvalidInput, match="not prepared"):
        read("cifar10", tmp_path)
    write(_images(), "", tmp_path)
    assert left.exists()  # young: it could belong to a run still going
    old = time.time() - storage.STALE_SECONDS - 1
    os.utime(left, (old, old))
    write(_images(), "", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"data root = .*cifar10 cannot be written there"):
        write(_images(), "", tmp_path / "file")
