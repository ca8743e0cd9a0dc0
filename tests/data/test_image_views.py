"""Views of image files: decoding, crops against reference code, and unreadable files as data."""

import collections
import contextlib
import io
import math
import os
import pickle
import random
import socket
import statistics
import struct
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.image_folders import make_classes
from probmask.data.image_folder import list_folder
from probmask.data.image_views import (
    CentralViews,
    Failure,
    Loaded,
    RandomViews,
    UnreadableImageError,
    View,
    central_view,
    collate,
    decode,
    random_box,
    random_view,
)
from reference.memory_limit import memory_limit


def noise(width, height, channels=3, *, seed=0):
    """Random pixels, so that a wrong crop cannot go unnoticed."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def photograph(width, height, *, seed=0):
    return Image.fromarray(noise(width, height, seed=seed))


def encoded(image, form, **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def decoded(path):
    image = decode(path)
    assert image.mode == "RGB"
    return np.array(image)


def spread(gray):
    """Gray levels as three equal channels."""
    return np.repeat(gray[:, :, None], 3, axis=2)


# --- kinds of images


def test_rgb_stays_as_it_is(tmp_path):
    photograph(7, 5).save(tmp_path / "a.png")
    assert np.array_equal(decoded(tmp_path / "a.png"), noise(7, 5))


def test_a_jpeg_is_close_to_its_original(tmp_path):
    slope = np.linspace(0, 255, 24).astype(np.uint8)
    pixels = np.stack(np.broadcast_arrays(slope[:, None], slope[None, ::-1], np.uint8(90)), axis=2)
    Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "a.JPEG", "JPEG", quality=95)
    assert np.abs(decoded(tmp_path / "a.JPEG").astype(int) - pixels).mean() < 4


def test_gray_becomes_three_equal_channels(tmp_path):
    gray = noise(6, 4)[:, :, 0]
    Image.fromarray(gray).save(tmp_path / "a.png")
    assert np.array_equal(decoded(tmp_path / "a.png"), spread(gray))


@pytest.mark.parametrize(
    ("ink", "color"),
    [((0, 0, 0, 0), (255, 255, 255)), ((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0))],
)
def test_the_inks_of_a_cmyk_jpeg_become_light(tmp_path, ink, color):
    """ImageNet has such files, and the sign of the inks is easy to get wrong."""
    Image.new("CMYK", (16, 16), ink).save(tmp_path / "a.jpg", quality=95)
    assert np.abs(decoded(tmp_path / "a.jpg").astype(int) - color).max() <= 8


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_a_palette_gives_its_colors_transparent_or_not(tmp_path, transparency):
    """Pillow warns about the last case; a warning that is not suppressed fails the test."""
    numbers = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8)
    colors = [(10, 20, 30), (200, 100, 0), (0, 0, 255)]
    image = Image.new("P", (3, 2))
    image.putdata(numbers.flatten().tolist())
    image.putpalette([value for color in colors for value in color])
    options = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "a.png", **options)
    assert np.array_equal(decoded(tmp_path / "a.png"), np.array(colors)[numbers])


def test_rgba_keeps_its_colors(tmp_path):
    pixels = noise(6, 4, channels=4)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decoded(tmp_path / "a.png"), pixels[:, :, :3])


def test_gray_with_transparency(tmp_path):
    pixels = noise(6, 4, channels=2)
    Image.merge("LA", [Image.fromarray(pixels[:, :, channel]) for channel in (0, 1)]).save(
        tmp_path / "a.png"
    )
    assert np.array_equal(decoded(tmp_path / "a.png"), spread(pixels[:, :, 0]))


def test_one_bit_is_black_or_white(tmp_path):
    bits = noise(9, 4)[:, :, 0] > 127
    Image.fromarray(bits).save(tmp_path / "a.png")
    assert np.array_equal(decoded(tmp_path / "a.png"), spread(bits * np.uint8(255)))


@pytest.mark.parametrize("form", ["png", "tif", "pgm"])
def test_sixteen_bits_keep_their_upper_eight(tmp_path, form):
    """Pillow alone would turn everything above 255 of 65,535 white."""
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    path = tmp_path / f"a.{form}"
    if form == "pgm":
        path.write_bytes(b"P5\n8 8\n65535\n" + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(path)
    assert np.array_equal(decoded(path), spread((levels >> 8).astype(np.uint8)))


def test_the_format_is_detected_from_the_content(tmp_path):
    """One of ImageNet's .JPEG files is a PNG."""
    photograph(7, 5).save(tmp_path / "a.JPEG", "PNG")
    assert np.array_equal(decoded(tmp_path / "a.JPEG"), noise(7, 5))


