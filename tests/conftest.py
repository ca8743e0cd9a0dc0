"""What all test processes have in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before PyTorch is imported, and inherited by the processes that tests start. One thread, for tests
# run side by side, and small problems need no more.
os.environ["OMP_NUM_THREADS"] = "1"


def dies_of_tiles():
    """Whether a product in bf16 ends this machine's PyTorch: some virtual ones name AMX in vain."""
    processor = Path("/proc/cpuinfo")
    if not processor.is_file() or "amx_tile" not in processor.read_text():
        return False
    product = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(8, 64).bfloat16())"
    return subprocess.run([sys.executable, "-c", product], check=False).returncode < 0


# Workers have what was found for the process that started them.
if not {"ONEDNN_MAX_CPU_ISA", "PYTEST_XDIST_WORKER"} & set(os.environ) and dies_of_tiles():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


@pytest.fixture(params=["tied", "learned"])
def form(request):
    """The two members of the ProbMask family: what users are promised holds for both."""
    return request.param
