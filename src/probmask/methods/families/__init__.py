"""Functions and masked weights that several methods share."""
