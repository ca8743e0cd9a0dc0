"""Networks that move elements: paddings, shuffles, shifted windows, and outputs that are views."""

import torch
from torch import nn
from torch.nn import functional


def padded():
    """Padding before the first layer, of every kind."""
    return nn.Sequential(
        nn.ZeroPad2d((1, 2, 0, 3)),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
        nn.ReplicationPad2d((2, 0, 1, 1)),
        nn.ConstantPad2d(1, 0.5),
        nn.Conv2d(6, 5, 3, padding=2, padding_mode="circular"),
    )


def shuffled():
    """Shuffles of pixels and channels; the last operation is one."""
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(12, 18, 3, padding=1),
        nn.ChannelShuffle(3),
        nn.ReLU(),
        nn.Conv2d(18, 18, 1, groups=3),
        nn.PixelShuffle(3),
    )


class Windows(nn.Module):
    """A layer over shifted windows of an image; the output is flat."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)
        self.mix = nn.Linear(32, 32)

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        batch, rows, columns, _ = x.shape
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(batch, rows // 2, 2, columns // 2, 2, 8).permute(0, 1, 3, 2, 4, 5)
        y = self.mix(y.reshape(batch, -1, 32)).view(batch, rows // 2, columns // 2, 2, 2, 8)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, 8)
        return (x + torch.roll(y, (1, 1), (1, 2))).flatten(1)


class SinglePosition(nn.Module):
    """Channels last at a single position, as in the last stage of a ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 6, 3, stride=2), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        x = self.first(x)
        y = self.down(functional.gelu(self.up(self.norm(x.permute(0, 2, 3, 1)))))
        return (x + (self.scale * y).permute(0, 3, 1, 2)).mean((2, 3))


class LastStates(nn.Module):
    """A classifier of the final states of the last layer, one of each direction."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        _, (hidden, _) = self.cells(x)
        return self.head(torch.cat([hidden[-2], hidden[-1]], 1))


class SelfAttention(nn.Module):
    """PyTorch's module for attention, which ends with views."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class ImageViews(nn.Module):
    """A normalized image; the outputs are views of one result, and functions of the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.rand(3, 1, 1))

    def forward(self, x):
        y = self.layer((x - self.mean) / 0.3)
        batch, _, rows, columns = y.shape
        moved = y.permute(0, 2, 3, 1), y[:, 1:3, ::2, 1:], y.transpose(1, 2).flatten(1)
        return *moved, y.view(batch, 2, 2, rows * columns), y.flip(3), 2 * x, x.relu()


class TokenViews(nn.Module):
    """Outputs that are views of tokens."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 16)

    def forward(self, x):
        y = self.layer(x)
        heads = y.view(len(x), -1, 4, 4).transpose(1, 2)
        return heads, y.flatten(1), y[:, 0], y[:, 1:], heads.tanh(), 3 * x


# Networks whose operations all have kernels, and the shapes of an input.
REARRANGING = {
    "paddings": (padded, (3, 9, 7)),
    "shuffles": (shuffled, (3, 10, 8)),
    "windows": (Windows, (3, 12, 16)),
    "a single position": (SinglePosition, (4, 3, 3)),
    "last states": (LastStates, (7, 6)),
    "self-attention": (SelfAttention, (9, 16)),
    "views of an image": (ImageViews, (3, 9, 8)),
    "views of tokens": (TokenViews, (7, 12)),
}
