"""Exceptions and warnings of the package."""


class InputError(ValueError):
    """An argument, a configuration or a file that was passed in breaks a rule."""


class ArtifactError(InputError):
    """A file is not an intact probmask artifact."""


class CheckpointError(InputError):
    """A file is not an intact checkpoint of the run."""


class UnknownNameError(KeyError):
    """A table, such as `METHODS`, has no entry of this name."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the message in quotes


class NonFiniteError(ArithmeticError):
    """A computation yielded a NaN or an infinity, as when training diverges."""


class RankMismatchError(RuntimeError):
    """The ranks of a distributed training no longer have the same weights or masks."""


class RankLostError(RuntimeError):
    """A rank of a distributed training does not respond. ``first``: no other rank reports it."""

    def __init__(self, message: str, *, first: bool = True) -> None:
        super().__init__(message)
        self.first = first


class DownloadError(RuntimeError):
    """A download failed, or the downloaded file differs from the released one."""


class FailedRunsError(RuntimeError):
    """Some runs of a sweep failed; the others have finished."""


class WorkerError(RuntimeError):
    """A worker of a Ray cluster failed unexpectedly, or workers were lost repeatedly."""


class LayerCollapseWarning(UserWarning):
    """All weights of a layer are pruned, or are about to be."""


class UnmaskedWeightsWarning(UserWarning):
    """Some matrices of a model are not masked, so its sparsity is lower than the one requested."""


class RefilledWeightsWarning(UserWarning):
    """An optimizer step or a merge has made pruned weights of a finished model nonzero."""


class RestartWarning(UserWarning):
    """A run begins again: from the start if it has no checkpoint, else from the last one."""


class EarlyEndWarning(UserWarning):
    """Training ended before the sparsity ramp: the remaining weights are pruned in one step."""


class UnreadableImageWarning(UserWarning):
    """An image file cannot be read and is skipped."""


class AbsentClassWarning(UserWarning):
    """A class of the data set has no training image, so the network cannot learn it."""


class KernelCacheWarning(UserWarning):
    """The cache of compiled kernels cannot be used; the kernels are compiled again."""


class TensorBoardWarning(UserWarning):
    """The events for TensorBoard cannot be written; the training continues without them."""


class VersionWarning(UserWarning):
    """A run is resumed with other versions than those that wrote its checkpoint."""
