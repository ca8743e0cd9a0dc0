"""Arrays of the user in an .npz file: names, layouts, splits, and errors."""

import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from probmask.data import load_data
from probmask.errors import InputError
from reference.memory_limit import memory_limit

NAMES = [
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("images", "labels"),
    ("x", "y"),
]


def pixels(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def two_parts(**replaced):
    """Twelve training and five test images, 6×7, of three classes."""
    arrays = {
        "train_images": pixels(12, 6, 7),
        "train_labels": np.arange(12) % 3,
        "test_images": pixels(5, 6, 7, seed=1),
        "test_labels": np.arange(5) % 3,
    }
    return arrays | replaced


def one_part(count=10, **replaced):
    return {"images": pixels(count, 6, 7), "labels": np.arange(count) % 2} | replaced


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own.npz"


def load(path, arrays, **settings):
    np.savez(path, **arrays)
    return load_data("npz", path, settings)


def refused(path, arrays=None):
    """Return the message of the InputError without the path; it is one line."""
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(InputError) as caught:
        load_data("npz", path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def parts(data):
    return [(data._parts[part].pixels, data._parts[part].labels) for part in ("train", "test")]


def assert_equal(ours, theirs):
    assert ours.dtype == torch.from_numpy(theirs).dtype
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("names", NAMES[:2])
def test_two_parts_are_exact(path, names, save):
    arrays = list(two_parts().values())
    save(path, **dict(zip(names, arrays, strict=True)))
    data = load_data("npz", str(path))
    assert (data.name, data.classes, data.image_shape) == ("npz", 3, (1, 6, 7))
    assert (data.train_size, data.val_size, data.test_size) == (12, 0, 5)
    for (images, labels), theirs in zip(parts(data), (arrays[:2], arrays[2:]), strict=True):
        assert_equal(images, theirs[0][:, None])
        assert_equal(labels, theirs[1])


@pytest.mark.parametrize("names", NAMES[2:])
def test_one_part_is_split_by_class(path, names):
    sizes = [50, 20, 9, 11]
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), sizes))
    images = np.arange(90, dtype=np.uint8)[:, None, None] + np.zeros((90, 5, 5), np.uint8)
    data = load(path, dict(zip(names, (images, labels), strict=True)))
    assert (data.train_size, data.test_size, data.classes) == (72, 18, 4)
    numbers = [part[:, 0, 0, 0].numpy() for part, _ in parts(data)]
    assert sorted(np.concatenate(numbers)) == list(range(90))
    for shown, (_, ours) in zip(numbers, parts(data), strict=True):
        np.testing.assert_array_equal(labels[shown], ours.numpy())
        assert (np.diff(shown.astype(int)) > 0).all()  # in the file's order
    counts = np.bincount(labels[numbers[1]])
    assert np.abs(counts - 0.2 * np.array(sizes)).max() < 1


def test_one_part_is_always_split_in_the_same_way(path):
    first, second = (load(path, one_part(50)) for _ in range(2))
    for ours, theirs in zip(parts(first), parts(second), strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_a_class_whose_only_image_is_a_test_image_still_counts(path):
    labels = np.repeat(np.arange(6), [6, 6, 6, 6, 6, 1])
    data = load(path, {"images": pixels(31, 4, 4), "labels": labels})
    assert 5 in data._parts["test"].labels
    assert 5 not in data._parts["train"].labels
    assert data.classes == 6


def test_too_few_images_to_split(path):
    np.savez(path, **one_part(2))
    with pytest.raises(InputError) as caught:
        load_data("npz", path)
    assert str(caught.value) == (
        "--data npz: 2 images are too few to hold out a test part; add images, or a test part."
    )


def test_the_names_of_two_parts_are_preferred(path):
    data = load(path, {**one_part(50), **two_parts()})
    assert (data.train_size, data.test_size) == (12, 5)


def test_other_arrays_are_ignored(path):
    names = np.array(["cat", None], dtype=object)
    assert load(path, two_parts(val_images=pixels(1, 2), names=names)).train_size == 12


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_channels_come_last_or_after_the_count(path, channels, order):
    planes = pixels(12, channels, 6, 7)
    other = pixels(5, channels, 6, 7, seed=1)
    for axes in ((0, 1, 2, 3), (0, 2, 3, 1)):
        train, test = (np.array(x.transpose(axes), order=order) for x in (planes, other))
        data = load(path, two_parts(train_images=train, test_images=test))
        assert data.image_shape == (channels, 6, 7)
        assert_equal(parts(data)[0][0], planes)
        assert_equal(parts(data)[1][0], other)
        batch = next(data.training(0, batch_size=12, seed=0))
        assert batch.inputs.shape == (12, channels, 6, 7)


@pytest.mark.parametrize("shape", [(12, 3, 3, 3), (12, 3, 7, 3), (12, 1, 4, 4), (12, 5, 6, 7)])
def test_ambiguous_channels(path, shape):
    assert refused(path, two_parts(train_images=pixels(*shape))) == (
        f"train_images has shape {shape}, in which the channels are ambiguous; exactly one of the "
        "second and the last dimension must be at most 4."
    )


@pytest.mark.parametrize("shape", [(12, 0, 6, 7), (12, 6, 7, 0), (12, 0, 7), (12, 6, 0)])
def test_images_without_pixels(path, shape):
    assert refused(path, two_parts(train_images=pixels(*shape))) == (
        f"train_images has shape {shape}; an image has at least one pixel."
    )


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((12, 6, 7), np.float32), "float32 with 3 dimensions"),
        (np.zeros((12, 6, 7), np.int64), "int64 with 3 dimensions"),
        (np.zeros((12, 6, 7), np.int8), "int8 with 3 dimensions"),
        (np.zeros((12, 6, 7), bool), "bool with 3 dimensions"),
        (np.zeros((12, 42), np.uint8), "uint8 with 2 dimensions"),
        (np.zeros((12, 1, 1, 6, 7), np.uint8), "uint8 with 5 dimensions"),
        (np.uint8(3), "uint8 with 0 dimensions"),
    ],
)
def test_images_that_are_not_uint8(path, array, what):
    assert refused(path, two_parts(train_images=array)) == (
        f"train_images is {what}; expected uint8 with shape N×H×W, N×H×W×C or N×C×H×W."
    )


