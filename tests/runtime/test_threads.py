"""Forks, interrupts and several threads."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import probmask
from probmask import models
from probmask.runtime.run.threads import Threads
from runtime.networks import masked


@pytest.fixture(scope="module")
def engine():
    """An engine with three threads, which share images or layers depending on the batch size."""
    torch.manual_seed(0)
    model = masked(models.resnet14(width=8), 0.9)
    return probmask.runtime.compile(model, torch.randn(2, 3, 32, 32), threads=3, layers="sparse")


# Newer Pythons warn about forking a process with threads, which is what this test does.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("batch", [1, 8])
def test_a_forked_child_starts_its_own_threads(engine, batch):
    x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = engine(x)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    engine._threads.together.acquire()  # as if a call were running during the fork
    try:
        child = context.Process(target=lambda: answers.put(engine(x).tolist()))
        child.start()
    finally:
        engine._threads.together.release()
    child.join(60)
    hanging = child.is_alive()
    child.kill()
    assert not hanging
    assert answers.get() == expected.tolist()
    assert torch.equal(engine(x), expected)


def test_one_thread_computes_what_is_not_faster_when_divided(tmp_path):
    """Measure whether to divide layers where there are few images; save and reuse the choice."""
    torch.manual_seed(0)
    model, x = masked(models.resnet14(width=8), 0.9), torch.randn(1, 3, 32, 32)
    engine = probmask.runtime.compile(model, x, threads=2, layers="sparse")
    expected = engine(x)
    divided = engine.choices
    firsts = frozenset(divided.ungrouped)
    measured = engine._divided_where_faster(divided)
    assert measured.undivided <= firsts
    alone = replace(divided, undivided=firsts)
    alone.save(tmp_path / "choices.json")
    again = probmask.runtime.compile(model, x, threads=2, choices=tmp_path / "choices.json")
    assert again.choices == alone
    again._threads.map = None  # one thread computes the layers
    assert torch.equal(again(x), expected)
    many = engine.tuned_for(torch.randn(4, 3, 32, 32))
    assert not many.choices.undivided  # there are enough images to share


def test_interrupts_do_not_change_results():
    tests = str(Path(__file__).parents[1])
    without_coverage = {key: v for key, v in os.environ.items() if not key.startswith("COV")}
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "runtime.interrupt_storm"],
        env={**without_coverage, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,  # it ends itself earlier, and prints where it hangs
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "batch 1: same result as before\nbatch 8: same result as before\n"


def test_started_jobs_finish_before_an_interrupt_propagates():
    threads, events = Threads(2), []

    def other():
        events.append("started")
        time.sleep(0.05)
        events.append("finished")

    def own():
        while "started" not in events:
            time.sleep(1e-3)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        threads.map([own, other], lambda: events.append("released"))
    assert events == ["started", "released", "finished"]


def test_waiting_jobs_are_cancelled():
    threads, events, wait = Threads(2), [], threading.Event()
    # The only other thread is busy with another call.
    caller = threading.Thread(target=lambda: threads.map([wait.wait, wait.wait]))
    caller.start()

    def own():
        raise KeyboardInterrupt

    threading.Timer(0.05, wait.set).start()
    with pytest.raises(KeyboardInterrupt):
        threads.map([own, lambda: events.append("started")])
    caller.join()
    assert threads.map([lambda: True, lambda: True]) == [True, True]
    assert events == []


def test_an_exception_in_a_worker_reaches_the_caller():
    def other():
        raise ValueError("in the other thread")

    with pytest.raises(ValueError, match="in the other thread"):
        Threads(2).map([lambda: True, other])


def test_worker_threads_end_with_the_pool():
    before = set(threading.enumerate())
    threads = Threads(3)
    threads.map([lambda: True, lambda: True])
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del threads
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)
