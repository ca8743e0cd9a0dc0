"""Interrupt an engine many times, then check that it still gives the same results.

`test_threads.py` runs this in a process of its own: interrupts come anywhere, and can leave locks
of other code in the process held, such as those of the coverage tool.
"""

import faulthandler
import itertools
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import probmask
from probmask import models
from runtime.networks import masked

# Seconds after which the process prints where each thread waits, and ends.
_TIMEOUT = 180
_INTERRUPTS = 60
_PACKAGE = str(Path(probmask.__file__).parent)


def _interrupt_at_every_line(engine, x):
    """Interrupt the first call at its first line of the package, the second at its second, ….

    Stop when a call ends before its interrupt. Return the number of lines.
    """
    line = 0
    while _is_interrupted(engine, x, line):
        torch.set_grad_enabled(True)  # an interrupt within no_grad() of PyTorch may leave it off
        line += 1
    return line


def _is_interrupted(engine, x, line):
    sys.settrace(_interrupting(line))
    try:
        engine(x)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _interrupting(line):
    """Return a trace function that raises a signal at the ``line``-th line of the package."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGALRM)
        return trace

    return trace


def _interrupt_at_any_time(engine, x):
    """Interrupt calls after varying fractions of the time that a call takes."""
    usual = min(_seconds(engine, x) for _ in range(5))
    parts = itertools.cycle(k / 20 for k in range(20))
    interrupted = 0
    while interrupted < _INTERRUPTS:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, usual * next(parts)))
            engine(x)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
    torch.set_grad_enabled(True)


def _seconds(engine, x):
    started = time.perf_counter()
    engine(x)
    return time.perf_counter() - started


def _in_another_thread(engine, x):
    answers = []
    other = threading.Thread(target=lambda: answers.append(engine(x)))
    other.start()
    other.join()
    return answers[0]


def main():
    """Interrupt an engine with three threads, which share layers (batch 1) or images (batch 8)."""
    faulthandler.dump_traceback_later(_TIMEOUT, exit=True)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    torch.manual_seed(0)
    model = masked(models.resnet14(width=8), 0.9)
    engine = probmask.runtime.compile(model, torch.randn(2, 3, 32, 32), threads=3, layers="sparse")
    for batch in (1, 8):
        x = torch.randn(batch, 3, 32, 32)
        expected = engine(x)
        lines = _interrupt_at_every_line(engine, x)
        assert lines > 40, f"a call has only {lines} lines"
        _interrupt_at_any_time(engine, x)
        assert torch.equal(engine(x), expected), "the result differs after the interrupts"
        assert torch.equal(_in_another_thread(engine, x), expected), (
            "the result differs in a new thread"
        )
        print(f"batch {batch}: same result as before")


if __name__ == "__main__":
    main()
