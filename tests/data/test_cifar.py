"""CIFAR: every form of the release gives the same images; damaged files raise InputError."""

import gzip
import io
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch

from probmask.data import load_data
from probmask.errors import InputError
from reference.memory_limit import memory_limit

COUNTS = {"train": 50_000, "test": 10_000}
FEW = {"train": 10, "test": 2}
FIRST = {"train": 0, "test": 100_000}  # number of the first image
CLASSES = {"cifar10": 10, "cifar100": 100}
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}
ARCHIVES = {
    ("cifar10", "binary"): "cifar-10-binary.tar.gz",
    ("cifar10", "python"): "cifar-10-python.tar.gz",
    ("cifar100", "binary"): "cifar-100-binary.tar.gz",
    ("cifar100", "python"): "cifar-100-python.tar.gz",
}
RELEASES = list(FOLDERS)
FORMS = ["folder in a directory", "folder", "archive in a directory", "archive"]


def files_of(name, kind):
    """The files of a release: name, part, and number of files of that part."""
    end = ".bin" if kind == "binary" else ""
    if name == "cifar100":
        return [(f"train{end}", "train", 1), (f"test{end}", "test", 1)]
    numbered = [(f"data_batch_{number}{end}", "train", 5) for number in range(1, 6)]
    return [*numbered, (f"test_batch{end}", "test", 1)]


def pixels(count, first=0):
    """Images whose pixels encode image, plane, row and column, modulo 256."""
    plane, row, column = np.ogrid[:3, :32, :32]
    image = (85 * plane + 7 * row + column).astype(np.uint8)
    return (31 * np.arange(first, first + count)).astype(np.uint8)[:, None, None, None] + image


def labels(name, count, first=0):
    """The label of each image, and the coarse label that only CIFAR-100 has."""
    numbers = np.arange(first, first + count)
    return (7 * numbers + numbers // 1000) % CLASSES[name], numbers % 20


def as_binary(name, images, fine, coarse):
    """Records of one or two labels and the planes, red first, in row-major order."""
    columns = [fine] if name == "cifar10" else [coarse, fine]
    return np.column_stack(
        [*(column.astype(np.uint8) for column in columns), images.reshape(len(images), -1)]
    ).tobytes()


def as_pickle(name, images, fine, coarse):
    table = {b"data": images.reshape(len(images), 3072), b"batch_label": b"batch"}
    if name == "cifar10":
        return pickle.dumps(table | {b"labels": fine.tolist()}, protocol=4)
    table |= {b"coarse_labels": coarse.tolist(), b"fine_labels": fine.tolist()}
    return pickle.dumps(table, protocol=4)


def contents(name, kind, counts):
    """The files of a release with the given number of images, as bytes."""
    write = as_binary if kind == "binary" else as_pickle
    files, done = {}, dict(FIRST)
    for file, part, shares in files_of(name, kind):
        count, first = counts[part] // shares, done[part]
        files[file] = write(name, pixels(count, first), *labels(name, count, first))
        done[part] += count
    return files


def write_folder(folder, files):
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)


