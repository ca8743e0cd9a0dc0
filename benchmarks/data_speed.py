"""Claim: augmented CIFAR-10 loads at 100,000 images per second, in under 5 % of a training step.

Batches of 128 images are cropped, mirrored and normalized as for training. First they are only
loaded. Then each is used for a training step of `resnet14` with `stem_stride=2` under TiedProbMask,
and the times of loading and of the step are measured separately. Pixels are random bytes (their
values do not affect the time) or, with --data-dir, the real ones. --images DIR also times a folder
of image files in the layout of ImageNet, read by worker processes.

    python benchmarks/data_speed.py [--data-dir DIR] [--images DIR] [--repeats 5]
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

import probmask
from probmask.data import DataSource, check_settings, load_data
from probmask.data.in_memory import Images, InMemory
from probmask.models import resnet14

BATCH = 128


def cifar10(directory: str | None) -> DataSource:
    """Return the real data set, or random bytes of the same size."""
    if directory is not None:
        return load_data("cifar10", directory)
    pixels = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    images = Images(pixels, torch.randint(10, (50_000,)))
    return InMemory("random", images, images[:10_000], check_settings("cifar10", {}), classes=10)


def images_per_second(data: DataSource, epoch: int, batch_size: int) -> float:
    """Load the batches of one epoch and return the rate."""
    start, count = time.perf_counter(), 0
    for batch in data.training(epoch, batch_size=batch_size, seed=0):
        count += len(batch.labels)
    return count / (time.perf_counter() - start)


def step_times(data: DataSource, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds to load a batch and those of the training step on it."""
    model = resnet14(stem_stride=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    method = probmask.TiedProbMask(sparsity=0.95)
    probmask.attach(model, method, optimizer=optimizer, total_steps=10 * steps)
    batches = data.training(0, batch_size=BATCH, seed=0)
    for _ in range(steps):
        start = time.perf_counter()
        batch = next(batches)
        ready = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
        yield ready - start, time.perf_counter() - ready


def main() -> None:
    """Print the measurements as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="the directory of CIFAR-10")
    parser.add_argument("--images", help="a folder of image files with train/ and val/")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = cifar10(options.data_dir)
    next(data.training(0, batch_size=BATCH, seed=0))  # pads the images, once
    rates = [images_per_second(data, epoch, BATCH) for epoch in range(options.repeats)]
    times = list(step_times(data, options.steps))[options.steps // 10 :]
    batch, step = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}\n")
    print("| measurement | median | goal |\n|---|---|---|")
    print(f"| {data.name}, augmented | {statistics.median(rates):,.0f} images/s | 100,000 |")
    print(f"| load a batch of {BATCH} between steps | {1e3 * batch:.2f} ms | |")
    print(f"| training step of resnet14, stem_stride=2 | {1e3 * step:.1f} ms | |")
    print(f"| loading, fraction of the step | {100 * batch / (batch + step):.2f} % | 5 % |")
    if options.images:
        workers = os.cpu_count() or 1
        files = load_data("folder", options.images).to(torch.device("cpu"), workers=workers)
        rates = [images_per_second(files, epoch, 16) for epoch in range(options.repeats)]
        print(f"| image files, {workers} workers | {statistics.median(rates):,.0f} images/s | |")


if __name__ == "__main__":
    main()
