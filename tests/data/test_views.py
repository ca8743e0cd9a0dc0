"""What worker processes hand back: views by key, and failures as data."""

import pickle

import pytest
import torch

from data.image_folders import make_classes
from probmask.data.folder import list_folder
from probmask.data.views import CentralViews, Failure, Loaded, RandomViews, View, collate


@pytest.fixture
def files(tmp_path):
    """Ten images, of which the fourth, the fifth and the last cannot be read."""
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


def test_for_an_unreadable_file_comes_the_next_one_with_its_own_label(files):
    view = RandomViews(files, 8, seed=0)[2, 3]
    assert failed(view) == ["a/003.jpg", "a/004.jpg"]
    assert view.label == 1
    assert torch.equal(view.pixels, RandomViews(files, 8, seed=0)[2, 5].pixels)


def test_after_the_last_file_comes_the_first(files):
    view = RandomViews(files, 8, seed=0)[2, 9]
    assert failed(view) == ["b/004.jpg"]
    assert view.label == 0
    assert torch.equal(view.pixels, RandomViews(files, 8, seed=0)[2, 0].pixels)


def test_where_nothing_can_be_read_the_search_ends(tmp_path):
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


def test_of_an_unreadable_file_there_is_no_central_view(files):
    views = CentralViews(files, 8)
    assert views[0].pixels.shape == (3, 8, 8)
    assert (views[0].label, views[5].label) == (0, 1)
    assert views[0].failures == ()
    missing = views[3]
    assert missing.pixels is None
    assert failed(missing) == ["a/003.jpg"]
    assert "UnidentifiedImageError" in missing.failures[0].reason


def test_a_batch_is_put_together_with_its_failures():
    failure = Failure("a.jpg", "broken")
    grey = [torch.full((3, 2, 2), level, dtype=torch.uint8) for level in (5, 6)]
    batch = collate([View(grey[0], 1), View(None, 2, (failure,)), View(grey[1], 3, (failure,))])
    assert torch.equal(batch.pixels, torch.stack(grey))
    assert batch.labels.tolist() == [1, 3]
    assert batch.missing == 1
    assert batch.failures == (failure, failure)


def test_a_batch_of_nothing():
    batch = collate([View(None, 2, (Failure("a.jpg", "broken"),))])
    assert len(batch.labels) == len(batch.pixels) == 0
    assert batch.labels.dtype == torch.long
    assert batch.missing == 1


def test_views_and_batches_travel_between_processes(files):
    """Where worker processes are not forked, the views are sent to them."""
    views = RandomViews(files, 8, seed=0)
    sent = pickle.loads(pickle.dumps(views))
    assert torch.equal(sent[0, 3].pixels, views[0, 3].pixels)
    batch = pickle.loads(pickle.dumps(collate([views[0, 3]])))
    assert isinstance(batch, Loaded)
    assert len(batch.failures) == 2
