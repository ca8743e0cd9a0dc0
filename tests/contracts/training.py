"""A small training of every method on three networks, and one with two ranks."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import probmask
from probmask.errors import LayerCollapseWarning
from probmask.methods import METHODS
from reference.sharded_ranks import messages

STEPS, STEPS_PER_EPOCH, SPARSITY = 32, 4, 0.8
SIZE = 8 * 2 * 9 + 8 * 4 * 9 + 16 * 8 * 4 + 3 * 16
KEEP = SIZE - round(SPARSITY * SIZE)
RECURRENT_SIZE = 2 * (4 * 4) * (12 + 4) + 3 * 6 * (8 + 6) + 3 * 6
# Settings that change a method fundamentally.
VARIANTS = {"probmask paper": {"recipe": "paper", "select": "top"}}
NAMES = sorted((*METHODS, *VARIANTS))
NETWORKS = ("plain", "batchnorm", "recurrent")
# The trainings with two ranks: all methods on one network, those that share code on another.
TWO_RANKS = [(name, "plain") for name in NAMES] + [
    ("probmask", "recurrent"),
    ("probmask-tied", "recurrent"),
]


# Methods that share no code.
SOME = ("probmask", "probmask-tied", "set", "spartan", "str")
# Methods that draw no noise for each rank. GraSP takes the same number of examples of a class from
# the probe of every rank, so two ranks measure twice as many. MLPrune seeds its passes by rank.
WITHOUT_NOISE = sorted(
    {*METHODS} - {"grasp", "l0", "mlprune", "probmask", "sparse-vd", "srinivas", "vrpge"}
)


class Recurrent(nn.Module):
    """A bidirectional LSTM and a GRU that read an image row by row, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(12, 4, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, images):
        rows = images.transpose(1, 2).flatten(2)
        return self.head(self.gru(self.lstm(rows)[0])[1][0])


def budget(kind="plain"):
    """Return the number of weights to keep, and the number of all weights."""
    size = RECURRENT_SIZE if kind == "recurrent" else SIZE
    return size - round(SPARSITY * size), size


def network(kind="plain"):
    """Return a grouped and a transposed convolution, a plain one and a linear layer.

    The network of the kind "recurrent" has recurrent layers instead.
    """
    torch.manual_seed(0)
    if kind == "recurrent":
        return Recurrent()
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8) if kind == "batchnorm" else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 16, 2, stride=2),
        nn.BatchNorm2d(16) if kind == "batchnorm" else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def batches(count=STEPS, seed=1, size=12):
    """Return batches whose inputs depend on their class, so that training can learn it."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        labels = torch.randint(3, (size,), generator=generator)
        images = torch.randn(size, 2, 6, 6, generator=generator)
        images[:, 0] += labels.view(-1, 1, 1).float()
        made.append((images, labels))
    return made


class Run:
    """A method attached to the network, trained step by step."""

    def __init__(
        self,
        name,
        *,
        sparsity=SPARSITY,
        seed=3,
        steps=STEPS,
        wrap=False,
        data=None,
        dtype=torch.float32,
        kind="plain",
        shard=False,
        pieces=1,
        start=None,
    ):
        settings = {} if name == "dense" else {"sparsity": sparsity}
        self.method = METHODS[name.split()[0]](**settings, **VARIANTS.get(name, {}))
        self.model = network(kind).to(dtype)
        if start is not None:
            self.model.load_state_dict(start)
        if shard:
            shard_layers(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
        )
        self.data = [(images.to(dtype), labels) for images, labels in data or batches(steps)]
        self.sparsifier = probmask.attach(
            self.model,
            self.method,
            optimizer=self.optimizer,
            total_steps=steps,
            steps_per_epoch=STEPS_PER_EPOCH,
            probe=probmask.Probe(self.data[:4]),
            seed=seed,
        )
        self.network = DistributedDataParallel(self.model) if wrap else self.model
        self.pieces = pieces  # of a batch, whose gradients are accumulated
        self.step = 0

    def go(self, until):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayerCollapseWarning)
            while self.step < until:
                self._update(*self.data[self.step])
                self.step += 1
        return self

    def _update(self, images, labels):
        self.optimizer.zero_grad()
        for share in self.sparsifier.draws():
            for piece in range(self.pieces):
                some = slice(piece, None, self.pieces)
                loss = nn.functional.cross_entropy(self.network(images[some]), labels[some])
                (share * (loss + self.sparsifier.penalty()) / self.pieces).backward()
                self.sparsifier.observe(loss)
        self.optimizer.step()

    def finish(self):
        self.go(len(self.data))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayerCollapseWarning)
            self.summary = self.sparsifier.finalize()
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def checkpoint(self):
        """Return a copy of the whole state, as a file would contain it."""
        return _copied(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sparsifier": self.sparsifier.state_dict(),
                "step": self.step,
            }
        )

    def restore(self, state, *, model_first=True):
        state = _copied(state)
        if model_first:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sparsifier.load_state_dict(state["sparsifier"])
        if not model_first:
            self.model.load_state_dict(state["model"])
        self.step = state["step"]
        return self


def shard_layers(model, mesh=None):
    """Divide a network among all ranks: its first and third layer alone, the others together."""
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensors):
    """Return the whole tensors of a dictionary, some of which are sharded."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in tensors.items()
    }


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def train_all(rank):
    """Train every method with DistributedDataParallel, each rank on different batches."""
    found = {}
    for name, kind in TWO_RANKS:
        run = Run(name, steps=16, wrap=True, data=batches(16, seed=50 + rank), kind=kind)
        found[name, kind] = run.finish(), run.summary.kept
    return found


def train_parts(rank):
    """Train with DistributedDataParallel, each rank on its part of the batches."""
    data = parts_of(batches(16), rank)
    return {name: Run(name, steps=16, wrap=True, data=data).finish() for name in WITHOUT_NOISE}


def parts_of(data, rank):
    """Return the part of each batch that a rank trains on."""
    ranks = torch.distributed.get_world_size()
    return [(images[rank::ranks], labels[rank::ranks]) for images, labels in data]


def train_all_sharded(rank):
    """Train every method with FSDP2, each rank on its part of the batches; return refusals too."""
    return _train_sharded(rank, NAMES)


def train_some_sharded(rank):
    """Train with FSDP2 a few methods that share no code."""
    return _train_sharded(rank, SOME)


def _train_sharded(rank, names):
    data = parts_of(batches(16), rank)
    found = {}
    for name in names:
        try:
            run = Run(name, steps=16, data=data, shard=True)
        except probmask.InputError as error:
            found[name] = str(error)
            continue
        sent = [messages(run.go, step) for step in range(1, 9)]
        saved = run.checkpoint()
        middle = {"metrics": run.sparsifier.metrics(), "masks": whole(run.sparsifier.masks)}
        sent += [messages(run.go, step) for step in range(9, 17)]
        run.finish()
        final = whole(run.model.state_dict())
        again = Run(name, steps=16, data=data, shard=True, seed=99).restore(saved)
        again.finish()
        resumed = whole(again.model.state_dict())
        found[name] = {
            **middle,
            "final": final,
            "resumed": resumed,
            "kept": run.summary.kept,
            "sent": sent,
        }
    return found
