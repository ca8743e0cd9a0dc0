"""How many weights a method may keep."""

from collections.abc import Sequence

from probmask.errors import InputError
from probmask.masking.protocol import Method, keep_of
from probmask.masking.sites import Site


def checked_keep(method: Method, sites: Sequence[Site]) -> int:
    """The number of weights that the method keeps of all sites, refused if it is none."""
    size = sum(site.size for site in sites)
    keep = keep_of(method.sparsity, size)
    if keep < 1:
        raise InputError(
            f"{type(method).__name__}(sparsity={method.sparsity}): of {size} weights none would "
            "be kept; lower sparsity."
        )
    return keep
