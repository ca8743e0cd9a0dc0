"""What `inspect` says of a file beyond its layers, whoever wrote its metadata."""

import pytest

from probmask.cli.inspect import training_summary


def test_the_words_of_others_are_shown_and_cut_short():
    lines = training_summary(
        {"note": "hi", "log": "x" * 1000, "seed": 3, "macs_per_weight": {"a": 1}}
    )
    assert lines == [("seed", "3"), ("note", "hi"), ("log", "x" * 200)]


def test_rounded_values_are_not_passed_over():
    assert training_summary({}, {"values": "fp16", "max_error": 0.5}) == [
        ("rounding", "values = fp16, max_error = 0.5")
    ]
    assert training_summary({}, None) == []


@pytest.mark.parametrize("odd", [3, "text", [1, 2], {"accuracy": "high"}, None])
def test_metadata_may_be_anything(odd):
    keys = ("model", "data", "method", "sparsity", "test", "versions", "image_shape")
    for heading, text in training_summary(dict.fromkeys(keys, odd)):
        assert heading
        assert text
