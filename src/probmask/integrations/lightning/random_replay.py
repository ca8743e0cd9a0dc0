"""The random numbers of an interrupted Lightning training, which Lightning does not restore."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer


class RandomReplay:
    """Continues an interrupted training with the random numbers that it would have used.

    Lightning does not restore them. A dataloader draws random numbers when its iterator is created.
    In an uninterrupted training, this happens at the start of an epoch. In a resumed training,
    Lightning creates the first iterator earlier.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = self._with_iterator = saved
        _set_random_state(saved)

    def continue_epoch(self) -> None:
        """Set the generators for the rest of an epoch. The iterator exists now."""
        self._with_iterator = random_state()
        _set_random_state(self._saved)

    def begin_epoch(self, trainer: Trainer) -> None:
        """Set the generators for a whole epoch."""
        loop = trainer.fit_loop
        has_iterator = loop.is_resuming or loop.epoch_loop.restarting
        _set_random_state(self._with_iterator if has_iterator else self._saved)


def random_state() -> dict[str, Any]:
    """Return the states of the global generators as numbers and tensors."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    position = {"key": legacy["state"]["key"].tolist(), "pos": legacy["state"]["pos"]}
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {**legacy, "state": position},
        "python": [version, list(internal), gauss],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    position = state["numpy"]["state"]
    key = np.array(position["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**position, "key": key}})  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
