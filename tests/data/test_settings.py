"""What may be set of a data set, and what is said of the rest."""

import re

import pytest

from probmask.data import DATA, Photographs, SmallImages, check_settings
from probmask.errors import InputError

SMALL = [name for name, entry in DATA.items() if isinstance(entry.defaults, SmallImages)]
LARGE = [name for name in DATA if name not in SMALL]


def refused(name, settings):
    with pytest.raises(InputError) as caught:
        check_settings(name, settings)
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(r"[.?]$", message)
    return message


def test_there_are_two_kinds():
    assert set(SMALL) == {"digits", "cifar10", "cifar100", "mnist", "fashion-mnist", "npz"}
    assert set(LARGE) == {"imagenet", "folder"}


@pytest.mark.parametrize("name", DATA)
def test_without_settings_they_are_the_defaults(name):
    assert check_settings(name, {}) == DATA[name].defaults


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_cropped_and_mirrored_as_in_the_paper(name):
    settings = check_settings(name, {})
    assert (settings.padding, settings.flip) == (4, True)
    assert (settings.mean, settings.std) == ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


def test_digits_and_mnist_are_not_mirrored():
    for name in ("digits", "mnist", "npz"):
        assert check_settings(name, {}).flip is False


def test_what_is_given_replaces_the_default_and_the_rest_stays():
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


def test_statistics_are_computed_where_both_are_none():
    settings = check_settings("cifar10", {"mean": "none", "std": "none"})
    assert settings.mean is settings.std is None


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": -1}, "data_args(padding=-1): pixels, a whole number, at least 0."),
        ({"train_images": 0}, "data_args(train_images=0): images, a whole number, at least 1."),
        ({"test_images": -5}, "data_args(test_images=-5): images, a whole number, at least 1."),
        (
            {"validation_images": 0},
            "data_args(validation_images=0): images, a whole number, at least 1.",
        ),
        (
            {"mean": [0.1, 0.2], "std": [0.1]},
            "data_args(mean=(0.1, 0.2), std=(0.1,)): give both, with one number per channel each.",
        ),
        (
            {"mean": [0.1], "std": "none"},
            "data_args(mean=(0.1,), std=None): give both, with one number per channel each.",
        ),
        ({"mean": [0.5], "std": [0]}, "data_args(std=0.0): a deviation, at least 1e-06."),
        ({"mean": [0.5], "std": [-1]}, "data_args(std=-1.0): a deviation, at least 1e-06."),
        (
            {"mean": [0.5], "std": [float("inf")]},
            "data_args(std=inf): a deviation, at least 1e-06.",
        ),
        (
            {"mean": [float("nan")], "std": [1]},
            "data_args(mean=nan): a mean of pixels in [0, 1], from 0 to 1.",
        ),
        (
            {"mean": [125.3], "std": [63]},
            "data_args(mean=125.3): a mean of pixels in [0, 1], from 0 to 1.",
        ),
        (
            {"mean": [-0.1], "std": [1]},
            "data_args(mean=-0.1): a mean of pixels in [0, 1], from 0 to 1.",
        ),
    ],
)
def test_each_rule_of_small_images_is_said(name, settings, message):
    assert refused(name, settings) == message


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "data_args(image_size=0): pixels, a whole number, at least 1."),
        ({"train_images": 0}, "data_args(train_images=0): images, a whole number, at least 1."),
        ({"test_images": 0}, "data_args(test_images=0): images, a whole number, at least 1."),
        (
            {"mean": [0.5], "std": [0.5]},
            "data_args(mean=(0.5,)): photographs have three channels; give three numbers.",
        ),
        (
            {"mean": [0.5]},
            (
                "data_args(mean=(0.5,), std=(0.229, 0.224, 0.225)): give both, with one number "
                "per channel each."
            ),
        ),
        ({"std": [1, 1, 0]}, "data_args(std=0.0): a deviation, at least 1e-06."),
    ],
)
def test_each_rule_of_photographs_is_said(name, settings, message):
    assert refused(name, settings) == message


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
def test_a_wrong_type_is_refused(name, settings, message):
    assert refused(name, settings) == f"--data {name}: data_args.{message}"


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
def test_an_unknown_setting_gets_the_nearest_name(name, key, hint):
    assert refused(name, {key: 1}) == f"--data {name}: unknown key data_args.{key}; {hint}"


def test_settings_of_an_unknown_data_set_are_refused():
    assert refused("cifar11", {}) == "--data cifar11: no such data set; did you mean 'cifar10'?"
