"""Every method with the trainer: it ends with a record and resumes exactly."""

import json
import warnings

import pytest

from probmask.artifact import read
from probmask.errors import LayerCollapseWarning
from probmask.methods import METHODS
from probmask.training.trainer import train
from training.small import small

SPARSITY = 0.95


class StoppedError(Exception):
    pass


class StopInTheSecondEpoch:
    """Reporter that ends the run in its second epoch, as if it were killed."""

    def __init__(self, title, total_steps):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def show(self, status):
        if status.epoch >= 2:
            raise StoppedError


def config(name, **settings):
    method = {"name": name} if name == "dense" else {"name": name, "sparsity": SPARSITY}
    return small(method=method, epochs=3, batch_size=96, **settings)


@pytest.fixture(autouse=True)
def _layers_may_vanish():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayerCollapseWarning)
        yield


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_trains_to_a_record_and_resumes_bit_for_bit(name, tmp_path):
    outcome = train(config(name), out=tmp_path / "straight")
    record, kept = outcome.record, outcome.record["kept"]
    asked = 0.0 if name == "dense" else SPARSITY
    assert record["sparsity"]["asked"] == asked
    assert kept == record["size"] - round(asked * record["size"])
    assert sum(phase["epochs"] for phase in record["phases"]) == record["epochs"] == 3
    assert json.loads((tmp_path / "straight" / "record.json").read_text()) == record

    out = tmp_path / "killed"
    with pytest.raises(StoppedError):
        train(config(name, checkpoint_seconds=0), out=out, make_reporter=StopInTheSecondEpoch)
    train(out=out, resume=True)
    straight, killed = (directory / "model.safetensors" for directory in (outcome.directory, out))
    assert killed.read_bytes() == straight.read_bytes()
    assert read(killed).metadata["method"]["name"] == name