def test_an_animation_is_read_as_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert np.array_equal(decoded(tmp_path / "a.gif"), np.array(frames[0]))


# --- files that are not images


JPEG = encoded(photograph(24, 20), "JPEG")


@pytest.mark.parametrize("length", [*range(0, len(JPEG), 7), len(JPEG) - 3])
def test_a_part_of_a_jpeg_is_unreadable(tmp_path, length):
    (tmp_path / "a.jpg").write_bytes(JPEG[:length])
    with pytest.raises(UnreadableImageError):
        decode(tmp_path / "a.jpg")


@pytest.mark.parametrize(
    ("form", "kind"), [("PNG", "RGB"), ("PNG", "I;16"), ("GIF", "P"), ("TIFF", "RGB"), ("BMP", "L")]
)
def test_the_first_half_of_an_image_is_unreadable(tmp_path, form, kind):
    whole = encoded(Image.new(kind, (50, 50), 99) if kind != "RGB" else photograph(50, 50), form)
    (tmp_path / "whole.jpg").write_bytes(whole)
    assert decoded(tmp_path / "whole.jpg").shape == (50, 50, 3)
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImageError):
        decode(tmp_path / "half.jpg")


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_gives_an_image_or_the_error(tmp_path_factory, place, value):
    content = bytearray(JPEG)
    content[place % len(JPEG)] = value
    path = tmp_path_factory.mktemp("changed") / "a.jpg"
    path.write_bytes(content)
    with contextlib.suppress(UnreadableImageError):
        assert decode(path).mode == "RGB"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "UnidentifiedImageError"),
        (b"This is a text.\n", "UnidentifiedImageError"),
        (b"\0" * 1000, "UnidentifiedImageError"),
        (b"\xff\xd8\xff", "UnidentifiedImageError"),
        ("gone", "FileNotFoundError"),
    ],
)
def test_the_error_names_the_cause_but_not_the_path(tmp_path, content, kind):
    path = tmp_path / "x.jpg"
    if content != "gone":
        path.write_bytes(content)
    with pytest.raises(UnreadableImageError, match=rf"^{kind}: .*\w$") as caught:
        decode(path)
    assert "x.jpg" not in str(caught.value)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [os.mkdir, os.mkfifo, make_socket, partial(os.symlink, "/dev/zero")],
    ids=["directory", "fifo", "socket", "device"],
)
def test_only_regular_files_are_read(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    make("x.jpg")
    with pytest.raises(UnreadableImageError, match=r"^it is not a regular file$"):
        decode(tmp_path / "x.jpg")


def test_a_format_that_starts_a_program_is_not_read(tmp_path):
    photograph(9, 5).save(tmp_path / "a.png", "EPS")
    with pytest.raises(UnreadableImageError, match="UnidentifiedImageError"):
        decode(tmp_path / "a.png")


def png(width, height, rows):
    """A gray PNG of 16 bits, of which only some rows are stored."""
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(rows * (1 + 2 * width)), 1),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )


@pytest.mark.parametrize("side", [9460, 14_000, 2**31 - 1])
def test_a_decompression_bomb_is_unreadable_above_the_limit_of_pillow(tmp_path, side):
    (tmp_path / "a.png").write_bytes(png(side, side, rows=0))
    with memory_limit(50_000_000), pytest.raises(UnreadableImageError) as caught:
        decode(tmp_path / "a.png")
    assert str(caught.value) == "it has more than 89,478,485 pixels; scale it down"


