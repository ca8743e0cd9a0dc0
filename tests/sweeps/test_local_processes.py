"""Training processes of a sweep: their threads and GPUs."""

from probmask.sweeps.local_processes import environment, with_threads
from training.small import small


def test_threads_are_shared_unless_the_configuration_sets_them():
    assert with_threads(small(data="cifar10", threads="none"), 3).threads == 3
    assert with_threads(small(threads=1), 3).threads == 1


def test_every_run_has_its_threads_and_its_gpu():
    config = small(threads=2)
    alone = environment({"HOME": "/h", "OMP_NUM_THREADS": "9"}, 3, config, gpus=[])
    assert alone["HOME"] == "/h"
    assert {alone[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"2"}
    assert "CUDA_VISIBLE_DEVICES" not in alone
    visible = [
        environment({"CUDA_VISIBLE_DEVICES": "4,6"}, slot, config)["CUDA_VISIBLE_DEVICES"]
        for slot in range(3)
    ]
    assert visible == ["4", "6", "4"]
    several = environment({"CUDA_VISIBLE_DEVICES": "4,6"}, 0, small(devices=2, threads=1))
    assert several["CUDA_VISIBLE_DEVICES"] == "4,6"
