"""Shards of tensors in the threads of one process: what ranks do, without processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from probmask.core.shards import Shards


class ThreadShards(Shards):
    """The shard of one of several threads, and the number and bytes of its collectives."""

    def __init__(self, index, count, meeting, board):
        self.index, self.count = index, count
        self._meeting, self._board = meeting, board
        self.sent = []

    def total(self, values):
        return self.gathered(values).sum(0)

    def gathered(self, values):
        self.sent.append(values.numel() * values.element_size())
        self._board[self.index] = values.clone()
        self._meeting.wait()
        found = torch.stack(list(self._board))
        self._meeting.wait()
        return found


def on_shards(count, job):
    """Return the results of ``job(shards)`` in ``count`` threads, in order."""
    meeting, board = threading.Barrier(count, timeout=60), [None] * count

    def one(index):
        try:
            return job(ThreadShards(index, count, meeting, board))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def joined(parts):
    """Return whole tensors from the lists of shards of all ranks."""
    return [torch.cat(list(each)) for each in zip(*parts, strict=True)]