@pytest.mark.parametrize(
    "labels",
    [
        (np.arange(12) % 3).astype(dtype)
        for dtype in ("u1", "i1", "u2", "i4", ">i4", "i8", ">i8", "u8")
    ]
    + [(np.arange(12) % 3)[:, None]],
)
def test_labels_may_have_any_integer_type(path, labels):
    data = load(path, two_parts(train_labels=labels))
    assert_equal(parts(data)[0][1], np.arange(12) % 3)


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (np.zeros(12), "float64 with shape (12,)"),
        (np.zeros(12, bool), "bool with shape (12,)"),
        (np.zeros(12, "U1"), "<U1 with shape (12,)"),
        (np.zeros((12, 3), int), "int64 with shape (12, 3)"),
        (np.int64(0), "int64 with shape ()"),
    ],
)
def test_labels_of_another_type(path, labels, what):
    assert refused(path, two_parts(train_labels=labels)) == (
        f"train_labels is {what}; expected one integer per image."
    )


@pytest.mark.parametrize("value", [-1, 100_000, 2**40, np.uint64(2**63)])
def test_labels_out_of_range(path, value):
    labels = np.full(12, value)
    labels[:3] = 0
    assert refused(path, two_parts(train_labels=labels)) == (
        f"train_labels contains {value}; expected labels from 0 to the number of classes minus 1."
    )


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (12, 11, "train_images has 12 images and train_labels has 11 labels"),
        (11, 12, "train_images has 11 images and train_labels has 12 labels"),
        (0, 0, "train_images has 0 images and train_labels has 0 labels"),
    ],
)
def test_a_wrong_number_of_labels(path, images, labels, message):
    arrays = two_parts(train_images=pixels(images, 6, 7), train_labels=np.zeros(labels, int))
    expected = "expected one label per image, and at least one image."
    assert refused(path, arrays) == f"{message}; {expected}"


def test_test_images_of_another_shape(path):
    assert refused(path, two_parts(test_images=pixels(5, 7, 6))) == (
        "training images have shape (1, 6, 7), test images (1, 7, 6) (channels, height, width); "
        "they must be equal."
    )


@pytest.mark.parametrize(
    ("labels", "which"), [([0, 1, 2, 7, 5], "labels 5, 7"), ([0, 1, 2, 7, 0], "label 7")]
)
@pytest.mark.parametrize("given", [{}, {"num_classes": 9}], ids=["counted", "given"])
def test_a_class_without_training_images(path, labels, which, given):
    assert refused(path, two_parts(test_labels=np.array(labels), **given)) == (
        f"test images have the {which}, but no training image has; add training images of these "
        "classes, or remove them."
    )


