"""Records of finished runs, their identity, comparisons between them, and the experiments."""
