"""MNIST and Fashion-MNIST: every form of the idx files; damaged files raise InputError."""

import gzip
import struct

import numpy as np
import pytest
import torch

from probmask.data import load_data
from probmask.data.mnist_and_digits import read_idx
from probmask.errors import InputError

NAMES = ["mnist", "fashion-mnist"]
COUNTS = {"train": 60_000, "t10k": 10_000}
STEMS = [f"{part}-{kind}" for part in COUNTS for kind in ("images", "labels")]
FORMS = [
    "{stem}-{idx}-ubyte",
    "{stem}-{idx}-ubyte.gz",
    "{stem}.{idx}-ubyte",
    "{stem}.{idx}-ubyte.gz",
]


def pixels(count, first):
    """Images whose pixels encode image, row and column, modulo 256."""
    row, column = np.ogrid[:28, :28]
    image = (9 * row + column).astype(np.uint8)
    return (31 * np.arange(first, first + count)).astype(np.uint8)[:, None, None] + image


def labels(count, first):
    numbers = np.arange(first, first + count)
    return ((7 * numbers + numbers // 1000) % 10).astype(np.uint8)


def idx(values):
    """The bytes of an idx file: type, dimensions (big-endian), values."""
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


def contents(counts):
    """The four files by their stems."""
    files = {}
    for part, first in (("train", 0), ("t10k", 5)):
        files[f"{part}-images"] = idx(pixels(counts[part], first))
        files[f"{part}-labels"] = idx(labels(counts[part], first))
    return files


def path_of(directory, stem, form=FORMS[0]):
    return directory / form.format(stem=stem, idx="idx3" if "images" in stem else "idx1")


def write(directory, files, form=FORMS[0]):
    directory.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        path = path_of(directory, stem, form)
        path.write_bytes(gzip.compress(content, 1) if form.endswith("gz") else content)
    return directory


def refused(name, directory):
    """Return the message of the InputError, which is one line."""
    with pytest.raises(InputError) as caught:
        load_data(name, directory)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.fixture(scope="module")
def full():
    """The files at full size."""
    return contents(COUNTS)


FEW = {"train": 4, "t10k": 2}


def few(directory):
    return (
        f"{directory}: the content is damaged (expected 60,000×1×28×28 pixels and 60,000 labels, "
        "found 4×1×28×28 pixels and 4 labels); download it again."
    )


@pytest.mark.parametrize(
    ("name", "form", "inside"),
    [
        ("mnist", FORMS[0], "."),
        ("mnist", FORMS[1], "."),
        ("mnist", FORMS[2], "raw"),
        ("fashion-mnist", FORMS[1], "raw"),
        ("fashion-mnist", FORMS[3], "."),
    ],
)
def test_images_and_labels_are_exact(tmp_path, full, name, form, inside):
    write(tmp_path / inside, full, form)
    data = load_data(name, tmp_path)
    assert (data.name, data.classes, data.image_shape) == (name, 10, (1, 28, 28))
    assert (data.train_size, data.val_size, data.test_size) == (60_000, 0, 10_000)
    for part, count, first in (("train", 60_000, 0), ("test", 10_000, 5)):
        ours = data._parts[part]
        assert torch.equal(ours.pixels, torch.from_numpy(pixels(count, first)[:, None]))
        assert torch.equal(ours.labels, torch.from_numpy(labels(count, first).astype(np.int64)))
    for path in (tmp_path / inside).iterdir():
        path.unlink()  # large


@pytest.mark.parametrize("inside", [".", "raw"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_files_are_found_in_every_form(tmp_path, name, form, inside):
    # With a few images only: the error shows that they are read.
    write(tmp_path / inside, contents(FEW), form)
    assert refused(name, tmp_path) == few(tmp_path)
    assert refused(name, str(tmp_path)) == few(tmp_path)


def test_files_may_have_different_forms(tmp_path):
    for (stem, content), form in zip(contents(FEW).items(), FORMS, strict=True):
        write(tmp_path / ("raw" if "train" in stem else "."), {stem: content}, form)
    assert refused("mnist", tmp_path) == few(tmp_path)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"PROBMASK_DATA": "{tmp}/data"}, "data/mnist"),
        ({"PROBMASK_DATA": "{tmp}/data", "XDG_CACHE_HOME": "{tmp}/cache"}, "data/mnist"),
        ({"PROBMASK_DATA": "~/data"}, "home/data/mnist"),
        ({"PROBMASK_DATA": "", "XDG_CACHE_HOME": "{tmp}/cache"}, "cache/probmask/mnist"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/probmask/mnist"),
        ({}, "home/.cache/probmask/mnist"),
    ],
)
def test_the_default_directory(tmp_path, monkeypatch, variables, place):
    for name in ("PROBMASK_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert f"--data mnist: {tmp_path / place} does not exist" in refused("mnist", None)
    write(tmp_path / place, contents(FEW))
    assert refused("mnist", None) == few(tmp_path / place)


def test_an_unknown_home_directory():
    assert refused("mnist", "~nobody-of-this-name/data") == (
        "~nobody-of-this-name/data: this home directory is unknown; pass the full path in "
        "--data-dir or $PROBMASK_DATA."
    )


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [
        ("mnist", 12, "https://ossci-datasets.s3.amazonaws.com/mnist/"),
        ("fashion-mnist", 31, "https://fashion-mnist.s3.eu-central-1.amazonaws.com/"),
    ],
)
@pytest.mark.parametrize("stem", STEMS)
def test_missing_files_raise_with_advice(tmp_path, name, size, place, stem):
    write(tmp_path, contents(FEW))
    path_of(tmp_path, stem).unlink()
    assert refused(name, tmp_path) == (
        f"--data {name}: {tmp_path} contains no {path_of(tmp_path, stem).name}; pass --download to "
        f"download {size} MB, or get train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
        f"t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz from {place} yourself, or pass the "
        "right directory as --data-dir."
    )


def test_a_file_in_place_of_a_directory(tmp_path):
    file = write(tmp_path, contents(FEW)) / "train-images-idx3-ubyte"
    assert f"{file} contains no train-images-idx3-ubyte" in refused("mnist", file)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("change", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), None])
