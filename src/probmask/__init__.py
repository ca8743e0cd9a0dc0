"""Train neural networks to an exact sparsity under one global budget."""
