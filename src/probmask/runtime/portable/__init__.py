"""Networks that run without PyTorch: their graph in an artifact, and an engine for arrays."""
