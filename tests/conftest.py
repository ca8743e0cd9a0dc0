"""One thread per test process: tests run side by side, and small problems gain nothing from more."""

import os

# Before PyTorch is imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
