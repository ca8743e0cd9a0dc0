"""The finished sparse network in one compact safetensors file, which `docs/format.md` specifies."""

from probmask.artifact.export import Exported, export, to_csr
from probmask.artifact.inspection import ArtifactSummary, StoredLayer, inspect
from probmask.artifact.load import load, load_into, load_state
from probmask.artifact.save import save
from probmask.storage.reader import ArtifactInfo, TensorInfo, read

__all__ = [
    "ArtifactInfo",
    "ArtifactSummary",
    "Exported",
    "StoredLayer",
    "TensorInfo",
    "export",
    "inspect",
    "load",
    "load_into",
    "load_state",
    "read",
    "save",
    "to_csr",
]