def write_archive(path, folder, files, *, prefix=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        directory = tarfile.TarInfo(f"{prefix}{folder}")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for file, content in {"readme.html": b"<html>", **files}.items():
            info = tarfile.TarInfo(f"{prefix}{folder}/{file}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def place(directory, release, form):
    """The value of --data-dir for one form of a release in the directory."""
    inside = {"folder": FOLDERS, "archive": ARCHIVES}
    return directory / inside[form][release] if form in inside else directory


def write(directory, release, form, files):
    """Write a release to the directory in one form; return the value for --data-dir."""
    if form.startswith("folder"):
        write_folder(directory / FOLDERS[release], files)
    else:
        write_archive(directory / ARCHIVES[release], FOLDERS[release], files)
    return place(directory, release, form)


def refused(name, path):
    """Return the message of the InputError, which is one line."""
    with pytest.raises(InputError) as caught:
        load_data(name, path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def few(count, of):
    return (
        f"the content is damaged (expected {of:,}×3×32×32 pixels and {of:,} labels, found "
        f"{count}×3×32×32 pixels and {count} labels); download it again."
    )


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        ("cifar10", "binary", "folder in a directory"),
        ("cifar10", "binary", "archive"),
        ("cifar10", "python", "folder"),
        ("cifar10", "python", "archive in a directory"),
        ("cifar100", "binary", "folder"),
        ("cifar100", "binary", "archive in a directory"),
        ("cifar100", "python", "folder in a directory"),
        ("cifar100", "python", "archive"),
    ],
)
def test_images_and_labels_are_exact(tmp_path, name, kind, form):
    path = write(tmp_path, (name, kind), form, contents(name, kind, COUNTS))
    data = load_data(name, path)
    shutil.rmtree(tmp_path)  # hundreds of megabytes
    assert (data.name, data.classes, data.image_shape) == (name, CLASSES[name], (3, 32, 32))
    assert (data.train_size, data.val_size, data.test_size) == (50_000, 0, 10_000)
    for part, first in FIRST.items():
        ours = data._parts[part]
        assert torch.equal(ours.pixels, torch.from_numpy(pixels(COUNTS[part], first)))
        assert torch.equal(ours.labels, torch.from_numpy(labels(name, COUNTS[part], first)[0]))
    batch = next(data.testing(batch_size=50))
    mean, std = np.array([0.491, 0.482, 0.447]), np.array([0.247, 0.243, 0.262])
    exact = (pixels(50, FIRST["test"]).transpose(0, 2, 3, 1) / 255 - mean) / std
    np.testing.assert_allclose(batch.inputs.numpy(), exact.transpose(0, 3, 1, 2), atol=1e-6)


def test_a_record_is_a_label_and_three_planes():
    """This file writes the layout that the page of the release describes."""
    images = np.zeros((2, 3, 32, 32), np.uint8)
    images[1, 0, 0, 1], images[1, 1, 2, 0], images[1, 2, 31, 31] = 10, 11, 12
    ten = as_binary("cifar10", images, np.array([0, 3]), np.array([0, 0]))
    assert len(ten) == 2 * 3073
    assert (ten[3073], ten[3075], ten[3074 + 1024 + 64], ten[-1]) == (3, 10, 11, 12)
    hundred = as_binary("cifar100", images, np.array([0, 99]), np.array([0, 19]))
    assert len(hundred) == 2 * 3074
    assert (hundred[3074], hundred[3075], hundred[3077]) == (19, 99, 10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_found_in_every_form(tmp_path, release, form):
    # With a few images only: the error shows that they are read, and from where.
    name, kind = release
    path = write(tmp_path, release, form, contents(name, kind, FEW))
    found = tmp_path / (FOLDERS if form.startswith("folder") else ARCHIVES)[release]
    assert refused(name, path) == f"{found}: {few(10, of=50_000)}"
    assert refused(name, str(path)) == f"{found}: {few(10, of=50_000)}"


@pytest.mark.parametrize("form", FORMS[::2])
@pytest.mark.parametrize("name", CLASSES)
def test_the_binary_release_is_preferred(tmp_path, name, form):
    write(tmp_path, (name, "python"), FORMS[0], contents(name, "python", FEW))
    write(tmp_path, (name, "python"), FORMS[2], contents(name, "python", FEW))
    write(tmp_path, (name, "binary"), form, contents(name, "binary", FEW))
    found = tmp_path / (FOLDERS if form.startswith("folder") else ARCHIVES)[name, "binary"]
    assert refused(name, tmp_path) == f"{found}: {few(10, of=50_000)}"


def test_unpacked_files_are_preferred_to_the_archive(tmp_path):
    for form in FORMS[::2]:
        write(tmp_path, ("cifar10", "binary"), form, contents("cifar10", "binary", FEW))
    found = tmp_path / "cifar-10-batches-bin"
    assert refused("cifar10", tmp_path) == f"{found}: {few(10, of=50_000)}"


def test_names_in_an_archive_may_start_with_a_dot(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    files = contents("cifar100", "binary", FEW)
    write_archive(path, "cifar-100-binary", files, prefix="./")
    assert refused("cifar100", path) == f"{path}: {few(10, of=50_000)}"


@pytest.mark.parametrize("text", [bytes, str])
def test_keys_of_a_pickle_may_be_bytes_or_str(tmp_path, text):
    keys = ["data", "fine_labels"] if text is str else [b"data", b"fine_labels"]
    table = dict(zip(keys, [pixels(4).reshape(4, 3072), [1, 2, 3, 99]], strict=True))
    files = dict.fromkeys(["train", "test"], pickle.dumps(table, protocol=2))
    write_folder(tmp_path / "cifar-100-python", files)
    found = tmp_path / "cifar-100-python"
    assert refused("cifar100", tmp_path) == f"{found}: {few(4, of=50_000)}"


@pytest.mark.parametrize(
    ("name", "size", "folders"),
    [
        (
            "cifar10",
            170,
            "cifar-10-batches-bin/data_batch_1.bin or cifar-10-batches-py/data_batch_1",
        ),
        ("cifar100", 169, "cifar-100-binary/train.bin or cifar-100-python/train"),
    ],
)
def test_missing_files_raise_with_advice(tmp_path, monkeypatch, name, size, folders):
    advice = (
        f"pass --download to download {size} MB, or get {ARCHIVES[name, 'binary']} from "
        "https://www.cs.toronto.edu/~kriz/ yourself, or pass the right directory as --data-dir."
    )
    expected = f"--data {name}: {tmp_path} contains no {folders}; {advice}"
    assert refused(name, tmp_path) == expected
    absent = tmp_path / "absent"
    assert refused(name, absent) == f"--data {name}: {absent} does not exist; {advice}"
    monkeypatch.setenv("PROBMASK_DATA", str(tmp_path / "data"))
    default = tmp_path / "data" / name
    assert f"{default} does not exist" in refused(name, None)
    default.mkdir(parents=True)
    assert f"{default} contains no" in refused(name, None)


def test_an_archive_with_another_name(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(b"")
    assert refused("cifar10", path) == (
        f"--data-dir {path}: not an archive of cifar10; expected a file named "
        "cifar-10-binary.tar.gz or cifar-10-python.tar.gz, or a directory that contains it."
    )


@pytest.mark.parametrize(("name", "record"), [("cifar10", 3073), ("cifar100", 3074)])
@pytest.mark.parametrize("form", FORMS[::2])
@pytest.mark.parametrize("cut", [1, 3000, None])
def test_a_truncated_file(tmp_path, name, record, form, cut):
    files = contents(name, "binary", FEW)
    last = list(files)[-1]
    files[last] = files[last][: -cut if cut else 0]
    path = write(tmp_path, (name, "binary"), form, files)
    file = tmp_path / (FOLDERS if form.startswith("folder") else ARCHIVES)[name, "binary"] / last
    assert refused(name, path) == (
        f"{file}: the content is damaged (its {len(files[last]):,} bytes are not a multiple of "
        f"the record size {record}); download it again."
    )


@pytest.mark.parametrize("release", RELEASES)
def test_a_label_out_of_range(tmp_path, release):
    name, kind = release
    files = contents(name, kind, FEW)
    file = next(file for file in reversed(files) if "test" not in file)
    write_as = as_binary if kind == "binary" else as_pickle
    wrong = np.array([0, CLASSES[name] + 5, 255])
    files[file] = write_as(name, pixels(3), wrong, wrong * 0)
    write_folder(tmp_path / FOLDERS[release], files)
    assert refused(name, tmp_path) == (
        f"{tmp_path / FOLDERS[release] / file}: the content is damaged (the label of image 1 is "
        f"{CLASSES[name] + 5}, not in 0 to {CLASSES[name] - 1}); download it again."
    )


def test_a_negative_label(tmp_path):
    files = contents("cifar10", "python", FEW)
    files["data_batch_2"] = as_pickle("cifar10", pixels(1), np.array([-1]), np.array([0]))
    write_folder(tmp_path / "cifar-10-batches-py", files)
    assert (
        "data_batch_2: the content is damaged (the label of image 0 is -1, not in 0 to 9)"
        in refused("cifar10", tmp_path)
    )


GOOD_TABLE = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}


@pytest.mark.parametrize(
    "table",
    [
        [1, 2],
        {"data": GOOD_TABLE["data"]},
        {"labels": [0, 1]},
        GOOD_TABLE | {"data": [1, 2]},
        GOOD_TABLE | {"data": np.zeros((2, 3, 1024), np.uint8)},
        GOOD_TABLE | {"data": np.zeros((2, 3071), np.uint8)},
        GOOD_TABLE | {"labels": np.array([0, 1], np.uint8)},
        GOOD_TABLE | {"labels": [0, 1.0]},
        GOOD_TABLE | {"labels": [0, True]},
        GOOD_TABLE | {"labels": [0, 2**31]},
        GOOD_TABLE | {"labels": [0, 1, 2]},
    ],
)
def test_a_pickle_without_images_and_labels(tmp_path, table):
    files = contents("cifar10", "python", FEW) | {"data_batch_1": pickle.dumps(table)}
    write_folder(tmp_path / "cifar-10-batches-py", files)
    assert refused("cifar10", tmp_path) == (
        f"{tmp_path / 'cifar-10-batches-py' / 'data_batch_1'}: the content is damaged (it does not "
        "contain images under 'data' and labels under 'labels'); download it again."
    )


@pytest.mark.parametrize("form", FORMS[::2])
def test_a_pickle_is_never_executed(tmp_path, form):
    canary = tmp_path / "canary"
    program = f"import pathlib; pathlib.Path({str(canary)!r}).touch()"
    # exec(program), in the instructions of a pickle.
    attack = b"cbuiltins\nexec\n(X" + len(program).to_bytes(4, "little") + program.encode() + b"tR."
    pickle.loads(attack)
    canary.unlink()  # it works
    files = contents("cifar10", "python", FEW) | {"data_batch_1": attack}
    path = write(tmp_path, ("cifar10", "python"), form, files)
    assert "data_batch_1: contains 'builtins.exec'; only numbers" in refused("cifar10", path)
    assert not canary.exists()


def test_a_single_missing_file_is_named(tmp_path):
    files = contents("cifar10", "binary", FEW)
    del files["data_batch_4.bin"]
    write_folder(tmp_path / "cifar-10-batches-bin", files)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    assert refused("cifar10", tmp_path) == f"{file}: cannot be read: No such file or directory."


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    files = contents("cifar100", "binary", FEW)
    write_folder(tmp_path / "cifar-100-binary", files)
    file = tmp_path / "cifar-100-binary" / "train.bin"
    with file.open("ab") as opened:
        opened.truncate(10**12)  # sparse: it takes no space
    assert refused("cifar100", tmp_path) == (
        f"{file}: has 1,000,000,000,000 bytes, but such a file has at most 200,000,000."
    )


@pytest.mark.parametrize("release", RELEASES)
def test_an_archive_without_a_member(tmp_path, release):
    name, kind = release
    files = contents(name, kind, FEW)
    file = list(files)[-1]
    del files[file]
    path = write(tmp_path, release, "archive", files)
    assert refused(name, path) == (
        f"{path}: the content is damaged ({FOLDERS[release]}/{file} is missing); download it again."
    )


def test_a_link_in_an_archive_is_ignored(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(3074))
    path = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in ("train.bin", "test.bin"):
            link = tarfile.TarInfo(f"cifar-100-binary/{file}")
            link.type, link.linkname = tarfile.SYMTYPE, str(secret)
            archive.addfile(link)
    assert "cifar-100-binary/train.bin is missing" in refused("cifar100", path)


def tar_header(name, size, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


TRAIN = "cifar-100-binary/train.bin"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (tar_header(TRAIN, 8 * 10**9), f"{TRAIN} has a declared size of 8,000,000,000 bytes"),
        (tar_header(TRAIN, -1), f"{TRAIN} has a declared size of -1 bytes"),
        (tar_header("any", 10**9, tarfile.XHDTYPE), "it unpacks to more than 400,000,000 bytes"),
        (tar_header("any", -1, tarfile.GNUTYPE_LONGNAME), "invalid header"),
    ],
    ids=["member", "negative member", "extended header", "negative extended header"],
)
def test_a_bomb_is_refused_within_bounded_memory(tmp_path, header, reason):
    path = tmp_path / "cifar-100-binary.tar.gz"
    some = gzip.compress(b"x" * 2**24, 1, mtime=0)
    path.write_bytes(gzip.compress(header, mtime=0) + 30 * some)  # 500 MB
    with memory_limit(100_000_000):
        assert reason in refused("cifar100", path)


def test_extended_headers_are_skipped(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for file, content in contents("cifar10", "binary", FEW).items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
            info.size, info.pax_headers = len(content), {"comment": "x" * 700, "mtime": "1.5"}
            archive.addfile(info, io.BytesIO(content))
    assert "the content is damaged (expected 50,000×3×32×32 pixels" in refused("cifar10", path)


def test_a_fifo_is_not_read(tmp_path):
    write_folder(tmp_path / "cifar-10-batches-bin", contents("cifar10", "binary", FEW))
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    file.unlink()
    os.mkfifo(file)
    assert refused("cifar10", tmp_path) == f"{file}: is not a regular file."


@pytest.fixture(scope="module")
def archive_bytes(tmp_path_factory):
    """A small archive that does not compress, so that a damaged byte is a damaged pixel."""
    path = tmp_path_factory.mktemp("cifar") / "cifar-10-binary.tar.gz"
    noise = np.random.default_rng(0)
    files = {file: b"\3" + noise.bytes(3072) for file, _, _ in files_of("cifar10", "binary")}
    write_archive(path, "cifar-10-batches-bin", files)
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_damaged_archive(tmp_path, archive_bytes, share):
    path = tmp_path / "cifar-10-binary.tar.gz"
    where = int(share * len(archive_bytes))
    path.write_bytes(archive_bytes)
    assert refused("cifar10", path) == f"{path}: {few(5, of=50_000)}"
    path.write_bytes(archive_bytes[:where])
    assert f"{path}: the content is damaged (" in refused("cifar10", path)
    flipped = archive_bytes[where] ^ 0x10
    path.write_bytes(archive_bytes[:where] + bytes([flipped]) + archive_bytes[where + 1 :])
    message = refused("cifar10", path)
    assert message.startswith(f"{path}: the content is damaged (")
    assert few(5, of=50_000) not in message


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"", mtime=0), gzip.compress(b"no tar" * 500, mtime=0)],
)
def test_a_file_that_is_not_an_archive(tmp_path, content):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    assert refused("cifar10", tmp_path).startswith(f"{path}: the content is damaged (")
