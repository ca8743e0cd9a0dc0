"""What there is to choose from: every data set with its size."""

from typing import Any

from probmask.data import DATA, DataSet
from probmask.data.remotes import REMOTES
from probmask.data.splits import validation_count


def describe_data() -> list[dict[str, Any]]:
    """Describe each data set; what depends on the user's own files is None.

    ``train`` are the training images in all, of which ``validation`` are held out by default.
    """
    return [_describe(name, entry) for name, entry in DATA.items()]


def _describe(name: str, entry: DataSet) -> dict[str, Any]:
    release = entry.release
    remotes = REMOTES.get(name, ())
    return {
        "name": name,
        "summary": entry.summary,
        "image_shape": list(release.image_shape) if release else None,
        "classes": release.classes if release else None,
        "train": release.train_images if release else None,
        "validation": validation_count(release.train_images) if release else None,
        "test": release.test_images if release else None,
        "download_bytes": sum(remote.size for remote in remotes) or None,
    }
