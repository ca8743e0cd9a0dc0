"""The ranks that ``torchrun`` has started meet before they train, and agree on the run.

Every rank could decide by itself whether to continue a run, but the ranks of several nodes may see
different things: an ``--out`` that the nodes do not share, or different numbers of restarts. So
each rank reports what it sees, the first rank decides, and all of them follow or end with one
message.

Restarted ranks find the entries of killed ones in the store of ``torchrun``, and the numbers of
restarts differ between nodes. A meeting therefore begins with a handshake: the first rank invents a
token and sends it only to ranks that are alive. The entries of this start are under that token.
"""

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from probmask.errors import InputError, RankLostError
from probmask.launch import ranks_of_torchrun, restarts_of_torchrun
from probmask.messages import listed
from probmask.training.run_directory import RunDirectory

_SECONDS_TO_MEET = 300.0  # importing PyTorch takes long on a slow file system
_SECONDS_TO_READ = 10.0  # a decision
_SECONDS_BETWEEN_LOOKS = 0.02
_MOST_NAMED = 3  # ranks in a message
_STARTED = "probmask/started"  # directory of the run that an earlier start has created


@dataclass(frozen=True)
class View:
    """What one rank sees of the run that it was asked to train or to continue.

    ``run`` is a digest of its configuration, empty if there is no run in the directory. ``error``
    is why this rank cannot start.
    """

    host: str
    resume: bool
    restarts: int
    directory: str = ""
    run: str = ""
    finished: bool = False
    error: str = ""

    @classmethod
    def of(cls, out: str | Path | None, *, resume: bool, error: str = "") -> Self:
        """Return what this rank sees in the directory ``out``."""
        host, restarts = socket.gethostname(), restarts_of_torchrun()[0]
        if out is None:
            return cls(host, resume, restarts, error=error)
        run = RunDirectory(Path(out).absolute())
        digest, finished = "", False
        with suppress(OSError):  # creating or restoring the run reports it
            if run.config.exists():
                digest = hashlib.sha256(run.config.read_bytes()).hexdigest()
            finished = run.finished
        return cls(host, resume, restarts, str(run.path), digest, finished, error)


