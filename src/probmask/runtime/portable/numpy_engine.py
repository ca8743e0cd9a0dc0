"""The engine for arrays of NumPy, which runs a network without PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from probmask.errors import InputError, NonFiniteError
from probmask.runtime.lower.nodes import Network
from probmask.runtime.plan.partition import Choices, Timing, all_on_kernels
from probmask.runtime.run.kernel_step import Tensors
from probmask.runtime.run.profile import describe, print_table, shortest, time_kernels
from probmask.runtime.run.schedule import Schedule
from probmask.runtime.run.threads import Threads

Array = npt.NDArray[Any]
# Seconds for timing a call.
_CALL_SECONDS = 0.2


@final
class NumPyArrays(Tensors):
    """Arrays of NumPy around the kernels."""

    def contiguous(self, tensor: Array) -> Array:
        """Return the array, or a copy of it, with its elements in order in memory."""
        return np.ascontiguousarray(tensor, np.float32)

    def address(self, tensor: Array) -> int:
        """Return where the first element is in memory."""
        return int(tensor.ctypes.data)

    def empty(self, shape: Sequence[int]) -> Array:
        """Return an array of unspecified content."""
        return np.empty(shape, np.float32)


class NumPyEngine:
    """A network from an artifact, made by `probmask.runtime.load`. It does not need PyTorch.

    Several threads may call one engine at the same time.

    Attributes:
        threads: Number of threads for a call.
        compile_seconds: How long it took to load and plan the network.
        network: The network.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy, torch, probmask
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/model.safetensors"
        ...     info = probmask.save(model, path, graph=True, example=torch.zeros(1, 4))
        ...     engine = probmask.runtime.load(path)
        >>> engine(numpy.ones((3, 4), numpy.float32)).shape
        (3, 8)
    """

    compile_seconds: float = 0.0

    def __init__(
        self, network: Network, threads: int, pack: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.network = network
        self.threads = threads
        self._pack = pack
        self.choices: Choices = all_on_kernels(network)
        self._schedule = Schedule(network, self.choices, Threads(threads), NumPyArrays())
        self._timings: dict[str, Timing] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the network.

        Args:
            inputs: Arrays with the shapes and dtypes of the example with which the network was
                saved. The batch size may differ if the model allows it.

        Returns:
            What the model returns, with arrays for its tensors.

        Raises:
            InputError: If the number, the shape or the dtype of the inputs does not fit.
            NonFiniteError: If a result is not finite. Kernels skip zeros, so they cannot compute
                0 · ∞ as PyTorch does.
        """
        results, finite = self._schedule.run(self._checked(inputs))
        if not finite:
            raise NonFiniteError(
                "a result of the network is not finite (NaN or infinity). Check the inputs; to get "
                "PyTorch's NaNs and infinities, use an engine of probmask.runtime.compile."
            )
        return self._pack(results)

    def takes(self, *inputs: Any) -> bool:
        """Return whether the number, shapes and dtypes of the inputs fit the network.

        Args:
            inputs: Arrays.

        Returns:
            True if a call with these inputs would be accepted.
        """
        try:
            self._checked(inputs)
        except InputError:
            return False
        return True

    def explain(self) -> None:
        """Print a table of the nodes and how long each takes, with the time of a call.

        The times are those of a batch of one, or of the batch size that the network fixes.
        """
        example = self._example()
        call = 1e3 * shortest(
            lambda: self(*example), budget=_CALL_SECONDS, least=3, threads=self.threads
        )
        print_table(self.describe(), call, self.compile_seconds, self.threads)

    def describe(self) -> list[dict[str, Any]]:
        """Return the rows of the table that `explain` prints.

        Returns:
            One dictionary per node. Times are in milliseconds, on one thread.
        """
        if self._timings is None:
            values = dict(zip(self.network.inputs, self._example(), strict=True))
            self._timings = time_kernels(self.network, values, NumPyArrays())
        return describe(self.network, self.choices, self._timings, elsewhere="NumPy")

    def _example(self) -> tuple[Array, ...]:
        """Return inputs of a small batch: zeros, and ones for integers."""
        specs = zip(self.network.input_shapes, self.network.input_dtypes, strict=True)
        made = []
        for shape, dtype in specs:
            sizes = [size if isinstance(size, int) else 1 for size in shape]
            made.append((np.zeros if dtype.startswith("float") else np.ones)(sizes, dtype))
        return tuple(made)

    def _checked(self, inputs: Sequence[Any]) -> dict[str, Array]:
        """Return the inputs of a call by name. Raise if one does not fit."""
        network, values = self.network, {}
        if len(inputs) != len(network.inputs):
            count = len(network.inputs)
            raise InputError(
                f"the network takes {count} input{'s' * (count != 1)}, not {len(inputs)}."
            )
        sizes: dict[str, int] = {}  # of dimensions that may vary, by name
        specs = zip(network.inputs, network.input_shapes, network.input_dtypes, strict=True)
        for item, (name, shape, dtype) in zip(inputs, specs, strict=True):
            if not _fits(item, shape, dtype, sizes):
                expected = "×".join(str(n) if isinstance(n, int) else "N" for n in shape)
                raise InputError(
                    f"the network takes {name} as an array of {expected} {dtype}, not "
                    f"{_description(item)}."
                )
            values[name] = item
        return values


def _fits(item: Any, shape: tuple[int | str, ...], dtype: str, sizes: dict[str, int]) -> bool:
    return (
        isinstance(item, np.ndarray)
        and not isinstance(item, np.ma.MaskedArray)
        and item.dtype == np.dtype(dtype)  # in the byte order of this machine
        and item.ndim == len(shape)
        and all(
            given == (size if isinstance(size, int) else sizes.setdefault(size, given))
            for size, given in zip(shape, item.shape, strict=True)
        )
    )


def _description(item: Any) -> str:
    """Return what was passed instead of an array that fits."""
    if not isinstance(item, np.ndarray):
        return f"an object of type {type(item).__name__}"
    kind = "a masked array" if isinstance(item, np.ma.MaskedArray) else "one"
    return f"{kind} of {'×'.join(map(str, item.shape)) or '0 dimensions'} {item.dtype}"
