"""How many weights a method may keep, and which layers it keeps whole."""

from collections.abc import Sequence

from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.protocol import Method, keep_of
from probmask.masking.sites import Site

_MANY = 1.1  # times as many weights as stay: so many fewer at once are worth a warning


def checked_keep(method: Method, sites: Sequence[Site], spread: Spread | None = None) -> int:
    """The number of weights that the method keeps of all sites.

    Refused if it is none, or if the layers that ``spread`` leaves dense leave none for the others.
    """
    sizes = [site.size for site in sites]
    keep = keep_of(method.sparsity, sum(sizes))
    caller = f"{type(method).__name__}(sparsity={method.sparsity})"
    if keep < 1:
        raise InputError(f"{caller}: of {sum(sizes)} weights none would be kept; lower sparsity.")
    if spread is not None:
        spread.check(caller, sizes, keep)
    return keep


def whole_layers(
    method: Method, sites: Sequence[Site], *, first: bool | None, last: bool | None
) -> frozenset[int]:
    """Which of the first and last site are kept whole: those asked for, refused if too large.

    None asks for it only where the budget allows: where these layers take at most half of it.
    """
    asked = Spread.over("global", dense_first=bool(first), dense_last=bool(last))
    keep = checked_keep(method, sites, asked)
    wished = Spread.over(
        "global", dense_first=first in (None, True), dense_last=last in (None, True)
    )
    whole = wished.dense(len(sites))
    allowed = sum(sites[index].size for index in whole) <= keep / 2
    return whole if allowed else asked.dense(len(sites))


def many_at_once(kept_before: float, kept_after: float) -> bool:
    """Whether so many weights go at once, from one kept part to another, that it will be felt."""
    return kept_before > _MANY * kept_after
