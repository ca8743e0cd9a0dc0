"""Checks that a saved state belongs to the training and the network that load it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from probmask.errors import InputError
from probmask.masking.sharding import rows_of

_KEYS = ("step", "training", "shapes", "method", "trainables")  # of `Sparsifier.state_dict`


def check_saved_state(
    state: Any, training: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise an `InputError` unless `Sparsifier.load_state_dict` can restore the state.

    Args:
        state: What was passed as the state of a sparsifier.
        training: The settings of the training that loads it.
        shapes: The shapes of its masked weights, by name.
    """
    absent = [key for key in _KEYS if not isinstance(state, Mapping) or key not in state]
    if absent:
        raise InputError(
            f"load_state_dict(): missing keys {', '.join(map(repr, sorted(absent)))}. This is not "
            "a sparsifier's state, or another version of probmask saved it; pass the return value "
            "of sparsifier.state_dict()."
        )
    _check_same_training(state["training"], training)
    _check_same_shapes(state["shapes"], shapes)


@final
class ReinitializedWeights:
    """The weights of a method that zeroes or reinitializes weights when it is attached.

    If a checkpoint is loaded into the model before that, the loaded weights are lost. The sums of
    the weights show it. Weights that nothing trains, as those of a supermask, are not compared:
    the same seed gives them the same values again.

    Args:
        weights: The masked weights, before the method begins.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = [weight for weight in weights if weight.requires_grad]
        self._before = self._sums()
        self._after = self._before
        self._suspected = False

    def have_begun(self) -> None:
        """Record the weights that the method has begun with."""
        trained = all(weight.requires_grad for weight in self._weights)
        self._after = self._sums() if trained else self._before

    def have_state(self, step: int) -> None:
        """Record that the state of the masks after this many updates was loaded."""
        self._suspected = step > 0 and self._after != self._before

    def check_loaded(self) -> None:
        """Raise an `InputError` if the state of the masks was loaded, but not the weights."""
        suspected, self._suspected = self._suspected, False
        if suspected and self._sums() == self._after:
            raise InputError(
                "load_state_dict(): the state of the masks was loaded, but the weights are those "
                "that attach() has reinitialized. Load the model's state_dict after attach(), not "
                "before it."
            )

    def _sums(self) -> list[float]:
        rows = (rows_of(weight).detach() for weight in self._weights)
        return [float(each.sum(dtype=torch.float64)) for each in rows]


def _check_same_training(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise an `InputError` that lists the differences between two trainings."""
    keys = [*here, *(saved.keys() - here)] if saved["method"] == here["method"] else ["method"]
    different = [
        f"{key} was {saved.get(key)!r} and is {here.get(key)!r}"
        for key in keys
        if saved.get(key) != here.get(key)
    ]
    if different:
        raise InputError(
            f"load_state_dict(): this is the state of another training: {'; '.join(different)}. "
            "Call attach with the same arguments as when it was saved."
        )


def _check_same_shapes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise an `InputError` that names the first weight that is not masked in both trainings."""
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            before, now = (_shape_text(shapes.get(name)) for shapes in (saved, here))
            raise InputError(
                f"load_state_dict(): this is the state of another network: {name} was {before} and "
                f"is {now}. Call attach with the same model, include= and exclude= as when it was "
                "saved."
            )


def _shape_text(shape: Sequence[int] | None) -> str:
    return "not masked" if shape is None else "×".join(map(str, shape))
