"""Gloo processes that train one model, by default two under DistributedDataParallel."""

import os
import sys
import warnings

import torch
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import probmask
import probmask.methods
from reference.networks import build, loss_of, make_batches, sgd, state_of
from reference.probmask_run import method_of


def run(job, directory, ranks=2):
    """Run `job(rank)` on all ranks; return all results."""
    multiprocessing.spawn(_main, args=(job, str(directory), ranks), nprocs=ranks)
    return [torch.load(f"{directory}/rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _main(rank, job, directory, ranks):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=ranks
    )
    torch.save(job(rank), f"{directory}/rank{rank}.pt")
    torch.distributed.barrier()
    leave()


def leave():
    """End this process without the interpreter's shutdown.

    A thread of Gloo may still hold tensors of the last message. If it frees them during the
    shutdown, Python ends the thread inside a destructor, and the process aborts with "terminate
    called without an active exception". It happens on busy machines only.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train_both_ways(rank):
    """Train ProbMask with a seed beyond the freeze, sampled without a seed, and tied."""
    learned = {"form": "learned", "select": "top", "min_keep_per_layer": 1}
    return {
        "common seed": _train(rank, seed=3, **learned),
        "own seeds": _train(rank, seed=None, form="learned", select="sample"),
        "tied": _train(rank, seed=None, form="tied"),
        "tied, frozen": _train(rank, seed=None, form="tied", freeze_at=0.6, clip_norm=1.0),
        "attached to DDP": _train(rank, seed=3, wrap_first=True, **learned),
    }


def disagree(rank):
    """Change one weight on rank 1 before the first update; return the error on each rank."""
    model = build("conv", seed=0)
    parallel = DistributedDataParallel(model)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, method_of("tied", sparsity=0.7), optimizer=optimizer, total_steps=14, seed=3
    )
    weight = sparsifier.sites[1].weight
    if rank == 1:
        with torch.no_grad():
            weight.view(-1)[5] += 1e-6
    (batch,) = make_batches("conv", 1, seed=50)
    loss_of(parallel, batch).backward()
    try:
        optimizer.step()
    except probmask.RankMismatchError as error:
        return str(error)
    return ""


def share_statistics(rank):
    """Finalize with three batches on rank 0 and one on rank 1; return the statistics."""
    model = build("conv", seed=0)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, probmask.methods.Magnitude(sparsity=0.7), optimizer=optimizer, total_steps=14, seed=3
    )
    batches = make_batches("conv", 4, seed=7)
    mine = batches[:3] if rank == 0 else batches[3:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", probmask.errors.EarlyEndWarning)
        sparsifier.finalize(data=mine)
    return {name: value.clone() for name, value in model.named_buffers()}


def _train(rank, *, seed, form, wrap_first=False, **settings):
    # Each rank has different weights, which DDP replaces by those of the first rank.
    model = build("conv", seed=rank)
    optimizer = sgd(model)
    torch.manual_seed(100 + rank)  # as loaders and augmentation require
    wrapped = DistributedDataParallel(model) if wrap_first else None
    sparsifier = probmask.attach(
        wrapped or model,
        method_of(form, sparsity=0.7, **settings),
        optimizer=optimizer,
        total_steps=14,
        seed=seed,
    )
    noise = getattr(sparsifier._masker.masked[0], "noise", None)
    parallel = wrapped or DistributedDataParallel(model)
    frozen = []
    for batch in make_batches("conv", 14, seed=50 + rank):
        optimizer.zero_grad()
        loss_of(parallel, batch).backward()
        optimizer.step()
        frozen.append(sparsifier.frozen)
    state = state_of(model)
    summary = sparsifier.finalize()
    final = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        "noise": noise,
        "state": state,
        "final": final,
        "frozen": frozen,
        "kept": [layer.kept for layer in summary.layers],
    }