@pytest.mark.parametrize(
    ("labels", "largest", "absent"),
    [
        (np.arange(12) % 10 * 2, 18, "1, 3, 5, 7, 9, 11, 13, 15, 17"),
        (np.arange(12) % 2 + 1, 2, "0"),
        (np.arange(12) % 2 * 999, 999, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 988 more"),
    ],
    ids=["even", "from 1", "far apart"],
)
def test_labels_with_gaps(path, labels, largest, absent):
    arrays = {"images": pixels(12, 6, 7), "labels": labels}
    assert refused(path, arrays) == (
        f"labels has labels up to {largest}, but not {absent}; number the classes from 0 without "
        "gaps (np.unique(labels, return_inverse=True)[1], for all labels together), or save "
        f"num_classes={largest + 1} with the arrays if these classes have no images."
    )
    assert load(path, {**arrays, "num_classes": largest + 1}).classes == largest + 1
    assert load(path, {**arrays, "num_classes": largest + 3}).classes == largest + 3
    remapped = np.unique(labels, return_inverse=True)[1]
    assert load(path, {**arrays, "labels": remapped}).classes == len(set(labels))


def test_a_single_class(path):
    assert refused(path, one_part(labels=np.zeros(10, int))) == (
        "all labels in labels are 0; expected at least two classes."
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [(2, "2"), (100_001, "100001"), (3.0, "3.0"), (np.array(["a", "b"]), "an array of shape (2,)")],
)
def test_an_invalid_number_of_classes(path, given, shown):
    assert refused(path, two_parts(num_classes=given)) == (
        f"num_classes is {shown}; expected one integer from 3, the largest label in train_labels "
        "plus 1, to 100,000."
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_statistics_are_those_of_the_training_images(path, channels):
    train = pixels(5000, channels, 6, 7) // np.array([1, 3, 9], np.uint8)[:channels, None, None]
    arrays = two_parts(
        train_images=train,
        train_labels=np.arange(5000) % 3,
        test_images=pixels(5, channels, 6, 7, seed=1),
    )
    settings = load(path, arrays).settings
    np.testing.assert_allclose(settings.mean, (train / 255).mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(settings.std, (train / 255).std((0, 2, 3)), rtol=1e-9)
    few = load(path, arrays, train_images=100).settings
    np.testing.assert_allclose(few.mean, (train[:100] / 255).mean((0, 2, 3)), rtol=1e-12)


def test_images_come_out_with_mean_0_and_deviation_1(path):
    data = load(path, two_parts(test_images=two_parts()["train_images"][:5]))
    (batch,) = data.training(0, batch_size=12, seed=0)
    images = batch.inputs.double()
    assert abs(images.mean()) < 1e-6
    assert abs(images.std(correction=0) - 1) < 1e-6


def test_a_constant_channel_becomes_0(path):
    images = pixels(12, 3, 6, 7)
    images[:, 1] = 77
    data = load(path, two_parts(train_images=images, test_images=images[:5]))
    assert data.settings.std[1] == 1
    (batch,) = data.testing(batch_size=5)
    assert batch.inputs[:, 1].abs().max() < 1e-6
    assert batch.inputs.isfinite().all()


def test_given_statistics_are_used(path):
    data = load(path, two_parts(), mean=[0.5], std=[0.25])
    assert (data.settings.mean, data.settings.std) == ((0.5,), (0.25,))
    with pytest.raises(
        InputError, match="the images of npz have 1 channel; give one number per channel"
    ):
        load(path, two_parts(), mean=[0.5] * 3, std=[0.25] * 3)


def test_nothing_is_augmented_by_default(path):
    arrays = two_parts()
    data = load(path, arrays, mean=[0], std=[1])
    (batch,) = data.training(0, batch_size=12, seed=0)
    ours = sorted(image.tobytes() for image in (batch.inputs * 255).round().byte().numpy())
    assert ours == sorted(image.tobytes() for image in arrays["train_images"])


def test_a_path_is_required():
    with pytest.raises(InputError) as caught:
        load_data("npz")
    assert str(caught.value) == "--data npz: needs a file; pass it as --data-dir FILE.npz."


def test_a_path_that_is_not_a_file(tmp_path):
    assert refused(tmp_path) == "cannot be read (Is a directory); expected an .npz file."
    absent = tmp_path / "absent.npz"
    assert refused(absent) == "cannot be read (No such file or directory); expected an .npz file."


def test_unknown_names_raise_with_the_expected_ones(path):
    expected = (
        "expected arrays named train_images, train_labels, test_images, test_labels; or x_train, "
        "y_train, x_test, y_test; or images, labels; or x, y."
    )
    assert refused(path, {"x_train": pixels(3, 2, 2), "l\na": np.zeros(3)}) == (
        f"contains 'x_train', 'l\\na'; {expected}"
    )
    assert refused(path, {}) == f"contains no arrays; {expected}"


def test_a_single_array(path):
    with path.open("wb") as file:
        np.save(file, pixels(3, 2, 2))
    assert refused(path) == "contains one array; save images and labels with np.savez."


class Canary:
    """Create a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["train_images", "train_labels"])
def test_an_array_of_objects_is_an_error_and_not_executed(path, tmp_path, name):
    canary = tmp_path / "canary"
    trap = np.array([Canary(canary)], dtype=object)
    message = refused(path, two_parts(**{name: trap}))
    assert f"is not an .npz file of plain arrays ('{name}.npy' contains Python objects)" in message
    path.write_bytes(pickle.dumps(trap))
    assert "is not an .npz file of plain arrays" in refused(path)
    assert not canary.exists()
    pickle.loads(path.read_bytes())
    assert canary.exists()  # the trap works


def write_members(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy(header, data=b""):
    """The bytes of an array with the given header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_a_member_that_is_not_an_array(path):
    write_members(path, images=b"abc", labels=b"abc")
    assert refused(path).startswith("is not an .npz file of plain arrays (EOF: reading magic")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("{'descr': (", "EOF in multi-line statement"),
        ("{'descr': '|u1'}", "Header does not contain the correct keys"),
        *(
            (
                f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}",
                "'images.npy' does not have the size that its header declares",
            )
            for shape in ((-3,), (9, 5, 5), (2**33, 1, 1), (2**100, 2**100, 1))
        ),
    ],
)
def test_a_damaged_array(path, header, reason):
    labels = saved(np.zeros(9, int))
    write_members(path, **{"images.npy": npy(header), "labels.npy": labels})
    message = refused(path)
    assert message.startswith("is not an .npz file of plain arrays (")
    assert reason in message


