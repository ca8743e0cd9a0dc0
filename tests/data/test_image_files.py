"""Data sets of image files: parts, deterministic batches, unreadable files, worker processes."""

import hashlib
import os
import shutil
import signal
import threading
import time
import warnings
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from torch import nn

from data.image_folders import PLAIN, make_classes, numbers, write_color
from probmask.data import Shard, load_data
from probmask.data.image_views import Views
from probmask.errors import InputError, UnreadableImageWarning
from probmask.training.evaluation import evaluate_model

# PyTorch warns on a machine with one core; Python 3.12 warns about fork with threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

CPU = torch.device("cpu")


def load(directory, name="folder", **settings):
    return load_data(name, directory, PLAIN | settings)


def shown(batches):
    return [number for batch in batches for number in numbers(batch.inputs)]


def labels(batches):
    return [label for batch in batches for label in batch.labels.tolist()]


def assert_same_batches(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)


# --- fingerprints


def test_a_fingerprint_covers_names_labels_sizes_and_contents(tmp_path):
    make_classes(tmp_path / "images", {"a": 6, "b": 6})
    original = load(tmp_path / "images").fingerprint()
    assert load(tmp_path / "images").fingerprint() == original
    shutil.copytree(tmp_path / "images", tmp_path / "elsewhere")
    assert load(tmp_path / "elsewhere").matches(original)
    for change in ("content", "size", "name", "class", "access"):
        directory = tmp_path / change
        shutil.copytree(tmp_path / "images", directory)
        image = directory / "b" / "003.jpg"
        data = image.read_bytes()
        if change == "content":
            image.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif change == "size":
            image.write_bytes(data + b"x")
        elif change == "access":
            image.unlink()
            os.mkfifo(image)
        else:
            image.rename(directory / {"name": "b/0.jpg", "class": "a/x.jpg"}[change])
        assert not load(directory).matches(original), change


def test_a_fingerprint_of_the_first_version_covers_names_and_labels(tmp_path):
    """A run that was started with it can be resumed."""
    make_classes(tmp_path, {"a": 6, "b": 6})
    names = np.array([f"{c}/{n:03}.jpg" for c in "ab" for n in range(5)], dtype=np.bytes_)
    test_names = np.array(["a/005.jpg", "b/005.jpg"], dtype=np.bytes_)
    digest = hashlib.blake2b(names.tobytes(), digest_size=16)
    digest.update(np.repeat([0, 1], 5).tobytes())
    digest.update(test_names.tobytes())
    digest.update(np.array([0, 1]).tobytes())
    assert load(tmp_path, test_images=2).matches(digest.hexdigest())
    assert not load(tmp_path, test_images=1).matches(digest.hexdigest())


# --- parts


def test_train_and_test(tmp_path):
    make_classes(tmp_path / "train", {"a": 6, "b": 6})
    make_classes(tmp_path / "test", {"a": 1, "b": 2}, first=100)
    data = load(tmp_path)
    assert (data.name, data.classes, data.image_shape) == ("folder", 2, (3, 8, 8))
    assert (data.train_size, data.val_size, data.test_size) == (12, 0, 3)
    assert sorted(shown(data.training(0, batch_size=4, seed=0))) == list(range(12))
    assert shown(data.testing(batch_size=2)) == [100, 101, 102]
    assert labels(data.testing(batch_size=2)) == [0, 1, 1]
    assert list(data.validation(batch_size=2)) == []


def test_val_is_for_testing_if_there_is_no_test(tmp_path):
    make_classes(tmp_path / "train", {"a": 10, "b": 10})
    make_classes(tmp_path / "val", {"a": 2, "b": 1}, first=100)
    data = load(tmp_path).with_validation()
    assert shown(data.testing(batch_size=10)) == [100, 101, 102]
    assert (data.train_size, data.val_size) == (18, 2)
    held_out = shown(data.validation(batch_size=10))
    assert labels(data.validation(batch_size=10)) == [0, 1]
    trained = shown(data.training(0, batch_size=9, seed=0))
    assert sorted(held_out + trained) == list(range(20))


def test_val_is_for_validation_if_there_is_a_test(tmp_path):
    make_classes(tmp_path / "train", {"a": 4, "b": 4})
    make_classes(tmp_path / "val", {"a": 1, "b": 2}, first=100)
    make_classes(tmp_path / "test", {"a": 1, "b": 1}, first=200)
    without = load(tmp_path)
    data = without.with_validation()
    assert (data.train_size, data.val_size, data.test_size) == (8, 3, 2)
    assert shown(data.validation(batch_size=2)) == [100, 101, 102]
    assert labels(data.validation(batch_size=2)) == [0, 1, 1]
    assert shown(data.testing(batch_size=2)) == [200, 201]
    assert without.val_size == 0
    assert list(without.validation(batch_size=2)) == []


