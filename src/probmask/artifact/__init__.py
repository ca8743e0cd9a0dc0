"""The finished sparse network as one compact safetensors file; `docs/format.md` specifies it."""

from probmask.artifact.inspection import ArtifactSummary, StoredLayer, inspect
from probmask.artifact.load import load
from probmask.artifact.reader import ArtifactInfo, TensorInfo
from probmask.artifact.restore import load_into, load_state, read
from probmask.artifact.store import save

__all__ = [
    "ArtifactInfo",
    "ArtifactSummary",
    "StoredLayer",
    "TensorInfo",
    "inspect",
    "load",
    "load_into",
    "load_state",
    "read",
    "save",
]
