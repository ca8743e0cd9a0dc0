"""Small networks that are not in the package, each with a suitable batch."""

import torch
from torch import nn
from torch.nn import functional

from probmask.masking.parametrization import masked_parameters
from probmask.methods.probmask.learned import ProbMaskedWeight


class UNet(nn.Module):
    """Convolutions, transposed convolutions, a concatenated skip, BatchNorm; a class per pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Sequential(
            nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1)
        )

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], dim=1))


class Transformer(nn.Module):
    """An embedding, two encoder layers, a classifier on the mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


class Tied(nn.Module):
    """Two linear layers that share one weight, between two others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.right.weight = self.left.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.right(torch.tanh(self.left(x)))))


class LanguageModel(nn.Module):
    """A head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens)))).flatten(0, 1)


class Recurrent(nn.Module):
    """One linear layer called three times."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x)


class Lstm(nn.Module):
    """A bidirectional LSTM of two layers, a classifier on the last output."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def conv_net():
    """Return a convolution, BatchNorm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


def _conv_1d():
    return nn.Sequential(
        nn.Conv1d(2, 8, 5, stride=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3, dilation=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def _conv_3d():
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.ConvTranspose3d(4, 4, 2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def _depthwise():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, groups=2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def _classes(*shape, classes=3):
    return torch.randint(classes, shape)


# name: how to build it, how to draw a batch (inputs, labels) of a given size
NETWORKS = {
    "unet": (UNet, lambda n: (torch.randn(n, 1, 8, 8), _classes(n, 8, 8))),
    "transformer": (Transformer, lambda n: (torch.randint(20, (n, 5)), _classes(n))),
    "conv1d": (_conv_1d, lambda n: (torch.randn(n, 2, 24), _classes(n))),
    "conv3d": (_conv_3d, lambda n: (torch.randn(n, 1, 4, 5, 6), _classes(n))),
    "depthwise": (_depthwise, lambda n: (torch.randn(n, 2, 6, 6), _classes(n))),
    "mlp": (mlp, lambda n: (torch.randn(n, 6), _classes(n))),
    "conv": (conv_net, lambda n: (torch.randn(n, 1, 6, 6), _classes(n))),
    "tied": (Tied, lambda n: (torch.randn(n, 6), _classes(n))),
    "language": (LanguageModel, lambda n: (torch.randint(20, (n, 5)), _classes(n * 5, classes=20))),
    "recurrent": (Recurrent, lambda n: (torch.randn(n, 6), _classes(n))),
    "lstm": (Lstm, lambda n: (torch.randn(n, 5, 4), _classes(n))),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name][0]()


def make_batches(name, count, size=8, seed=1):
    torch.manual_seed(seed)
    return [NETWORKS[name][1](size) for _ in range(count)]


def sgd(model, lr=0.1, **settings):
    settings = {"momentum": 0.9, "weight_decay": 5e-4} | settings
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def loss_of(model, batch):
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def step(model, optimizer, batch, sparsifier=None):
    """Make one update; with a sparsifier, its method's penalty is part of the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    (loss if sparsifier is None else loss + sparsifier.penalty()).backward()
    optimizer.step()


def train(model, optimizer, batches, sparsifier=None):
    for batch in batches:
        step(model, optimizer, batch, sparsifier)


def probs_of(model):
    """Return the learned probabilities by parameter name, in the order of the model, each once."""
    found = {}
    for name, _, _, masked in masked_parameters(model):
        if isinstance(masked, ProbMaskedWeight) and masked.prob not in set(found.values()):
            found[name] = masked.prob
    return found


def state_of(model):
    """Return a copy of the model's state_dict and of the parameters that a method has added."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, _, _, masked in masked_parameters(model):
        for own, parameter in masked.named_parameters():
            state[f"{name}:{own}"] = parameter.detach().clone()
    return state


def assert_same_state(one, other):
    """Assert the same names and bit-identical values."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
