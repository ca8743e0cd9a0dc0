"""The block that residual networks are made of."""

from torch import Tensor, nn

from probmask.models.convolution import normalized


class Residual(nn.Module):
    """A body around which a shortcut leads: a 1 by 1 convolution where shapes differ."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*normalized(inputs, outputs, 1, stride=stride))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out
