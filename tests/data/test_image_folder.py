"""Listing a directory of images: order, labels, ignored files, and errors."""

import os
import sys

import pytest
import torch

from data.image_folders import make_classes, write_color
from probmask.data.image_folder import Files, list_folder
from probmask.data.image_views import CentralViews
from probmask.errors import InputError


def listed(directory, **options):
    return list_folder("--data-dir", directory, **options)


def paths(files):
    return [str(files.path(index).relative_to(files.root)) for index in range(len(files))]


def refused(directory):
    with pytest.raises(InputError) as caught:
        listed(directory)
    message = str(caught.value)
    assert message.startswith(f"--data-dir {directory}")
    assert "\n" not in message
    return message


def test_classes_and_files_are_sorted_by_name(tmp_path):
    for name in ("b/2.jpg", "b/10.jpg", "a/z.jpg", "B/x.jpg"):
        write_color(tmp_path / name, 0)
    found = listed(tmp_path)
    assert found.class_names == ("B", "a", "b")
    assert paths(found.parts["train"]) == ["B/x.jpg", "a/z.jpg", "b/10.jpg", "b/2.jpg"]
    assert found.parts["train"].labels.tolist() == [0, 1, 2, 2]
    assert found.parts["train"].labels.dtype == torch.int64


def test_extensions_are_case_insensitive(tmp_path):
    taken = ["a.JPEG", "b.Jpg", "c.png", "d.PNG", "e.webp", "f.tiff", "g.bmp", "h.gif", "i.ppm"]
    for name in (*taken, "j.txt", "k", "jpg", "l.jpg.part", "m.npy"):
        write_color(tmp_path / "a" / name, 0)
    write_color(tmp_path / "b" / "x.jpg", 0)
    assert paths(listed(tmp_path).parts["train"]) == [*(f"a/{name}" for name in taken), "b/x.jpg"]


def test_hidden_and_stray_files_are_ignored(tmp_path):
    make_classes(tmp_path, {"a": 1, "b": 1, ".thumbnails": 2, "a/deeper": 1})
    write_color(tmp_path / "a" / ".hidden.jpg", 0)
    write_color(tmp_path / "a" / "._000.jpg", 0)  # macOS creates these on other file systems
    write_color(tmp_path / "stray.jpg", 0)
    found = listed(tmp_path)
    assert found.class_names == ("a", "b")
    assert paths(found.parts["train"]) == ["a/000.jpg", "a/deeper/000.jpg", "b/000.jpg"]


def test_links_are_followed(tmp_path):
    make_classes(tmp_path / "store", {"a": 1, "b": 2})
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "link.jpg").symlink_to(tmp_path / "store" / "a" / "000.jpg")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "store" / "b", target_is_directory=True)
    (tmp_path / "data" / "nowhere").symlink_to(tmp_path / "gone")
    files = listed(tmp_path / "data").parts["train"]
    assert paths(files) == ["a/link.jpg", "b/000.jpg", "b/001.jpg"]
    assert all(files.path(index).is_file() for index in range(3))


def test_each_directory_is_listed_once(tmp_path):
    """A link to a directory above itself would repeat the images, or never end."""
    make_classes(tmp_path / "train", {"a": 2, "b/deep": 1})
    make_classes(tmp_path / "test", {"a": 1})
    (tmp_path / "store").mkdir()
    write_color(tmp_path / "store" / "x.jpg", 0)
    above = {"train/a/1": "train/a", "train/a/2": "train", "train/b/deep/3": ".", "store/4": "/"}
    for link, target in above.items():
        (tmp_path / link).symlink_to((tmp_path / target).resolve(), target_is_directory=True)
    for link in ("train/a/5", "train/a/6"):
        (tmp_path / link).symlink_to(tmp_path / "store", target_is_directory=True)
    (tmp_path / "train/a/7.jpg").symlink_to("7.jpg")
    files = listed(tmp_path).parts["train"]
    expected = ["a/000.jpg", "a/001.jpg", "a/5/x.jpg", "a/7.jpg", "b/deep/000.jpg"]
    assert paths(files) == expected


@pytest.mark.parametrize(("link", "target"), [("b", "a"), ("b/more", "a"), ("b/more", "a/deep")])
def test_a_directory_of_two_classes(tmp_path, link, target):
    make_classes(tmp_path, {"a": 1, "a/deep": 1, "c": 1})
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / target, target_is_directory=True)
    assert refused(tmp_path) == (
        f"--data-dir {tmp_path / link}: is a link to a folder of the class 'a', so its images "
        "would have two labels; remove the link."
    )