def test_sixteen_bits_take_little_more_memory_than_rgb(tmp_path):
    (tmp_path / "a.png").write_bytes(png(4000, 4000, rows=4000))
    with memory_limit(14 * 4000 * 4000):
        assert decode(tmp_path / "a.png").size == (4000, 4000)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "a.webp").open("wb") as file:
        file.write(b"RIFF\xff\xff\xff\xffWEBP")
        file.truncate(10**12)  # sparse: it takes no space
    with pytest.raises(UnreadableImageError, match=r"^it has more than 1,000,000,000 bytes"):
        decode(tmp_path / "a.webp")


def test_an_interrupt_is_not_mistaken_for_a_damaged_file(tmp_path, monkeypatch):
    def interrupted(path, formats):
        raise KeyboardInterrupt

    photograph(4, 4).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode(tmp_path / "a.png")


# --- random views


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_a_random_box_is_inside_the_image(width, height, seed):
    left, top, right, bottom = random_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(st.integers(100, 800), st.integers(100, 800), st.integers(0, 2**32))
def test_area_and_ratio_of_a_random_box_are_within_bounds(width, height, seed):
    """Up to rounding to whole pixels; this includes the fallback for narrow images."""
    left, top, right, bottom = random_box(width, height, random.Random(seed))
    across, down = right - left, bottom - top
    assert (across + 0.5) * (down + 0.5) >= 0.08 * width * height
    assert (across + 0.5) / (down - 0.5) >= 3 / 4
    assert (across - 0.5) / (down + 0.5) <= 4 / 3


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1, 1), (0, 0, 1, 1)),
        ((1, 1000), (0, 499, 1, 500)),
        ((1000, 1), (499, 0, 500, 1)),
        ((30, 3000), (0, 1480, 30, 1520)),
        ((3000, 30), (1480, 0, 1520, 30)),
    ],
)
def test_too_narrow_an_image_gives_its_center(size, box):
    """No box of 8 % of the area and an allowed ratio fits into these."""
    boxes = {random_box(*size, random.Random(seed)) for seed in range(50)}
    assert boxes == {box}


def test_area_and_log_ratio_of_boxes_are_uniform():
    boxes = [random_box(1000, 1000, random.Random(seed)) for seed in range(4000)]
    widths = [right - left for left, _, right, _ in boxes]
    heights = [bottom - top for _, top, _, bottom in boxes]
    logs = [math.log(width / height) for width, height in zip(widths, heights, strict=True)]
    assert abs(statistics.mean(logs)) < 0.02  # sd 0.166 / sqrt(4000), eight of them
    # In a square image, a box of nearly the whole area must be nearly square. Others are drawn
    # again, so areas are uniform only while every ratio fits, up to three quarters.
    areas = [width * height / 1e6 for width, height in zip(widths, heights, strict=True)]
    assert 0.08 <= min(areas) < 0.09
    assert 0.95 < max(areas) <= 1
    quarters = collections.Counter(int((area - 0.08) / 0.1675) for area in areas if area < 0.75)
    counts = [quarters[quarter] for quarter in range(4)]
    assert max(counts) - min(counts) < 200  # of about 760 each; sd of a difference is 35


def test_the_position_of_boxes_is_uniform():
    boxes = [random_box(1000, 1000, random.Random(seed)) for seed in range(4000)]
    for near, far in ((0, 2), (1, 3)):
        rooms = [(box[near], 1000 - (box[far] - box[near])) for box in boxes]
        places = [place / room for place, room in rooms if room > 100]
        assert abs(statistics.mean(places) - 0.5) < 0.03
        assert abs(statistics.pstdev(places) - math.sqrt(1 / 12)) < 0.02


def test_boxes_reach_every_edge():
    boxes = {random_box(3, 3, random.Random(seed)) for seed in range(500)}
    squares = {
        (left, top) for left, top, right, bottom in boxes if right - left == bottom - top == 2
    }
    assert squares == {(0, 0), (0, 1), (1, 0), (1, 1)}


