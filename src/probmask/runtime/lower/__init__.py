"""From a `torch.export` program to the nodes that the engine runs."""
