"""A bar for work that is counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(title: str, total: int, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """Show how far counted work has come; the function that is handed out moves the bar on."""
    if not visible:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
