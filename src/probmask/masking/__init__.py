"""Which tensors are masked, how, and when: sites, parametrizations, the sparsifier."""
