"""Errors that a caller can act on: what was called, with which value, which rule it breaks."""


class InputError(ValueError):
    """Something handed to probmask is wrong; the command line turns it into exit code 2."""


class ArtifactError(InputError):
    """A file is not an intact probmask artifact."""


class CheckpointError(InputError):
    """A file is not an intact checkpoint of the run at hand."""


class NonFiniteError(InputError):
    """A NaN or an infinity turned up where only finite numbers have a meaning."""


class DownloadError(OSError):
    """A file did not come over the network, or not as it was released; exit code 1."""


class FailedRunsError(OSError):
    """Some runs of a sweep failed; the others are done; exit code 1."""


class LayerCollapseWarning(UserWarning):
    """A layer has lost, or is about to lose, all of its weights."""


class EarlyEndWarning(UserWarning):
    """Training ended while its budget was still falling, and many weights went at once."""


class UnreadableImageWarning(UserWarning):
    """An image file cannot be read, and is left out."""


class AbsentClassWarning(UserWarning):
    """A class of the data set has no training image, and so cannot be learnt."""
