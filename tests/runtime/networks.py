"""Networks that are hard for kernels: odd sizes, strides, dilation, groups."""

import torch
from torch import nn


def masked(model, sparsity, seed=0):
    """Apply random masks, and make BatchNorm differ from the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
                keep = torch.rand(module.weight.shape, generator=generator) >= sparsity
                module.weight.masked_fill_(~keep, 0)
            elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                for tensor, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.5, 0.5),
                    (module.running_mean, -0.2, 0.2),
                    (module.running_var, 0.5, 1.5),
                ):
                    tensor.uniform_(low, high, generator=generator)
    return model.eval()


class EverythingInOne(nn.Module):
    """Odd sizes, strides, dilation, groups, both poolings, concatenation, sums and products."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dilated = nn.Conv2d(8, 16, 3, dilation=2)
        self.uneven = nn.Conv2d(16, 16, (3, 2), padding="same")
        self.alone = nn.BatchNorm2d(16)
        self.linear = nn.Linear(32 * 3 * 2, 7)

    def forward(self, x):
        y = self.first(x)
        y = y + self.grouped(y).relu()
        y = nn.functional.relu6(self.norm(self.depthwise(y)))
        y = nn.functional.silu(self.dilated(y))
        y = self.alone(nn.functional.gelu(self.uneven(y)))
        pooled = torch.cat(
            [
                nn.functional.avg_pool2d(y, 3, 2, 1),
                nn.functional.max_pool2d(y, 3, 2, 1, ceil_mode=False),
            ],
            1,
        )
        logits = self.linear(nn.functional.adaptive_avg_pool2d(pooled, (3, 2)).flatten(1))
        return {"logits": logits, "features": nn.functional.hardswish(y) * y}


def one_dimensional():
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.MaxPool1d(3, 2),
        nn.Conv1d(8, 8, 3, stride=3, padding=1, dilation=2),
        nn.GELU(approximate="tanh"),
        nn.AvgPool1d(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class Wide(nn.Module):
    """Layers whose inputs exceed the L1 cache, with residual sums of several kinds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.third = nn.Conv2d(64, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 72, 3, stride=2, padding=1)
        self.last = nn.Conv2d(72, 72, 3, padding=1)

    def forward(self, x):
        x = self.first(x).relu()
        y = self.second(x).relu()
        x = (x + self.third(y)).relu()
        x = x + self.third(x)
        x = self.down(nn.functional.max_pool2d(x, 3, 2, 1)).relu()
        x = nn.functional.max_pool2d(self.last(x), 2)
        return x.mean((2, 3))
