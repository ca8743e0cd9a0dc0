"""A compiled network where a module is asked for."""

from typing import Any

from torch import Tensor, nn

from probmask.runtime.engine import Engine


class EngineModule(nn.Module):
    """Calls the engine; has no parameters and nothing to train."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Tensor) -> Any:
        """What the network computes."""
        return self.engine(*inputs)