def declare_size(path, old, new):
    """Change the size of a member in the zip archive's headers."""
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<I", old), struct.pack("<I", new)))


def test_a_bomb_is_refused_within_bounded_memory(path):
    """The sizes count that are declared in the archive; more is never read from a member."""
    np.savez_compressed(path, images=np.zeros((2**20, 1), np.uint8), labels=np.zeros(9, int))
    declare_size(path, 2**20 + 128, 3 * 10**9)
    with memory_limit(100_000_000):
        message = refused(path)
    assert message == (
        "the arrays take 3,000,000,200 bytes, but a compressed file of this size may contain at "
        "most 268,435,456; save them with np.savez instead of np.savez_compressed."
    )


def test_an_array_that_does_not_fit_in_memory(path, monkeypatch):
    def read_array(*_, **__):
        raise MemoryError("Unable to allocate 8 GiB")

    monkeypatch.setattr(np.lib.format, "read_array", read_array)
    assert refused(path, one_part()) == (
        "the arrays do not fit in memory (Unable to allocate 8 GiB)."
    )


def test_another_compression(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("images.npy", saved(pixels(9, 5, 5)))
        archive.writestr("labels.npy", saved(np.arange(9)))
    assert "('images.npy' has an unknown compression)" in refused(path)


def test_a_fifo_is_not_read(path):
    os.mkfifo(path)
    assert refused(path) == "is not a regular file; expected an .npz file."


def test_statistics_of_large_images_need_little_memory(path):
    """Computed at once in fp64, they took 16 times the memory of the images."""
    images = np.zeros((12, 512, 512, 4), np.uint8)
    np.savez(path, images=images, labels=np.arange(12) % 2)
    with memory_limit(8 * images.nbytes):
        assert load_data("npz", path).settings.mean == (0.0,) * 4


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.99])
def test_a_damaged_file(path, save, share):
    save(path, **one_part(100))
    whole = path.read_bytes()
    where = int(share * len(whole))
    path.write_bytes(whole[:where])
    assert "is not an .npz file of plain arrays (" in refused(path)
    if 0.2 < share < 0.8:  # within the pixels; elsewhere a byte may be unused
        path.write_bytes(whole[:where] + bytes([whole[where] ^ 4]) + whole[where + 1 :])
        assert "is not an .npz file of plain arrays (" in refused(path)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\3\4", b"PK\5\6", b"\x93NUMPY", bytes(99)]
)
def test_garbage(path, content):
    path.write_bytes(content)
    assert "is not an .npz file of plain arrays (" in refused(path)


def test_an_encrypted_file(path):
    np.savez(path, **one_part())
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        where = content.find(signature)
        while where >= 0:
            content[where + offset] |= 1
            where = content.find(signature, where + 1)
    path.write_bytes(content)
    assert "is encrypted, password required" in refused(path)
