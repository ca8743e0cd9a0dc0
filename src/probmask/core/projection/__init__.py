"""Projection of the keep-probabilities of all layers onto one budget (the paper's theorem 1).

`budget_projection` is the projection with the search for its shift v, and `passes` are the sums
over all entries that the search needs.
"""

from probmask.core.projection.budget_projection import project_

__all__ = ["project_"]