def test_a_wrong_header(tmp_path, form, stem, change):
    files = contents(FEW)
    dimensions = files[stem][3]
    header = bytes(a + b for a, b in zip(files[stem], change or (0,) * 4, strict=False))
    files[stem] = header + files[stem][4:] if change else header  # or truncated after it
    write(tmp_path, files, form)
    assert refused("mnist", tmp_path) == (
        f"{path_of(tmp_path, stem, form)}: the content is damaged (it has no header of an idx file "
        f"with {dimensions} dimensions of bytes); download it again."
    )


@pytest.mark.parametrize(("change", "count"), [(b"extra", 3141), (-1, 3135), (-3000, 136)])
def test_a_length_that_contradicts_the_header(tmp_path, change, count):
    files = contents(FEW)
    whole = files["train-images"]
    files["train-images"] = whole + change if isinstance(change, bytes) else whole[:change]
    path = path_of(write(tmp_path, files), "train-images")
    assert refused("mnist", tmp_path) == (
        f"{path}: the content is damaged (it contains {count:,} values for shape (4, 28, 28)); "
        "download it again."
    )


def test_an_enormous_shape_in_the_header(tmp_path):
    files = contents(FEW)
    files["train-images"] = bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(100)
    write(tmp_path, files)
    assert "100 values for shape (4294967295, 4294967295, 4294967295)" in refused("mnist", tmp_path)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"train-images": np.zeros((4, 28, 27), np.uint8)}, "4×1×28×27 pixels and 4 labels"),
        ({"train-images": np.zeros((0, 28, 28), np.uint8)}, "0×1×28×28 pixels and 4 labels"),
        ({"train-labels": np.zeros(5, np.uint8)}, "4×1×28×28 pixels and 5 labels"),
    ],
)
def test_a_shape_that_is_not_the_published_one(tmp_path, replaced, message):
    files = contents(FEW) | {stem: idx(values) for stem, values in replaced.items()}
    write(tmp_path, files)
    assert refused("mnist", tmp_path) == (
        f"{tmp_path}: the content is damaged (expected 60,000×1×28×28 pixels and 60,000 labels, "
        f"found {message}); download it again."
    )


@pytest.mark.parametrize("part", COUNTS)
def test_a_label_out_of_range(tmp_path, part):
    stem = f"{part}-labels"
    write(tmp_path, contents(FEW) | {stem: idx(np.array([0, 9, 10, 11], np.uint8))})
    assert refused("fashion-mnist", tmp_path) == (
        f"{path_of(tmp_path, stem)}: the content is damaged (the label of image 2 is 10, not in 0 "
        "to 9); download it again."
    )


@pytest.mark.parametrize("stem", STEMS)
def test_a_damaged_gzip_file(tmp_path, stem):
    form = FORMS[1]
    write(tmp_path, contents(FEW), form)
    path = path_of(tmp_path, stem, form)
    whole = path.read_bytes()
    checksum = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
    for damaged in (b"", b"no gzip", whole[:12], whole[:-1], checksum, whole + b"more"):
        path.write_bytes(damaged)
        message = refused("mnist", tmp_path)
        assert message.startswith(f"{path}: the content is damaged (")
    path.write_bytes(whole[:10] + b"\xff" * 10 + whole[20:])
    assert f"{path}: the content is damaged (Error -3 while decompressing" in refused(
        "mnist", tmp_path
    )


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path, form):
    write(tmp_path, contents(FEW), form)
    path = path_of(tmp_path, "train-images", form)
    if form.endswith("gz"):
        path.write_bytes(gzip.compress(bytes(10**8 + 1), 1))
    else:
        with path.open("ab") as file:
            file.truncate(10**12)  # sparse: it takes no space
    assert refused("mnist", tmp_path) == (
        f"{path}: the content is damaged (it contains more than 100,000,000 bytes); download it "
        "again."
    )


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 4), (0, 2)])
def test_an_idx_file_is_read_in_c_order(tmp_path, shape):
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / "values"
    path.write_bytes(idx(values))
    ours = read_idx(path, len(shape))
    assert ours.dtype == torch.uint8
    assert torch.equal(ours, torch.from_numpy(values))
