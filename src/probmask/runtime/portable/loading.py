"""`probmask.runtime.load`: an engine from an artifact that carries its graph, without PyTorch."""

import os
import time

from probmask.errors import ArtifactError
from probmask.runtime.portable.network_json import read_network
from probmask.runtime.portable.numpy_engine import NumPyEngine
from probmask.runtime.run.threads import check_threads
from probmask.storage.reader import check_dense_size, open_artifact


def load(
    path: str | os.PathLike[str], *, threads: int | None = None, max_bytes: int | None = None
) -> NumPyEngine:
    """Return an engine for the network of an artifact that carries its graph.

    It needs NumPy, Numba and safetensors, but not PyTorch. Every layer runs on the kernels. The
    first call on a machine compiles them, which takes half a minute; Numba then caches them.

    Args:
        path: An artifact, written by ``probmask.save(..., graph=True)`` or by
            ``probmask export --format graph``.
        threads: Number of threads for a call. Default: the number of processors.
        max_bytes: The largest size of the dense tensors to accept. Default: 256 MiB or 1,024 times
            the size of the file, whichever is larger.

    Returns:
        An engine that is called with arrays.

    Raises:
        ArtifactError: The file does not exist, is not an intact artifact, has no graph, or exceeds
            ``max_bytes``.
        InputError: ``threads`` is not a positive integer.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy, torch, probmask
        >>> model = torch.nn.Linear(4, 2)
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/model.safetensors"
        ...     info = probmask.save(model, path, graph=True, example=torch.zeros(1, 4))
        ...     engine = probmask.runtime.load(path, threads=1)
        >>> engine(numpy.ones((3, 4), numpy.float32)).shape
        (3, 2)
    """
    started = time.perf_counter()
    count = os.cpu_count() or 1 if threads is None else threads
    check_threads("runtime.load", count)
    with open_artifact(path) as artifact:
        check_dense_size(artifact.info, max_bytes)
        network = read_network(artifact)
        try:
            engine = NumPyEngine(network, count, network.pack_outputs)
        except MemoryError as error:
            raise ArtifactError("no memory for the tensors of its network") from error
    engine.compile_seconds = time.perf_counter() - started
    return engine
