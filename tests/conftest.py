"""Settings and fixtures of all tests."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Set before PyTorch is imported, and inherited by the processes that tests start. One thread each:
# tests run in parallel, and small problems do not need more.
os.environ["OMP_NUM_THREADS"] = "1"
# Processes that run out of memory would hang while Rust allocates memory for a backtrace.
os.environ["RUST_BACKTRACE"] = "0"
# Notes about trusted runs belong to the tests, not to the user who runs them.
_state = tempfile.TemporaryDirectory(prefix="probmask-tests-")
os.environ["XDG_STATE_HOME"] = _state.name


def bf16_crashes():
    """Return whether a product in bf16 crashes: some virtual machines announce AMX without it."""
    processor = Path("/proc/cpuinfo")
    if not processor.is_file() or "amx_tile" not in processor.read_text():
        return False
    product = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(8, 64).bfloat16())"
    return subprocess.run([sys.executable, "-c", product], check=False).returncode < 0


# Worker processes inherit the result of the process that started them.
if not {"ONEDNN_MAX_CPU_ISA", "PYTEST_XDIST_WORKER"} & set(os.environ) and bf16_crashes():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


@pytest.fixture(params=["tied", "learned"])
def form(request):
    """The two methods of the ProbMask family, for tests that hold for both."""
    return request.param
