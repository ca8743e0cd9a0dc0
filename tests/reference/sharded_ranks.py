"""Gloo processes that train one model whose weights FSDP2 divides among them."""

import warnings

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import probmask
import probmask.methods
from reference.memory_limit import limit_data

STEPS = 12
METHODS = {
    "probmask": probmask.ProbMask(sparsity=0.8, estimator="relaxed", draws=2),
    "straight": probmask.ProbMask(sparsity=0.8, min_keep_per_layer=2, clip_norm=0.5),
    "tied": probmask.TiedProbMask(sparsity=0.8, forget_by=0.5),
    "movement": probmask.methods.Movement(sparsity=0.8),
}


def build():
    """Return a network whose layers have 9, 7 and 3 rows."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3, bias=False)
    )


def shard(model, mesh=None, **settings):
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(steps)
    ]


def part(batch, rank, ranks):
    return [tensor[rank::ranks] for tensor in batch]


def update(model, sparsifier, optimizer, batch, pieces=1):
    """Make one update from gradients accumulated over pieces of the batch."""
    optimizer.zero_grad()
    for share in sparsifier.draws():
        for piece in range(pieces):
            inputs, labels = part(batch, piece, pieces)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (share * loss / pieces).backward()
    optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def state_of(model, sparsifier):
    """Return weights, masks and the method's parameters, whole."""
    trained = sparsifier.state_dict()["method"]["trained"]
    return {
        "weights": {name: whole(value) for name, value in model.state_dict().items()},
        "masks": {name: whole(mask) for name, mask in sparsifier.masks.items()},
        "trained": [[whole(value) for value in each] for each in trained],
    }


def train(name, *, rank=0, ranks=1, order="", mesh=None, pieces=1, steps=STEPS, **settings):
    """Train with a method, attached before or after `fully_shard`, or without it."""
    model = build()
    if order in ("after", "compiled"):
        shard(model, mesh, **settings)
        model(data()[0][0])  # FSDP2 leaves the weights of the root gathered
        model.reshard()
    optimizer = None if order == "before" else sgd(model)
    sparsifier = probmask.attach(
        model, METHODS[name], optimizer=optimizer, total_steps=STEPS, seed=3
    )
    if order == "before":
        shard(model, mesh, **settings)
        optimizer = sgd(model)
        sparsifier.use(optimizer)
    outputs = []
    network = model
    if order == "compiled":
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # of Dynamo
        network = torch.compile(model, backend="eager")
    for batch in data()[:steps]:
        update(network, sparsifier, optimizer, part(batch, rank, ranks), pieces)
        model.eval()
        with torch.no_grad():
            outputs.append(model(batch[0]))
        model.train()
    return model, optimizer, sparsifier, torch.stack(outputs)


def result_of(name, **settings):
    model, _, sparsifier, outputs = train(name, **settings)
    before = state_of(model, sparsifier)
    summary = sparsifier.finalize()
    final = {key: whole(value) for key, value in model.state_dict().items()}
    kinds = [type(module).__name__ for module in model.modules()]
    return {
        **before,
        "outputs": outputs,
        "final": final,
        "kept": summary.kept,
        "layers": [layer.kept for layer in summary.layers],
        "kinds": kinds,
    }


def train_in_every_order(rank):
    """Train every method in every way, on two or four ranks; on four with HSDP too."""
    ranks = distributed.get_world_size()
    found = {}
    for name in METHODS:
        for order in ("before", "after"):
            found[name, order] = result_of(name, rank=rank, ranks=ranks, order=order)
    found["probmask", "accumulated"] = result_of(
        "probmask", rank=rank, ranks=ranks, order="after", pieces=2
    )
    found["tied", "compiled"] = result_of("tied", rank=rank, ranks=ranks, order="compiled")
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name in METHODS:
            found[name, "hsdp"] = result_of(name, rank=rank, ranks=4, order="after", mesh=mesh)
    found["refused"] = refusals(rank)
    found["sent"] = {name: messages_of(name, rank, ranks) for name in METHODS}
    return found


