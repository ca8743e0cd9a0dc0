"""Training from a configuration: run, loop, checkpoints, run directory, record."""
