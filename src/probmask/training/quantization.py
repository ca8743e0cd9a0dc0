"""The last epochs of a run in which its weights are trained as integers, under frozen masks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from probmask.checks import check_count, check_within
from probmask.masking.freeze_masks import quantize
from probmask.masking.masker import Histogram
from probmask.masking.method import Phase
from probmask.masking.summary import Summary


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Quantization of the finished network, after the epochs of the method.

    Args:
        bits: Number of bits of a weight, from 2 to 8.
        epochs: Number of epochs of quantization-aware training. 0 only rounds.
        rate_scale: Their largest learning rate, as a multiple of ``optimizer.lr``.
    """

    bits: int = 8
    epochs: int = 3
    rate_scale: float = 0.1

    def __post_init__(self) -> None:
        check_count("quantize", "bits", self.bits, least=2, meaning="a number of bits")
        check_within("quantize", "bits", self.bits, 2, 8, meaning="a number of bits")
        check_count("quantize", "epochs", self.epochs, least=0, meaning="a number of epochs")
        check_within("quantize", "epochs", self.epochs, 0, 10**9, meaning="a number of epochs")
        check_within("quantize", "rate_scale", self.rate_scale, 0, 100, meaning="a factor")

    @property
    def values(self) -> str:
        """The argument ``values`` of `probmask.save`."""
        return f"int{self.bits}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phase that follows those of the method, if it has any epochs."""
        phase = Phase("quantize", self.epochs, rate_scale=self.rate_scale, warm_up=False)
        return (phase,) if self.epochs else ()


class Quantizer:
    """Takes the place of the sparsifier in the training loop once the masks are final."""

    draw_count = 1

    def __init__(
        self,
        model: nn.Module,
        settings: QuantizeConfig,
        *,
        include: Sequence[str],
        exclude: Sequence[str],
    ) -> None:
        self._frozen = quantize(model, bits=settings.bits, include=include, exclude=exclude)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean mask of each site by parameter name."""
        return self._frozen.masks

    def draws(self) -> Iterator[float]:
        """Yield the factor on the loss of the only forward pass."""
        yield 1.0

    def penalty(self) -> float:
        """Return 0.0: nothing is added to the loss."""
        return 0.0

    def observe(self, loss: Tensor) -> None:
        """Ignore the loss."""

    def metrics(self) -> dict[str, float]:
        """Return the sparsity, for the log."""
        return {"expected_sparsity": self.summary().sparsity}

    def histograms(self) -> dict[str, Histogram]:
        """Return no distributions."""
        return {}

    def summary(self) -> Summary:
        """Return the number of weights kept, in total and per layer."""
        return self._frozen.summary()

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Round the network and remove the masks; see `FrozenMasks.finalize`."""
        return self._frozen.finalize(data)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks. The scales follow from the weights."""
        return {"masks": self.masks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._frozen.set_masks(state["masks"])
