"""BatchNorm in evaluation as a scale and a shift of each channel, folded into the layer before."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BatchNorm:
    """The numbers of a BatchNorm. Without ``weight`` and ``bias`` it only normalizes."""

    mean: Floats
    variance: Floats
    weight: Floats | None
    bias: Floats | None
    epsilon: float

    def scale_and_shift(self) -> tuple[Any, Any]:
        """Return it as x · scale + shift, in double precision."""
        mean, variance = self.mean.astype(np.float64), self.variance.astype(np.float64)
        with np.errstate(all="ignore"):
            scale = 1 / np.sqrt(variance + self.epsilon)
            scale = scale if self.weight is None else scale * self.weight.astype(np.float64)
            shift = -mean * scale
            return scale, shift if self.bias is None else self.bias.astype(np.float64) + shift


@dataclass(frozen=True)
class Folded:
    """What was folded into a layer: a BatchNorm, and the layer's bias before."""

    bias: Floats
    norm: BatchNorm

    def of(self, weight: Floats) -> tuple[Any, Any]:
        """Return the weight in double precision and the bias of the layer with the BatchNorm.

        The first dimension of the weight is the output channels.
        """
        scale, shift = self.norm.scale_and_shift()
        with np.errstate(all="ignore"):
            factors = scale.reshape(-1, *(1,) * (weight.ndim - 1))
            return weight * factors, (self.bias * scale + shift).astype(np.float32)
