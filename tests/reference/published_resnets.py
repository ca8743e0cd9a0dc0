"""Residual networks as they are published: torchvision's names, a linear classifier with a bias."""

import torch
from torch import nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut drops pixels and adds channels of zeros."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x):
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if x.shape != y.shape:
            x = x[:, :, ::2, ::2]
            zeros = torch.zeros(len(x), x.shape[1] // 2, *x.shape[2:])
            x = torch.cat([zeros, x, zeros], dim=1)
        return functional.relu(x + y)


class Published20(nn.Module):
    """ResNet20 of akamaster/pytorch_resnet_cifar10."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for number, (inputs, outputs) in enumerate([(16, 16), (16, 32), (32, 64)], start=1):
            blocks = [BasicBlock(inputs, outputs, 1 if number == 1 else 2)]
            blocks += [BasicBlock(outputs, outputs, 1) for _ in range(2)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 and a 1×1 convolution."""

    def __init__(self, inputs, middle, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, 4 * middle, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * middle)
        self.downsample = None
        if stride != 1 or inputs != 4 * middle:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * middle, 1, stride, bias=False), nn.BatchNorm2d(4 * middle)
            )

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return functional.relu(self.bn3(self.conv3(y)) + shortcut)


class Published50(nn.Module):
    """ResNet50 of torchvision with four channels in the first layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        inputs = 4
        for number, blocks in enumerate([3, 4, 6, 3], start=1):
            middle = 4 * 2 ** (number - 1)
            made = []
            for index in range(blocks):
                made.append(Bottleneck(inputs, middle, 2 if index == 0 and number > 1 else 1))
                inputs = 4 * middle
            setattr(self, f"layer{number}", nn.Sequential(*made))
        self.fc = nn.Linear(inputs, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))
