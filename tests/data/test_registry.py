"""The data sets by name: what the listing says is what loads, and every wrong name gets a hint."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from probmask.data import DATA, download_data, load_data
from probmask.data.catalogue import describe_data
from probmask.data.remotes import REMOTES
from probmask.errors import InputError

LISTED = {entry["name"]: entry for entry in describe_data()}


def refused(name, *arguments):
    """The message of the refusal, which is one sentence."""
    with pytest.raises(InputError) as caught:
        load_data(name, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@contextmanager
def unprivileged():
    """Without root's right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_the_listing_holds_every_data_set_in_order():
    assert list(LISTED) == list(DATA)
    assert describe_data() == json.loads(json.dumps(describe_data()))
    for entry in LISTED.values():
        assert entry["summary"]
        assert not entry["summary"].endswith(".")


def test_the_digits_are_as_listed():
    data, listed = load_data("digits"), LISTED["digits"]
    assert list(data.image_shape) == listed["image_shape"]
    assert (data.classes, data.train_size, data.test_size) == (
        listed["classes"],
        listed["train"],
        listed["test"],
    )
    assert data.with_validation().val_size == listed["validation"]
    assert listed["download_bytes"] is None


@pytest.mark.parametrize(
    ("name", "shape", "classes", "train", "validation", "test", "size"),
    [
        ("digits", [1, 8, 8], 10, 1_442, 144, 355, None),
        ("cifar10", [3, 32, 32], 10, 50_000, 5_000, 10_000, 170_052_171),
        ("cifar100", [3, 32, 32], 100, 50_000, 5_000, 10_000, 168_513_733),
        ("mnist", [1, 28, 28], 10, 60_000, 6_000, 10_000, 11_594_722),
        ("fashion-mnist", [1, 28, 28], 10, 60_000, 6_000, 10_000, 30_878_645),
        ("imagenet", [3, 224, 224], 1_000, 1_281_167, 10_000, 50_000, None),
        ("folder", None, None, None, None, None, None),
        ("npz", None, None, None, None, None, None),
    ],
)
def test_the_listing_says_what_is_known(name, shape, classes, train, validation, test, size):
    assert {key: value for key, value in LISTED[name].items() if key != "summary"} == {
        "name": name,
        "image_shape": shape,
        "classes": classes,
        "train": train,
        "validation": validation,
        "test": test,
        "download_bytes": size,
    }


def test_only_what_is_listed_with_a_size_can_be_downloaded(tmp_path):
    assert {name for name, entry in LISTED.items() if entry["download_bytes"]} == set(REMOTES)
    for name in set(DATA) - set(REMOTES):
        with pytest.raises(InputError) as caught:
            download_data(name, tmp_path, visible=False)
        assert str(caught.value) == (
            f"--download --data {name}: cannot be downloaded; those that can are cifar10, "
            "cifar100, mnist, fashion-mnist."
        )
    with pytest.raises(InputError, match="no such data set; did you mean 'mnist'"):
        download_data("mnits", tmp_path, visible=False)
    assert list(tmp_path.iterdir()) == []


ALL = "choose from cifar10, cifar100, digits, fashion-mnist, folder, imagenet, mnist, npz."


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digit", "did you mean 'digits'?"),
        ("cifar-10", "did you mean 'cifar10'?"),
        ("fashion_mnist", "did you mean 'fashion-mnist'?"),
        ("zzz", ALL),
        ("", ALL),
        ("z" * 300, ALL),
        ("z\0", ALL),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, hint):
    assert refused(name) == f"--data {name}: no such data set; {hint}"


def test_a_path_in_place_of_a_name_gets_a_hint(tmp_path, monkeypatch):
    for path in ("own.npz", tmp_path / "own.npz"):  # whether it is there or not
        assert refused(str(path)) == (
            f"--data {path}: is a path; for your own data pass --data npz --data-dir {path}."
        )
    assert refused(str(tmp_path)) == (
        f"--data {tmp_path}: is a path; for your own data pass --data folder --data-dir {tmp_path}."
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_data("digits").train_size == 1442  # a name stays a name


def test_a_wrong_setting_is_said_before_anything_is_read(tmp_path):
    for name in DATA:
        assert "unknown key data_args.colour" in refused(name, tmp_path, {"colour": 1})


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist", "npz"])
@pytest.mark.parametrize("inside", ["", "inside"])
def test_what_may_not_be_read_is_said(tmp_path, name, inside):
    directory = tmp_path / "locked"
    (directory / "inside").mkdir(parents=True)
    directory.chmod(0)
    try:
        with unprivileged():
            message = refused(name, directory / inside)
    finally:
        directory.chmod(0o700)
    assert message.startswith(str(directory))
    assert "cannot be read (Permission denied)" in message


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-binary.tar.gz"),
        ("cifar100", "cifar-100-python/train"),
        ("mnist", "train-images-idx3-ubyte"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz"),
        ("npz", "own.npz"),
    ],
)
def test_a_file_that_may_not_be_read_is_named(name, file):
    # Not in tmp_path, which nobody but its owner may enter.
    with TemporaryDirectory() as directory:
        path = Path(directory) / file
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0)
        for other in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            path.with_name(f"{other}-ubyte").touch()
        Path(directory).chmod(0o755)
        with unprivileged():
            message = refused(name, path if name == "npz" else directory)
    assert message.startswith(f"{path}: cannot be read (Permission denied)")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "npz"])
@pytest.mark.parametrize("path", ["z" * 300, "z\0z"])
def test_a_path_that_cannot_be_is_refused(name, path):
    refused(name, path)
    refused(name, f"{path}/z")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("cifar10", "mnist", "npz"):
        assert "Too many levels of symbolic links" in refused(name, tmp_path / "loop")
