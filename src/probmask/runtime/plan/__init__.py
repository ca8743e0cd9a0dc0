"""Plan a lowered network: steps, tensor layouts, the arena, and what runs where."""
