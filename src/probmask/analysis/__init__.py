"""Records turned into what people read."""
