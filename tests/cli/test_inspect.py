"""The summary of the training that `probmask inspect` prints."""

import pytest

from probmask.cli.inspect import training_summary


def test_unknown_entries_are_truncated():
    lines = training_summary(
        {"note": "hi", "log": "x" * 1000, "seed": 3, "macs_per_weight": {"a": 1}}
    )
    assert lines == [("seed", "3"), ("note", "hi"), ("log", "x" * 200)]


def test_a_setting_of_none_is_shown_as_none():
    method = {"name": "str", "sparsity": 0.9, "freeze_at": None}
    assert training_summary({"method": method}) == [("method", "str (freeze_at = none)")]


def test_rounding_is_shown():
    assert training_summary({}, {"values": "fp16", "max_error": 0.5}) == [
        ("rounding", "values = fp16, max_error = 0.5")
    ]
    assert training_summary({}, None) == []


@pytest.mark.parametrize("odd", [3, "text", [1, 2], {"accuracy": "high"}, None])
def test_malformed_metadata(odd):
    keys = ("model", "data", "method", "sparsity", "test", "versions", "image_shape")
    for heading, text in training_summary(dict.fromkeys(keys, odd)):
        assert heading
        assert text