class Meeting:
    """All ranks of one start. Its store has the entries of this start only."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._common = store  # of all starts
        self.store = PrefixStore(f"probmask/{_token(store, rank, ranks)}", store)

    def decided(self, view: View, decide: Callable[[Sequence[View]], Any]) -> Any:
        """Return the decision of the first rank, which knows the views of all ranks."""
        if self.rank > 0:
            self.store.set(f"view/{self.rank}", json.dumps(asdict(view)))
            decision = json.loads(self.store.get("decision"))
            self.store.add("informed", 1)
            return decision
        others = (self.store.get(f"view/{other}") for other in range(1, self.ranks))
        decision = decide([view, *(View(**json.loads(text)) for text in others)])
        self.store.set("decision", json.dumps(decision))
        end = time.monotonic() + _SECONDS_TO_READ
        while self.store.add("informed", 0) < self.ranks - 1 and time.monotonic() < end:
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # the store may end with this process
        return decision

    def note_start(self, directory: Path) -> None:
        """Note for later starts that this one has created the directory of the run."""
        self._common.set(_STARTED, str(directory.absolute()))

    def has_started(self, directory: str) -> bool:
        """Return whether an earlier start of the same ``torchrun`` has created the directory."""
        found: bytes = self._common.get(_STARTED) if self._common.check([_STARTED]) else b""
        return found.decode() == directory != ""

    def create_group(self, backend: str, timeout: timedelta) -> None:
        """Create the default process group."""
        self.store.set_timeout(timeout)
        distributed.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.ranks, timeout=timeout
        )


def meet() -> Meeting | None:
    """Meet the other ranks; return None if ``torchrun`` has not started several.

    Raises:
        RankLostError: If a rank does not come.
    """
    found = ranks_of_torchrun()
    if found is None or found[0] * found[1] == 1:
        return None
    try:
        return Meeting(*next(rendezvous("env://", timeout=timedelta(seconds=_SECONDS_TO_MEET))))
    except distributed.DistError as error:
        raise _absent([0]) from error


def agree_to_resume(meeting: Meeting | None, out: str | Path | None, *, resume: bool) -> bool:
    """Return whether all ranks continue the run in ``out``.

    They do if the user asks for it, or if ``torchrun`` has restarted the ranks after the run was
    created.

    Raises:
        InputError: If the ranks see different runs, or if ``torchrun`` may restart them, but the
            run has no directory that they would find again.
    """
    most = restarts_of_torchrun()[1]
    if most > 0 and out is None:
        raise InputError(
            f"train(out=None): torchrun --max-restarts={most} starts this command again after a "
            "failure; name the directory of the run, so that it is continued (--out DIR)."
        )
    view = View.of(out, resume=resume)
    if meeting is None:
        return resume or (view.restarts > 0 and view.run != "")
    decision = meeting.decided(
        view, lambda views: _decision(views, started=meeting.has_started(view.directory))
    )
    if decision["problem"]:
        raise InputError(decision["problem"])
    return bool(decision["resume"])


def cannot_resume(out: str | Path | None, error: InputError) -> InputError:
    """Tell the other ranks that this one cannot continue the run; return the error for all."""
    meeting = meet()
    if meeting is None:
        return error
    view = View.of(out, resume=True, error=str(error))
    return InputError(
        meeting.decided(view, lambda views: _decision(views, started=False))["problem"]
    )


def _decision(views: Sequence[View], *, started: bool) -> dict[str, Any]:
    """Return whether the ranks continue the run of the first one, or why they cannot."""
    first = views[0]
    restarted = started or any(view.restarts for view in views)
    resume = first.resume or (restarted and first.run != "")
    return {"resume": resume, "problem": _problem(views, resume=resume)}


def _problem(views: Sequence[View], *, resume: bool) -> str:
    """Return what prevents the ranks from training the same run, empty if nothing does."""
    first = views[0]
    if first.error:
        return first.error
    others = list(enumerate(views))[1:]
    if unlike := [rank for rank, view in others if view.resume != first.resume]:
        one, other = (0, unlike[0]) if first.resume else (unlike[0], 0)
        return (
            f"rank {one} has been started with --resume, but rank {other} has not; start the same "
            "command on every node."
        )
    different = [_difference(rank, view, first) for rank, view in others] if resume else []
    if found := [text for text in different if text]:
        return (
            f"--resume {first.directory}: rank 0 on {first.host} continues the run in it, but "
            f"{listed(found[:_MOST_NAMED])}; a run resumes from a directory on a file system that "
            "all nodes share."
        )
    failed = [f"{view.error} (rank {rank} on {view.host})" for rank, view in others if view.error]
    return failed[0] if failed else ""


def _difference(rank: int, view: View, first: View) -> str:
    """Return how the run that a rank sees differs from that of the first rank, empty if not."""
    if (view.run, view.finished) == (first.run, first.finished):
        return ""
    if not view.run:
        what = "finds no run"
    elif view.run != first.run:
        what = "finds another run"
    else:
        what = f"finds {'a finished' if view.finished else 'an unfinished'} copy of it"
    return f"rank {rank} on {view.host} {what} in {view.directory}"


def _token(store: Any, rank: int, ranks: int) -> str:
    """Return a text that this start alone has, the same on all of its ranks.

    The store still has what killed ranks have written. The first rank answers to the greeting of
    every rank, and has met a rank when it confirms the token of this start.
    """
    if rank > 0:
        return _token_of_first_rank(store, rank)
    token = secrets.token_hex(8)
    absent = list(range(1, ranks))
    end = time.monotonic() + _SECONDS_TO_MEET
    while absent:
        for other in absent:
            if greeting := _entry(store, f"greeting/{other}"):
                store.set(f"probmask/answer/{other}", f"{greeting} {token}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        absent = [other for other in absent if _entry(store, f"met/{other}") != token]
        if absent and time.monotonic() > end:
            raise _absent(absent)
    return token


def _token_of_first_rank(store: Any, rank: int) -> str:
    greeting = secrets.token_hex(8)
    store.set(f"probmask/greeting/{rank}", greeting)
    end = time.monotonic() + _SECONDS_TO_MEET
    while time.monotonic() < end:
        answered, _, token = _entry(store, f"answer/{rank}").partition(" ")
        if answered == greeting:
            store.set(f"probmask/met/{rank}", token)
            return token
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise _absent([0])


def _entry(store: Any, name: str) -> str:
    key = f"probmask/{name}"
    return str(store.get(key).decode()) if store.check([key]) else ""


def _absent(ranks: Sequence[int]) -> RankLostError:
    names = listed([f"rank {rank}" for rank in ranks[:_MOST_NAMED]])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return RankLostError(
        f"{names}{more} did not start within {_SECONDS_TO_MEET:.0f} seconds; start the command on "
        "every node."
    )
