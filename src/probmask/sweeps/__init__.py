"""Sweeps: train a grid of configurations in parallel, each run once."""
