"""The part of masking that all methods share: sites, masked weights, the sparsifier."""