def random_view_reference(pixels, size, rng):
    """Compute the view with NumPy, drawing random numbers in the same order."""
    height, width, _ = pixels.shape
    left, top, right, bottom = random_box(width, height, rng)
    part = Image.fromarray(np.ascontiguousarray(pixels[top:bottom, left:right]))
    view = np.array(part.resize((size, size), Image.Resampling.BILINEAR))
    if rng.random() < 0.5:
        view = view[:, ::-1]
    return torch.from_numpy(view.transpose(2, 0, 1).copy())


@pytest.mark.parametrize("size", [(40, 30), (5, 9), (2, 200), (16, 16)])
def test_random_views_agree_with_the_reference(size):
    for seed in range(20):
        view = random_view(photograph(*size), 16, random.Random(seed))
        assert view.dtype == torch.uint8
        assert view.shape == (3, 16, 16)
        assert view.is_contiguous()
        assert torch.equal(view, random_view_reference(noise(*size), 16, random.Random(seed)))


def test_half_of_the_views_are_mirrored():
    slope = Image.fromarray(spread(np.tile(np.arange(200, dtype=np.uint8), (200, 1))))
    views = [random_view(slope, 8, random.Random(seed)) for seed in range(400)]
    mirrored = sum(bool(view[0, 0, 0] > view[0, 0, -1]) for view in views)
    assert abs(mirrored - 200) < 50  # five standard deviations


def test_a_random_view_depends_only_on_the_generator():
    image = photograph(40, 30)
    views = [random_view(image, 8, random.Random(seed)) for seed in (0, 0, 1)]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    assert np.array_equal(np.array(image), noise(40, 30))


# --- central views


def central_view_reference(image, size):
    """The arithmetic that torchvision documents for Resize(256) and CenterCrop(224)."""
    resize = round(256 * size / 224)
    short, long = min(image.size), max(image.size)
    new_short, new_long = resize, int(resize * long / short)
    width, height = (new_short, new_long) if image.width <= image.height else (new_long, new_short)
    scaled = np.array(image.resize((width, height), Image.Resampling.BILINEAR))
    top = round((height - size) / 2.0)
    left = round((width - size) / 2.0)
    return torch.from_numpy(scaled[top : top + size, left : left + size].transpose(2, 0, 1).copy())


@pytest.mark.parametrize("size", [224, 32, 7, 1])
@pytest.mark.parametrize(
    "shape", [(500, 375), (375, 500), (256, 256), (224, 224), (3, 4), (1, 1), (2, 31), (31, 2)]
)
def test_central_views_agree_with_the_reference(shape, size):
    image = photograph(*shape)
    view = central_view(image, size)
    assert view.dtype == torch.uint8
    assert view.shape == (3, size, size)
    assert view.is_contiguous()
    assert torch.equal(view, central_view_reference(image, size))


@pytest.mark.parametrize("shape", [(196, 294), (343, 196), (98, 147), (214, 321)])
def test_the_longer_side_is_exact_where_a_factor_would_be_rounded(shape):
    """256 / 196 * 294 is 383.99…, but 256 * 294 / 196 is 384."""
    image = photograph(*shape)
    assert torch.equal(central_view(image, 224), central_view_reference(image, 224))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_central_views_of_any_shape(width, height, size):
    view = central_view(photograph(width, height), size)
    assert view.shape == (3, size, size)
    if max(width, height) <= 16 * min(width, height):
        assert torch.equal(view, central_view_reference(photograph(width, height), size))


@pytest.mark.parametrize("shape", [(1, 100), (100, 1), (2, 150)])
def test_shortening_a_long_image_keeps_its_center(shape):
    image = photograph(*shape)
    assert torch.equal(central_view(image, 224), central_view_reference(image, 224))


@pytest.mark.parametrize("shape", [(1, 65_000), (65_000, 1)])
def test_the_view_of_an_extremely_long_image_fits_in_memory(shape):
    """Scaled as a whole, it would have four billion pixels."""
    view = central_view(Image.new("RGB", shape, (1, 2, 3)), 224)
    assert torch.equal(view, torch.tensor([1, 2, 3]).view(3, 1, 1).expand(3, 224, 224))


