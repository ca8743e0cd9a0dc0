"""Projection of the keep-probabilities onto one budget."""

from probmask.core.projection.budget_projection import project_

__all__ = ["project_"]
