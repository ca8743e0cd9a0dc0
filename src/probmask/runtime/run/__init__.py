"""Run a planned network: the engine, its threads, and the time that each node takes."""
