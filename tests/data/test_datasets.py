"""Data sets by name: loading, descriptions, settings, and errors with hints."""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from probmask.data import (
    DATA,
    Photographs,
    SmallImages,
    check_settings,
    describe_data,
    download_data,
    load_data,
)
from probmask.data.releases import REMOTES
from probmask.errors import InputError

SMALL = [name for name, entry in DATA.items() if isinstance(entry.defaults, SmallImages)]
LARGE = [name for name, entry in DATA.items() if isinstance(entry.defaults, Photographs)]
LISTED = {entry["name"]: entry for entry in describe_data()}


def refused(name, *arguments):
    """Return the message of the InputError, which is one line."""
    with pytest.raises(InputError) as caught:
        load_data(name, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@contextmanager
def unprivileged():
    """Drop root's permission to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_every_data_set_is_described_in_order():
    assert list(LISTED) == list(DATA)
    assert describe_data() == json.loads(json.dumps(describe_data()))
    for entry in LISTED.values():
        assert entry["summary"]
        assert not entry["summary"].endswith(".")


def test_the_digits_agree_with_their_description():
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
def test_a_description_has_the_published_sizes(name, shape, classes, train, validation, test, size):
    assert {key: value for key, value in LISTED[name].items() if key != "summary"} == {
        "name": name,
        "image_shape": shape,
        "classes": classes,
        "train": train,
        "validation": validation,
        "test": test,
        "download_bytes": size,
    }


def test_only_data_sets_with_a_download_size_can_be_downloaded(tmp_path):
    assert {name for name, entry in LISTED.items() if entry["download_bytes"]} == set(REMOTES)
    for name in set(DATA) - set(REMOTES):
        with pytest.raises(InputError) as caught:
            download_data(name, tmp_path, progress=False)
        assert str(caught.value) == (
            f"--download --data {name}: cannot be downloaded; choose from cifar10, cifar100, "
            "mnist, fashion-mnist."
        )
    with pytest.raises(InputError, match="no such data set; did you mean 'mnist'"):
        download_data("mnits", tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


ALL = "choose from cifar10, cifar100, digits, fashion-mnist, folder, imagenet, mnist, npz, tsv."


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
def test_an_unknown_name_raises_with_the_nearest_one(name, hint):
    assert refused(name) == f"--data {name}: no such data set; {hint}"


def test_a_path_in_place_of_a_name_raises_with_a_hint(tmp_path, monkeypatch):
    for path in ("own.npz", tmp_path / "own.npz"):  # whether it exists or not
        assert refused(str(path)) == (
            f"--data {path}: is a path; for your own data pass --data npz --data-dir {path}."
        )
    assert refused(str(tmp_path)) == (
        f"--data {tmp_path}: is a path; for your own data pass --data folder --data-dir {tmp_path}."
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_data("digits").train_size == 1442  # a name takes precedence over a directory


def test_an_unknown_setting_raises_before_anything_is_read(tmp_path):
    for name in DATA:
        assert "unknown key data_args.color" in refused(name, tmp_path, {"color": 1})


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist", "npz"])
@pytest.mark.parametrize("inside", ["", "inside"])
def test_a_directory_without_permission_is_an_error(tmp_path, name, inside):
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
def test_a_file_without_permission_is_named(name, file):
    # Not in tmp_path, which only its owner may enter.
    with TemporaryDirectory() as directory:
        path = Path(directory) / file
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0)
        for other in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            path.with_name(f"{other}-ubyte").touch()
        Path(directory).chmod(0o755)
        with unprivileged():
            message = refused(name, path if name == "npz" else directory)
    assert re.match(rf"{re.escape(str(path))}: cannot be read(: | \()Permission denied", message)


def test_a_folder_of_images_without_permission_is_named():
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        for name in ("a", "b"):
            (Path(directory) / name / "deep").mkdir(parents=True)
            (Path(directory) / name / "x.jpg").touch()
        closed = Path(directory) / "b" / "deep"
        closed.chmod(0)
        with unprivileged():
            message = refused("folder", directory)
    assert message == f"--data-dir {closed}: cannot be read (Permission denied)."


@pytest.mark.parametrize("name", ["cifar10", "mnist", "npz"])
@pytest.mark.parametrize("path", ["z" * 300, "z\0z"])
def test_an_impossible_path_is_an_error(name, path):
    refused(name, path)
    refused(name, f"{path}/z")


def test_a_loop_of_links_is_an_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("cifar10", "mnist", "npz"):
        assert "Too many levels of symbolic links" in refused(name, tmp_path / "loop")


# --- settings


def refused_settings(name, settings):
    with pytest.raises(InputError) as caught:
        check_settings(name, settings)
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(r"[.?]$", message)
    return message


def test_each_data_set_has_one_of_three_kinds_of_settings():
    assert set(SMALL) == {"digits", "cifar10", "cifar100", "mnist", "fashion-mnist", "npz"}
    assert set(LARGE) == {"imagenet", "folder"}
    assert set(DATA) - {*SMALL, *LARGE} == {"tsv"}


@pytest.mark.parametrize("name", DATA)
def test_no_settings_give_the_defaults(name):
    assert check_settings(name, {}) == DATA[name].defaults


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_augmented_as_in_the_paper(name):
    settings = check_settings(name, {})
    assert (settings.padding, settings.flip) == (4, True)
    assert (settings.mean, settings.std) == ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


def test_digits_and_mnist_are_not_mirrored():
    for name in ("digits", "mnist", "npz"):
        assert check_settings(name, {}).flip is False


def test_settings_replace_their_defaults_only():
    settings = check_settings("cifar10", {"padding": 2, "train_images": 100})
    assert settings == SmallImages(
        padding=2,
        flip=True,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
        train_images=100,
    )
    assert check_settings("folder", {"unreadable": "refuse"}) == Photographs(unreadable="refuse")


def test_lists_become_tuples_of_floats():
    settings = check_settings("digits", {"mean": [0], "std": [1]})
    assert (settings.mean, settings.std) == ((0.0,), (1.0,))
    assert all(type(value) is float for value in (*settings.mean, *settings.std))
    hash(settings)


def test_mean_and_std_may_be_none():
    settings = check_settings("cifar10", {"mean": "none", "std": "none"})
    assert settings.mean is settings.std is None


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"padding": -1},
            "data_args(padding=-1): must be a number of pixels, an integer of at least 0.",
        ),
        (
            {"train_images": 0},
            "data_args(train_images=0): must be a number of images, an integer of at least 1.",
        ),
        (
            {"test_images": -5},
            "data_args(test_images=-5): must be a number of images, an integer of at least 1.",
        ),
        (
            {"validation_images": 0},
            "data_args(validation_images=0): must be a number of images, an integer of at least 1.",
        ),
        (
            {"mean": [0.1, 0.2], "std": [0.1]},
            "data_args(mean=(0.1, 0.2), std=(0.1,)): give both, with one number per channel each.",
        ),
        (
            {"mean": [0.1], "std": "none"},
            "data_args(mean=(0.1,), std=None): give both, with one number per channel each.",
        ),
        (
            {"mean": [0.5], "std": [0]},
            "data_args(std=0.0): must be a standard deviation, at least 1e-06.",
        ),
        (
            {"mean": [0.5], "std": [-1]},
            "data_args(std=-1.0): must be a standard deviation, at least 1e-06.",
        ),
        (
            {"mean": [0.5], "std": [float("inf")]},
            "data_args(std=inf): must be a standard deviation, at least 1e-06.",
        ),
        (
            {"mean": [float("nan")], "std": [1]},
            "data_args(mean=nan): must be the mean of pixels in [0, 1], from 0 to 1.",
        ),
        (
            {"mean": [125.3], "std": [63]},
            "data_args(mean=125.3): must be the mean of pixels in [0, 1], from 0 to 1.",
        ),
        (
            {"mean": [-0.1], "std": [1]},
            "data_args(mean=-0.1): must be the mean of pixels in [0, 1], from 0 to 1.",
        ),
    ],
)
def test_invalid_settings_of_small_images(name, settings, message):
    assert refused_settings(name, settings) == message


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"image_size": 0},
            "data_args(image_size=0): must be a number of pixels, an integer of at least 1.",
        ),
        (
            {"train_images": 0},
            "data_args(train_images=0): must be a number of images, an integer of at least 1.",
        ),
        (
            {"test_images": 0},
            "data_args(test_images=0): must be a number of images, an integer of at least 1.",
        ),
        (
            {"mean": [0.5], "std": [0.5]},
            "data_args(mean=(0.5,)): image files have three channels; give three numbers.",
        ),
        (
            {"mean": [0.5]},
            (
                "data_args(mean=(0.5,), std=(0.229, 0.224, 0.225)): give both, with one number "
                "per channel each."
            ),
        ),
        ({"std": [1, 1, 0]}, "data_args(std=0.0): must be a standard deviation, at least 1e-06."),
    ],
)
def test_invalid_settings_of_image_files(name, settings, message):
    assert refused_settings(name, settings) == message


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cifar10", {"padding": "4"}, "padding = '4': expected a whole number."),
        ("cifar10", {"padding": 4.0}, "padding = 4.0: expected a whole number."),
        ("cifar10", {"padding": True}, "padding = True: expected a whole number."),
        ("cifar10", {"padding": "none"}, "padding = 'none': expected a whole number."),
        ("cifar10", {"flip": 1}, "flip = 1: expected true or false."),
        ("cifar10", {"flip": "yes"}, "flip = 'yes': expected true or false."),
        ("cifar10", {"mean": 0.5}, "mean = 0.5: expected a list of numbers."),
        ("cifar10", {"mean": "0.5"}, "mean = '0.5': expected a list of numbers."),
        ("cifar10", {"mean": [0.5, "a"]}, "mean = 'a': expected a number."),
        ("cifar10", {"mean": [True]}, "mean = True: expected a number."),
        ("cifar10", {"train_images": {}}, "train_images = {}: expected a whole number."),
        ("folder", {"mean": "none"}, "mean = 'none': expected a list of numbers."),
        ("folder", {"unreadable": "ignore"}, "unreadable = 'ignore': expected 'skip' or 'refuse'."),
    ],
)
def test_a_setting_of_the_wrong_type(name, settings, message):
    assert refused_settings(name, settings) == f"--data {name}: data_args.{message}"


@pytest.mark.parametrize(
    ("name", "key", "hint"),
    [
        ("cifar10", "pading", "did you mean 'padding'?"),
        ("cifar10", "train_image", "did you mean 'train_images'?"),
        ("imagenet", "imagesize", "did you mean 'image_size'?"),
        (
            "imagenet",
            "padding",
            (
                "choose from image_size, mean, std, test_images, train_images, unreadable, "
                "validation_images."
            ),
        ),
        (
            "digits",
            "zzz",
            "choose from flip, mean, padding, std, test_images, train_images, validation_images.",
        ),
    ],
)
def test_an_unknown_setting_raises_with_the_nearest_name(name, key, hint):
    assert refused_settings(name, {key: 1}) == f"--data {name}: unknown key data_args.{key}; {hint}"


def test_settings_of_an_unknown_data_set():
    assert (
        refused_settings("cifar11", {})
        == "--data cifar11: no such data set; did you mean 'cifar10'?"
    )
