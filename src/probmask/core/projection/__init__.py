"""Projection of the keep-probabilities of all layers onto one budget (the paper's theorem 1).

`budget_projection` is the projection, `root_finding` the search for its shift v, and `passes` the
sums over all entries that the search needs.
"""

from probmask.core.projection.budget_projection import project_

__all__ = ["project_"]
