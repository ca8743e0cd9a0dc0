"""The compiled kernels: Numba and LLVM code, and the table of operations that it reads."""
