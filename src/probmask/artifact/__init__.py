"""The finished sparse network as one compact safetensors file; `docs/format.md` specifies it."""

from probmask.artifact.load import load
from probmask.artifact.reader import ArtifactInfo, TensorInfo
from probmask.artifact.store import load_into, load_state, read, save

__all__ = ["ArtifactInfo", "TensorInfo", "load", "load_into", "load_state", "read", "save"]
