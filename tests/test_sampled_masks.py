"""benchmarks/sampled_masks.py measures the network of the run, and does not change its training."""

import json

import sampled_masks
from probmask.analysis.records import find_records
from probmask.training.trainer import train
from watched_training import plan

METHOD = {"name": "probmask", "recipe": "paper", "select": "top", "sparsity": 0.5}
SETTINGS = {
    "data": "digits",
    "model": "smallconv",
    "model_args.width": 8,
    "batch_size": 256,
    "epochs": 3,
}


def test_measurements_agree_with_the_undisturbed_run(tmp_path, monkeypatch, capsys):
    (planned,) = plan("paper_claims", {"method": METHOD, "seed": 0}, list(SETTINGS.items()))
    expected = train(planned.config, out=tmp_path / "run").record
    monkeypatch.setattr(sampled_masks, "_SAMPLES", 2)
    flags = [part for item in SETTINGS.items() for part in ("--set", "{}={}".format(*item))]
    folders = ["--out", str(tmp_path / "measured"), "--records", str(tmp_path / "records")]
    sampled_masks.main(
        ["measure", "paper_claims", "--sparsity", "0.5", "--at", "0.7", "1", *folders, *flags]
    )
    (path,) = (tmp_path / "measured").iterdir()
    (run,) = find_records([tmp_path / "records"])
    assert run.identity == planned.identity
    first, last = json.loads(path.read_text())["measured"]
    assert run.accuracy == expected["test"]["accuracy"] == last["top"]
    assert expected["updates"] == last["updates"] > first["updates"]
    assert [len(last[kind]) for kind in ("sampled", "relaxed", "sampled_weights")] == [2, 2, 2]
    for found in (first, last):
        mean = (1 - found["expected_sparsity"]) * expected["size"]
        assert all(abs(weights - mean) < 0.1 * mean for weights in found["sampled_weights"])
    capsys.readouterr()
    sampled_masks.main(["table", str(tmp_path / "measured")])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2] for row in rows] == [str(first["updates"]), str(last["updates"])]
