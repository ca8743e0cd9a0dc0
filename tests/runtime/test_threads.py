"""What happens around a call: forks, interrupts, several threads."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import probmask
from probmask import models
from probmask.runtime.run.threads import Threads
from runtime.networks import masked


@pytest.fixture(scope="module")
def engine():
    """Of three threads, which share images or layers by the size of the batch."""
    torch.manual_seed(0)
    model = masked(models.resnet14(width=8), 0.9)
    return probmask.runtime.compile(model, torch.randn(2, 3, 32, 32), threads=3, layers="sparse")


# Newer Pythons warn of forks beside threads: that these are renewed is what is tested.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("batch", [1, 8])
def test_a_forked_child_has_threads_of_its_own(engine, batch):
    x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = engine(x)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    engine._threads.together.acquire()  # somebody is in a call when the fork happens
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


def test_a_storm_of_interrupts_leaves_the_engine_as_it_was():
    tests = str(Path(__file__).parents[1])
    without_coverage = {key: v for key, v in os.environ.items() if not key.startswith("COV")}
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "runtime.interrupt_storm"],
        env={**without_coverage, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,  # it ends itself long before, and says where it hangs
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "batch 1: answered as before\nbatch 8: answered as before\n"


def test_what_has_begun_ends_before_an_interrupt_goes_on():
    threads, events = Threads(2), []

    def other():
        events.append("begun")
        time.sleep(0.05)
        events.append("ended")

    def own():
        while "begun" not in events:
            time.sleep(1e-3)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        threads.map([own, other], lambda: events.append("let go"))
    assert events == ["begun", "let go", "ended"]


def test_what_has_not_begun_is_called_off():
    threads, events, wait = Threads(2), [], threading.Event()
    # The only other thread is busy with another's work.
    caller = threading.Thread(target=lambda: threads.map([wait.wait, wait.wait]))
    caller.start()

    def own():
        raise KeyboardInterrupt

    threading.Timer(0.05, wait.set).start()
    with pytest.raises(KeyboardInterrupt):
        threads.map([own, lambda: events.append("begun")])
    caller.join()
    assert threads.map([lambda: True, lambda: True]) == [True, True]
    assert events == []


def test_an_error_of_another_thread_reaches_the_caller():
    def other():
        raise ValueError("of the other thread")

    with pytest.raises(ValueError, match="of the other thread"):
        Threads(2).map([lambda: True, other])


def test_threads_end_with_those_that_used_them():
    before = set(threading.enumerate())
    threads = Threads(3)
    threads.map([lambda: True, lambda: True])
    begun = set(threading.enumerate()) - before
    assert len(begun) == 2
    del threads
    for thread in begun:
        thread.join(60)
    assert not any(thread.is_alive() for thread in begun)
