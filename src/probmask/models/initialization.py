"""How the networks' weights are drawn before training."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def initialize_(model: nn.Module) -> None:
    """Draw the weights of all convolutions and linear layers; BatchNorm only normalises."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw_(module)
        elif isinstance(module, _BatchNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def draw_(layer: nn.Conv2d | nn.Linear) -> None:
    """Draw a layer's weights from N(0, 2 / fan_in), as the paper does."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
