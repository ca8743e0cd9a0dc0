"""The file of an artifact as arrays of NumPy, written and read without PyTorch."""