def refusals(rank):
    """Return the errors for weights that cannot be masked."""
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    made = {}

    def attach(label, model, method=METHODS["tied"]):
        try:
            probmask.attach(model, method, optimizer=sgd(model), total_steps=STEPS)
        except probmask.InputError as error:
            made[label] = str(error)

    attach("tensor parallel", parallelize_module(build(), mesh, {"0": ColwiseParallel()}))
    everywhere = build()
    fully_shard(everywhere, mesh=mesh, ignored_params={everywhere[2].weight})
    attach("ignored", everywhere)
    partly = build()
    fully_shard(partly, mesh=mesh, reshard_after_forward=False)
    attach("flops", partly, probmask.ProbMask(sparsity=0.5, cost="flops"))
    attach("snip", partly, probmask.methods.SNIP(sparsity=0.5))
    columns = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    attach("columns", shard(columns, mesh, shard_placement_fn=lambda _: Shard(1)))
    attach("offloaded", shard(build(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    if ranks == 4:
        attach("fewer ranks", shard(build(), mesh, reshard_after_forward=2))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallel = parallelize_module(build(), both["tensor"], {"0": ColwiseParallel()})
        attach("tensor parallel and sharded", shard(parallel, both["data"]))
        meshes = build()
        fully_shard(meshes[0], mesh=both["data"])
        fully_shard(meshes, mesh=mesh)
        attach("other mesh", meshes)
    untrained = build()
    untrained[2].weight.requires_grad_(False)
    attach("untrained", shard(untrained), METHODS["movement"])
    late = shard(build())
    late(data()[0][0])
    optimizer = sgd(late)  # of gathered parameters
    sparsifier = probmask.attach(late, METHODS["tied"], optimizer=optimizer, total_steps=STEPS)
    try:
        update(late, sparsifier, optimizer, data()[0])
    except probmask.InputError as error:
        made["gathered"] = str(error)
    early = build()
    probmask.attach(early, METHODS["tied"], total_steps=STEPS)
    shard(early)
    try:
        early(data()[0][0])
    except probmask.InputError as error:
        made["attached before"] = str(error)
    try:
        probmask.save(shard(build()), "never-written.safetensors")
    except probmask.InputError as error:
        made["saved"] = str(error)
    return made


def refused_fsdp1(rank):
    """Return the error for the older FSDP, which needs a device even for CPU tensors."""
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
    try:
        probmask.attach(model, METHODS["tied"], optimizer=sgd(model), total_steps=STEPS)
    except probmask.InputError as error:
        return str(error)
    return ""


def differing_replicas(rank):
    """Change a weight of one replica of HSDP; return the error on each of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(build(), mesh)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, METHODS["tied"], optimizer=optimizer, total_steps=STEPS, seed=3
    )
    if rank >= 2:
        with torch.no_grad():
            model[2].weight.to_local().add_(1e-6)
    try:
        update(model, sparsifier, optimizer, part(data()[0], rank, 4))
    except probmask.RankMismatchError as error:
        return str(error)
    return ""


def share_statistics(rank):
    """Finalize with three batches on rank 0 and two on rank 1; return the buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    if distributed.is_initialized():
        shard(model)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, probmask.methods.Magnitude(sparsity=0.7), optimizer=optimizer, total_steps=1, seed=3
    )
    update(model, sparsifier, optimizer, data()[0])
    batches = data()[:5]
    sparsifier.finalize(data=[batches[:3], batches[3:]][rank] if rank is not None else batches)
    return {name: whole(value) for name, value in model.named_buffers()}


def messages_of(name, rank, ranks):
    """Return the bytes of every message of probmask in one update, after a first one."""
    model = shard(build())
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, METHODS[name], optimizer=optimizer, total_steps=1000, seed=3
    )
    batches = [part(batch, rank, ranks) for batch in data(2)]
    update(model, sparsifier, optimizer, batches[0])
    return messages(update, model, sparsifier, optimizer, batches[1])


def messages(function, *arguments):
    """Call a function; return the bytes of every all-reduce and all-gather of probmask in it."""
    sent = []
    plain = distributed.all_reduce, distributed.all_gather

    def all_reduce(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return plain[0](tensor, *args, **kwargs)

    def all_gather(found, tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return plain[1](found, tensor, *args, **kwargs)

    distributed.all_reduce, distributed.all_gather = all_reduce, all_gather
    try:
        function(*arguments)
    finally:
        distributed.all_reduce, distributed.all_gather = plain
    return sent


class Save:
    """Train for some updates on several ranks, and save a distributed checkpoint."""

    def __init__(self, directory, steps):
        self.directory, self.steps = str(directory), steps

    def __call__(self, rank):
        ranks = distributed.get_world_size()
        found = {}
        for name in METHODS:
            model, _, sparsifier, _ = train(
                name, rank=rank, ranks=ranks, order="after", steps=self.steps
            )
            state = {"model": model.state_dict(), "sparsifier": sparsifier.state_dict()}
            checkpoint.save(state, checkpoint_id=f"{self.directory}/{name}")
            found[name] = state_of(model, sparsifier)
        return found


def restored(name, directory, model):
    """Return a sparsifier of the model, both with the state of a distributed checkpoint."""
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, METHODS[name], optimizer=optimizer, total_steps=STEPS, seed=99
    )
    weights = model.state_dict()
    single = not distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.load({"model": weights}, checkpoint_id=f"{directory}/{name}", no_dist=single)
    model.load_state_dict(weights)
    sparsifier.load_distributed(f"{directory}/{name}")
    return sparsifier, optimizer


class Load:
    """Load distributed checkpoints on another number of ranks, and make one more update."""

    def __init__(self, directory):
        self.directory = str(directory)

    def __call__(self, rank):
        ranks = distributed.get_world_size()
        found = {}
        for name in METHODS:
            model = shard(build())
            sparsifier, optimizer = restored(name, self.directory, model)
            found[name] = state_of(model, sparsifier)
            update(model, sparsifier, optimizer, part(data()[-1], rank, ranks))
            found[name]["next"] = {key: whole(value) for key, value in model.state_dict().items()}
        return found


def train_in_bf16(rank):
    """Gather the weights in bf16; return the dtypes of weights and gradients, and the kept ones."""
    ranks = distributed.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    result = result_of("tied", rank=rank, ranks=ranks, order="after", mp_policy=policy)
    return {"kept": result["kept"], "dtype": result["final"]["0.weight"].dtype}


class UnderLimit:
    """Train a network of 25 million weights in processes that may allocate few more bytes."""

    def __init__(self, allowed):
        self.allowed = allowed

    def __call__(self, rank):
        ranks = distributed.get_world_size()
        result_of("straight", rank=rank, ranks=ranks, order="after")  # compiles the kernels
        limit_data(self.allowed)
        try:
            return self._train(rank, ranks)
        except (RuntimeError, MemoryError) as error:
            if ranks > 1:
                raise  # ends the other ranks too
            return str(error).splitlines()[0]

    def _train(self, rank, ranks):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(ranks * index + rank)
                parameter.to_local().normal_(std=0.03, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = probmask.attach(
            model,
            probmask.ProbMask(sparsity=0.9, ramp_begin=0.0, ramp_end=0.1, freeze_at=1.0),
            optimizer=optimizer,
            total_steps=20,
            seed=3,
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 1024)).square().mean().backward()
            optimizer.step()
        return sparsifier.metrics()["expected_sparsity"]
