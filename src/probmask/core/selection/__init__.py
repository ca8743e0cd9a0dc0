"""Selection of the entries that are kept under one budget: exact top-k and magnitude cut.

`select_top` and `select_within` take any values. `cut_by_magnitude` selects by |w| and is faster.
"""

from probmask.core.selection.magnitude_cut import ThresholdForecast, cut_between, cut_by_magnitude
from probmask.core.selection.sharded_top_k import nth_largest
from probmask.core.selection.top_k import kept_counts, select_in_each, select_top, select_within

__all__ = [
    "ThresholdForecast",
    "cut_between",
    "cut_by_magnitude",
    "kept_counts",
    "nth_largest",
    "select_in_each",
    "select_top",
    "select_within",
]
