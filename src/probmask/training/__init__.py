"""Training from a configuration: loop, checkpoints, run directory, evaluation."""