def test_a_fifth_is_for_testing_if_there_are_only_classes(tmp_path):
    make_classes(tmp_path, {"a": 10, "b": 20, "c": 5})
    data = load(tmp_path)
    assert (data.classes, data.train_size, data.test_size) == (3, 28, 7)
    assert labels(data.testing(batch_size=10)) == [0] * 2 + [1] * 4 + [2]
    tested, trained = (
        shown(data.testing(batch_size=10)),
        shown(data.training(0, batch_size=28, seed=0)),
    )
    assert sorted(tested + trained) == list(range(35))
    assert tested == shown(load(tmp_path).testing(batch_size=3))


def test_too_few_images_to_hold_any_out(tmp_path):
    make_classes(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(
        InputError, match="2 images are too few to hold out a test part; add images"
    ):
        load(tmp_path)
    make_classes(tmp_path / "train", {"a": 1, "b": 1})
    make_classes(tmp_path / "test", {"a": 1})
    with pytest.raises(InputError, match="to hold out a validation part; pass --select-on none"):
        load(tmp_path).with_validation()


def test_imagenet_is_tested_on_val_and_its_unlabeled_test_images_are_ignored(tmp_path):
    make_classes(tmp_path / "train", {"n01440764": 4, "n01443537": 4})
    make_classes(tmp_path / "val", {"n01440764": 1, "n01443537": 1}, first=100)
    write_color(tmp_path / "test" / "ILSVRC2012_test_00000001.JPEG", 200)
    data = load(tmp_path, "imagenet")
    assert (data.name, data.classes, data.train_size) == ("imagenet", 2, 8)
    assert shown(data.testing(batch_size=2)) == [100, 101]


@pytest.mark.parametrize("layout", ["classes", "train"])
def test_imagenet_without_val(tmp_path, layout):
    make_classes(tmp_path / ("train" if layout == "train" else "."), {"a": 4, "b": 4})
    with pytest.raises(
        InputError, match="does not contain both train/ and val/; download ImageNet"
    ):
        load(tmp_path, "imagenet")


@pytest.mark.parametrize("name", ["imagenet", "folder"])
def test_a_directory_is_required(name):
    with pytest.raises(
        InputError, match=f"--data {name}: needs the directory of the images; pass --data-dir DIR"
    ):
        load(None, name)


def test_limits_take_evenly_spaced_images(tmp_path):
    make_classes(tmp_path / "train", {"a": 10, "b": 10})
    make_classes(tmp_path / "test", {"a": 4, "b": 4}, first=100)
    data = load(tmp_path, train_images=4, test_images=2)
    assert sorted(shown(data.training(0, batch_size=4, seed=0))) == [0, 5, 10, 15]
    assert shown(data.testing(batch_size=4)) == [100, 104]
    with pytest.raises(InputError, match=r"data_args\.test_images=9: folder has only 8"):
        load(tmp_path, test_images=9)


def test_validation_images_come_from_unused_training_images(tmp_path):
    make_classes(tmp_path / "train", {"a": 10, "b": 10})
    make_classes(tmp_path / "test", {"a": 4, "b": 4}, first=100)
    data = load(tmp_path, train_images=4, validation_images=8).with_validation()
    assert sorted(shown(data.training(0, batch_size=4, seed=0))) == [0, 5, 10, 15]
    held = shown(data.validation(batch_size=16))
    assert len(set(held)) == 8
    assert not set(held) & {0, 5, 10, 15}
    assert labels(data.validation(batch_size=16)) == [0] * 4 + [1] * 4
    with pytest.raises(InputError, match=r"data_args\.train_images=4 leaves 16; decrease either"):
        load(tmp_path, train_images=4, validation_images=17)
    assert load(tmp_path, validation_images=6).with_validation().train_size == 14


def test_a_limit_on_the_given_validation_images(tmp_path):
    make_classes(tmp_path / "train", {"a": 4, "b": 4})
    make_classes(tmp_path / "val", {"a": 2, "b": 2}, first=100)
    make_classes(tmp_path / "test", {"a": 1, "b": 1}, first=200)
    data = load(tmp_path, validation_images=2).with_validation()
    assert data.train_size == 8
    assert shown(data.validation(batch_size=2)) == [100, 102]
    with pytest.raises(InputError, match=r"data_args\.validation_images=5: folder has only 4"):
        load(tmp_path, validation_images=5)


# --- batches are a function of seed, epoch and position


@pytest.fixture
def readers():
    """Return a function that lists the processes started since."""
    before = set(active_children())
    return lambda: set(active_children()) - before


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Three parts of images whose crops all differ."""
    root = tmp_path_factory.mktemp("noisy")
    make_classes(root / "train", {"a": 9, "b": 9}, noise=True)
    make_classes(root / "val", {"a": 2, "b": 3}, first=100, noise=True)
    make_classes(root / "test", {"a": 3, "b": 4}, first=200, noise=True)
    return root


def photographs(directory, *, workers=0, **settings):
    settings = {"image_size": 16} | settings
    return load_data("folder", directory, settings).with_validation().to(CPU, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(noisy, workers, readers):
    alone, shared = photographs(noisy), photographs(noisy, workers=workers)
    for epoch in (0, 1):
        settings = {"batch_size": 4, "seed": 3}
        assert_same_batches(alone.training(epoch, **settings), shared.training(epoch, **settings))
    assert_same_batches(alone.testing(batch_size=3), shared.testing(batch_size=3))
    assert_same_batches(alone.validation(batch_size=3), shared.validation(batch_size=3))
    assert not readers()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2, 3, 4])
def test_an_epoch_can_start_in_the_middle(noisy, workers, start):
    data = photographs(noisy, workers=workers)
    whole = list(data.training(1, batch_size=4, seed=0))
    assert len(whole) == data.steps_per_epoch(4) == 4
    assert_same_batches(data.training(1, batch_size=4, seed=0, start=start), whole[start:])


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_divide_every_batch(noisy, workers):
    data = photographs(noisy, workers=workers)
    whole = list(data.training(2, batch_size=6, seed=0, start=1))
    shares = [
        list(data.training(2, batch_size=6, seed=0, start=1, shard=Shard(rank, 3)))
        for rank in range(3)
    ]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert [len(part.labels) for part in parts] == [2, 2, 2]
        assert torch.equal(batch.inputs, torch.cat([part.inputs for part in parts]))
        assert torch.equal(batch.labels, torch.cat([part.labels for part in parts]))


def test_epochs_and_seeds_differ_in_order_and_in_crops(noisy):
    data = photographs(noisy)
    batches = [
        next(data.training(epoch, batch_size=18, seed=seed))
        for epoch, seed in ((0, 0), (1, 0), (0, 1))
    ]
    for place, one in enumerate(batches):
        for other in batches[place + 1 :]:
            assert not torch.equal(one.labels, other.labels)
            equal = (one.inputs[:, None] == other.inputs[None]).flatten(2).all(2)
            assert not equal.any()


def test_an_epoch_contains_every_image_at_most_once_in_full_batches(tmp_path):
    make_classes(tmp_path / "train", {"a": 5, "b": 6})
    make_classes(tmp_path / "test", {"a": 1})
    seen = shown(load(tmp_path).training(0, batch_size=3, seed=0))
    assert len(seen) == len(set(seen)) == 9


def test_pixels_are_scaled_and_normalized(tmp_path):
    make_classes(tmp_path / "train", {"a": 2, "b": 2}, first=0x4020)
    make_classes(tmp_path / "test", {"a": 1}, first=0x8040)
    data = load(tmp_path, mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 0.125])
    (batch,) = data.testing(batch_size=5)
    color = torch.tensor([0x80, 0x40, 0]) / 255
    expected = (color - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 0.25, 0.125])
    assert batch.inputs.dtype == torch.float32
    assert torch.allclose(batch.inputs, expected.view(1, 3, 1, 1).expand(1, 3, 8, 8), atol=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_do_not_use_the_global_generator(noisy, workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(photographs(noisy, workers=workers).training(0, batch_size=4, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_larger_than_the_training_set(noisy):
    with pytest.raises(InputError, match=r"train\(batch_size=19\): folder has 18 training images"):
        next(photographs(noisy).training(0, batch_size=19, seed=0))


def test_closing_an_epoch_early_ends_its_processes(noisy, readers):
    batches = photographs(noisy, workers=2).training(0, batch_size=2, seed=0)
    next(batches)
    assert len(readers()) == 2
    batches.close()
    assert not readers()


# --- unreadable files


@pytest.fixture
def damaged(tmp_path):
    """Twelve training, five validation and four test images; 1, 2, 104 and 201 are damaged."""
    make_classes(tmp_path / "train", {"a": 6, "b": 6})
    make_classes(tmp_path / "val", {"a": 3, "b": 2}, first=100)
    make_classes(tmp_path / "test", {"a": 2, "b": 2}, first=200)
    for name in ("train/a/001.jpg", "train/a/002.jpg", "val/b/001.jpg", "test/a/001.jpg"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
    return tmp_path


def loaded(directory, *, workers=0, **settings):
    return load(directory, **settings).with_validation().to(CPU, workers=workers)


def names(caught, root):
    messages = [
        str(warning.message) for warning in caught if warning.category is UnreadableImageWarning
    ]
    return [message.split(":")[0].removeprefix(f"{root}/") for message in messages]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_file_replaces_a_damaged_one_in_a_batch(damaged, workers):
    data = loaded(damaged, workers=workers)
    with pytest.warns(UnreadableImageWarning) as caught:
        batches = list(data.training(0, batch_size=4, seed=0))
    assert [len(batch.labels) for batch in batches] == [4, 4, 4]
    assert sorted(shown(batches)) == [0, 3, 3, 3, *range(4, 12)]
    assert sorted(names(caught, damaged)) == ["train/a/001.jpg", "train/a/002.jpg"]


def test_a_damaged_file_warns_once_with_name_and_reason(damaged):
    data = loaded(damaged)
    with pytest.warns(UnreadableImageWarning) as caught:
        list(data.training(0, batch_size=4, seed=0))
    assert str(caught[0].message) == (
        f"{damaged}/train/a/001.jpg: skipped, because it cannot be read "
        "(UnidentifiedImageError: cannot identify image file)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(data.training(1, batch_size=4, seed=0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_epoch_replaces_damaged_files_by_the_same_ones(damaged, workers):
    with pytest.warns(UnreadableImageWarning):
        whole = list(loaded(damaged).training(0, batch_size=2, seed=5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableImageWarning)
        rest = list(loaded(damaged, workers=workers).training(0, batch_size=2, seed=5, start=2))
    assert_same_batches(rest, whole[2:])


@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_damaged_test_and_validation_images_are_skipped_and_listed(damaged, batch_size):
    data = loaded(damaged)
    assert data.unreadable == {}
    with pytest.warns(UnreadableImageWarning, match=r"test/a/001\.jpg: skipped"):
        assert shown(data.testing(batch_size=batch_size)) == [200, 202, 203]
    with pytest.warns(UnreadableImageWarning, match=r"val/b/001\.jpg: skipped"):
        assert labels(data.validation(batch_size=batch_size)) == [0, 0, 0, 1]
    reason = "UnidentifiedImageError: cannot identify image file"
    assert data.unreadable == {
        str(damaged / name): reason for name in ("test/a/001.jpg", "val/b/001.jpg")
    }


def test_the_list_of_unreadable_files_is_a_copy(damaged):
    data = loaded(damaged)
    data.unreadable["x"] = "y"
    assert data.unreadable == {}


def test_check_does_nothing_if_files_are_skipped(damaged):
    loaded(damaged).check(progress=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_check_names_the_damaged_files_of_every_part(damaged, workers):
    data = loaded(damaged, workers=workers, unreadable="refuse")
    with pytest.raises(InputError) as caught:
        data.check(progress=False)
    message = str(caught.value)
    assert message.startswith(f"--data folder: cannot read {damaged}/train/a/001.jpg (")
    for name in ("train/a/002.jpg", "val/b/001.jpg", "test/a/001.jpg"):
        assert f"{damaged}/{name} (" in message
    assert "more" not in message
    assert message.endswith("or pass --set data_args.unreadable=skip.")
    assert "\n" not in message


def test_check_names_at_most_ten_files(tmp_path):
    make_classes(tmp_path, {"a": 20, "b": 20})
    for path in tmp_path.glob("a/*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"a/\d+\.jpg \([^;]*\) and 10 more; replace or") as caught:
        loaded(tmp_path, unreadable="refuse").check(progress=False)
    assert str(caught.value).count("UnidentifiedImageError") == 10


def test_check_can_show_a_progress_bar(tmp_path, capsys):
    make_classes(tmp_path, {"a": 10, "b": 10})
    data = loaded(tmp_path, unreadable="refuse")
    data.check(progress=False)
    assert capsys.readouterr() == ("", "")
    data.check(progress=True)
    out, error = capsys.readouterr()
    assert out == ""
    assert "checking folder" in error
    assert "100%" in error


def test_a_file_that_becomes_unreadable_after_the_check_ends_the_run(tmp_path):
    make_classes(tmp_path / "train", {"a": 6, "b": 6})
    make_classes(tmp_path / "test", {"a": 2, "b": 2}, first=200)
    data = load(tmp_path, unreadable="refuse")
    data.check(progress=False)
    for part, batches in (
        ("train", data.training(0, batch_size=4, seed=0)),
        ("test", data.testing(batch_size=2)),
    ):
        gone = tmp_path / part / "a" / "001.jpg"
        gone.unlink()
        with pytest.raises(OSError, match="can no longer be read") as caught:
            list(batches)
        assert str(caught.value).startswith(f"{gone}: ")
        assert "FileNotFoundError" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore::probmask.errors.UnreadableImageWarning")
def test_the_run_ends_if_no_file_can_be_read(damaged, workers):
    for path in damaged.glob("train/*/*.jpg"):
        path.write_bytes(b"")
    data = loaded(damaged, workers=workers)
    with pytest.raises(OSError, match=r"48 files cannot be read, .*\.jpg; check that the disk"):
        list(data.training(0, batch_size=4, seed=0))


# --- worker processes


def test_a_killed_worker_is_an_os_error_when_its_batch_is_due(noisy, readers):
    """Not before: PyTorch would raise it anywhere, possibly during an optimizer step."""
    batches = photographs(noisy, workers=1).training(0, batch_size=1, seed=0)
    next(batches)
    (reader,) = readers()
    os.kill(reader.pid, signal.SIGKILL)
    for _ in range(200):  # time for a signal handler to run
        time.sleep(0.001)
    with pytest.raises(
        OSError, match=r"a worker process that reads images ended \(.*--resume"
    ) as caught:
        list(batches)
    assert "\n" not in str(caught.value)


def test_the_sigchld_handler_is_unchanged(noisy, monkeypatch):
    # As if PyTorch had not started a worker in this process before.
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    batches = photographs(noisy, workers=1).training(0, batch_size=1, seed=0)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is before
    batches.close()


class Raising(Views):
    """Raise the given error."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, key):
        raise self.error


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset by peer"), EOFError()])
def test_a_broken_connection_is_reported_as_the_end_of_a_worker(noisy, error):
    """Which error a killed worker causes first depends on the moment."""
    with pytest.raises(OSError, match=r"a worker process that reads images ended \(\[?E"):
        list(photographs(noisy)._load(Raising(error), iter([[0]])))


@pytest.mark.parametrize("text", ["a bug", "Caught RuntimeError in DataLoader worker process 0."])
def test_an_unexpected_error_passes_through(noisy, text):
    """The second is how PyTorch reports an error that a worker raised."""
    with pytest.raises(RuntimeError, match=text):
        list(photographs(noisy)._load(Raising(RuntimeError(text)), iter([[0]])))


def test_batches_can_be_read_by_another_thread(noisy):
    """Signal handlers can be set only in the main thread."""
    found = []

    def read():
        found.extend(photographs(noisy, workers=1).training(0, batch_size=9, seed=0))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert_same_batches(found, photographs(noisy).training(0, batch_size=9, seed=0))


# --- evaluation


class Threshold(nn.Module):
    """Predict class 1 for images from a given number on."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, images):
        after = torch.tensor([number >= self.least for number in numbers(images)])
        return torch.stack([~after, after], dim=1).float()


@pytest.mark.parametrize("workers", [0, 1])
def test_accuracy_counts_the_readable_images(damaged, workers):
    data = loaded(damaged, workers=workers)
    with pytest.warns(UnreadableImageWarning):
        test = evaluate_model(Threshold(202), data)
    with pytest.warns(UnreadableImageWarning):
        validation = evaluate_model(Threshold(102), data, part="val")
    assert (test.correct, test.total) == (3, 3)
    assert (validation.correct, validation.total) == (3, 4)
    assert validation.accuracy == 75


@pytest.mark.filterwarnings("ignore::probmask.errors.UnreadableImageWarning")
def test_evaluation_without_a_readable_image_is_an_error(damaged):
    for path in damaged.glob("test/*/*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="--data folder: none of its test images can be read"):
        evaluate_model(Threshold(0), loaded(damaged))