# --- views of files


@pytest.fixture
def files(tmp_path):
    """Ten images; the fourth, the fifth and the last cannot be read."""
    make_classes(tmp_path, {"a": 5, "b": 5}, noise=True)
    for broken in ("a/003.jpg", "a/004.jpg", "b/004.jpg"):
        (tmp_path / broken).write_bytes(b"broken")
    return list_folder("--data-dir", tmp_path).parts["train"]


def failed(view):
    return ["/".join(failure.path.split("/")[-2:]) for failure in view.failures]


def test_a_random_view_is_a_function_of_seed_place_and_file(files):
    views = RandomViews(files, 8, seed=1)
    first = views[7, 0].pixels
    assert first.dtype == torch.uint8
    assert first.shape == (3, 8, 8)
    assert torch.equal(first, RandomViews(files, 8, seed=1)[7, 0].pixels)
    for other in (views[8, 0], views[7, 1], RandomViews(files, 8, seed=2)[7, 0]):
        assert not torch.equal(first, other.pixels)


def test_the_next_file_replaces_an_unreadable_one_with_its_own_label(files):
    view = RandomViews(files, 8, seed=0)[2, 3]
    assert failed(view) == ["a/003.jpg", "a/004.jpg"]
    assert view.label == 1
    assert torch.equal(view.pixels, RandomViews(files, 8, seed=0)[2, 5].pixels)


def test_the_first_file_follows_the_last(files):
    view = RandomViews(files, 8, seed=0)[2, 9]
    assert failed(view) == ["b/004.jpg"]
    assert view.label == 0
    assert torch.equal(view.pixels, RandomViews(files, 8, seed=0)[2, 0].pixels)


def test_the_search_ends_if_nothing_can_be_read(tmp_path):
    make_classes(tmp_path, {"a": 70, "b": 70})
    for path in tmp_path.rglob("*.jpg"):
        path.unlink()
        path.touch()
    files = list_folder("--data-dir", tmp_path).parts["train"]
    view = RandomViews(files, 8, seed=0)[0, 0]
    assert view.pixels is None
    assert len(view.failures) == 100
    some = files[torch.arange(3)]
    assert len(RandomViews(some, 8, seed=0)[0, 0].failures) == 3


def test_an_unreadable_file_has_no_central_view(files):
    views = CentralViews(files, 8)
    assert views[0].pixels.shape == (3, 8, 8)
    assert (views[0].label, views[5].label) == (0, 1)
    assert views[0].failures == ()
    missing = views[3]
    assert missing.pixels is None
    assert failed(missing) == ["a/003.jpg"]
    assert "UnidentifiedImageError" in missing.failures[0].reason


def test_a_batch_has_the_failures_of_its_views():
    failure = Failure("a.jpg", "broken")
    gray = [torch.full((3, 2, 2), level, dtype=torch.uint8) for level in (5, 6)]
    batch = collate([View(gray[0], 1), View(None, 2, (failure,)), View(gray[1], 3, (failure,))])
    assert torch.equal(batch.pixels, torch.stack(gray))
    assert batch.labels.tolist() == [1, 3]
    assert batch.missing == 1
    assert batch.failures == (failure, failure)


def test_a_batch_without_readable_files():
    batch = collate([View(None, 2, (Failure("a.jpg", "broken"),))])
    assert len(batch.labels) == len(batch.pixels) == 0
    assert batch.labels.dtype == torch.long
    assert batch.missing == 1


def test_views_and_batches_can_be_pickled(files):
    """Worker processes that are not forked receive the views as pickles."""
    views = RandomViews(files, 8, seed=0)
    sent = pickle.loads(pickle.dumps(views))
    assert torch.equal(sent[0, 3].pixels, views[0, 3].pixels)
    batch = pickle.loads(pickle.dumps(collate([views[0, 3]])))
    assert isinstance(batch, Loaded)
    assert len(batch.failures) == 2
