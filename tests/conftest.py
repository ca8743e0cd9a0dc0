"""One thread per test process: tests run side by side, and small problems need no more."""

import os

# Before PyTorch is imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
