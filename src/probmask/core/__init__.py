"""Tensors in, tensors out: no modules, no files, no globals."""