def test_names_in_any_script_are_kept(tmp_path):
    names = [
        "Äpfel/grün.jpg",
        "кот/один.jpg",
        "猫/🐈.jpg",
        "a b/c d.jpg",
        "long/" + "x" * 200 + ".jpg",
    ]
    for name in names:
        write_color(tmp_path / name, 0)
    files = listed(tmp_path).parts["train"]
    assert sorted(paths(files)) == sorted(names)
    assert all(files.path(index).is_file() for index in range(len(files)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are always text")
def test_names_that_are_not_valid_text_are_kept(tmp_path):
    for name in (b"a/\xff\xfe.jpg", b"\xe9/x.jpg"):
        write_color(tmp_path / os.fsdecode(name), 0)
    found = listed(tmp_path)
    files = found.parts["train"]
    assert all(files.path(index).is_file() for index in range(2))
    assert found.class_names == ("a", r"\udce9")  # a record holds valid text only
    (tmp_path / os.fsdecode(b"\xe9/x.jpg")).write_bytes(b"damaged")
    (failure,) = CentralViews(files, 8)[1].failures
    assert failure.path == rf"{tmp_path}/\udce9/x.jpg"


def test_files_are_indexed_by_numbers_or_booleans(tmp_path):
    make_classes(tmp_path, {"a": 2, "b": 2})
    files = listed(tmp_path).parts["train"]
    for chosen in (torch.tensor([1, 3]), torch.tensor([False, True, False, True])):
        some = files[chosen]
        assert isinstance(some, Files)
        assert paths(some) == ["a/001.jpg", "b/001.jpg"]
        assert some.labels.tolist() == [0, 1]
    assert len(files[torch.tensor([], dtype=torch.long)]) == 0


# --- layouts


@pytest.mark.parametrize("parts", [("val",), ("test",), ("val", "test")])
def test_parts_are_found_by_name(tmp_path, parts):
    make_classes(tmp_path / "train", {"a": 3, "b": 2})
    for part in parts:
        make_classes(tmp_path / part, {"a": 1, "b": 1})
    found = listed(tmp_path)
    assert found.class_names == ("a", "b")
    assert {name: len(files) for name, files in found.parts.items()} == {
        "train": 5,
        **dict.fromkeys(parts, 2),
    }
    for name, files in found.parts.items():
        assert files.root == tmp_path / name


def test_labels_follow_the_classes_of_the_training_images(tmp_path):
    """A class that is missing in another part does not shift the labels."""
    make_classes(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    make_classes(tmp_path / "val", {"b": 1, "c": 2})
    assert listed(tmp_path).parts["val"].labels.tolist() == [1, 2, 2]


def test_only_requested_parts_are_listed(tmp_path):
    make_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_color(tmp_path / "test" / "flat.jpg", 0)
    assert set(listed(tmp_path, parts=("val",)).parts) == {"train"}


# --- errors


def test_a_path_that_is_not_a_directory(tmp_path):
    assert "is not a directory" in refused(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refused(tmp_path / "file")


@pytest.mark.parametrize(
    ("count", "message"), [(0, "contains 0 folders;"), (1, "contains 1 folder;")]
)
@pytest.mark.parametrize("below", [".", "train"])
def test_fewer_than_two_classes(tmp_path, count, message, below):
    (tmp_path / below).mkdir(exist_ok=True)
    make_classes(tmp_path / below, dict.fromkeys(["a", "b"][:count], 1))
    assert message in refused(tmp_path)


def test_a_class_without_images(tmp_path):
    make_classes(tmp_path, {"a": 1, "b": 0})
    message = refused(tmp_path)
    assert message.startswith(f"--data-dir {tmp_path / 'b'}: contains no images;")
    assert ".jpeg, .jpg" in message


def test_a_class_that_is_not_in_the_training_images(tmp_path):
    make_classes(tmp_path / "train", {"a": 1, "b": 1})
    make_classes(tmp_path / "val", {"a": 1, "dog": 1})
    message = refused(tmp_path)
    assert f"{tmp_path / 'val'}: folder 'dog' is not a class" in message


def test_a_part_without_class_folders(tmp_path):
    """ImageNet's validation images are distributed like this."""
    make_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_color(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG", 0)
    assert f"{tmp_path / 'val'}: contains no class folders" in refused(tmp_path)


def test_parts_without_training_images(tmp_path):
    for part in ("val", "test"):
        make_classes(tmp_path / part, {"a": 1, "b": 1})
    assert "contains val/ but no train/; put the training images in train/." in refused(tmp_path)
