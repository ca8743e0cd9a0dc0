"""Summaries of kept weights."""

from probmask.masking.summary import LayerSummary, Summary


def test_the_summary_lists_every_layer():
    summary = Summary((LayerSummary("a", (4, 5), 5, 20), LayerSummary("b", (10,), 0, 10)))
    assert (summary.kept, summary.size, summary.sparsity) == (5, 30, 1 - 5 / 30)
    assert str(summary).splitlines() == [
        "a: 5 of 20 kept, 75.00 % sparse",
        "b: 0 of 10 kept, 100.00 % sparse",
        "all: 5 of 30 kept, 83.33 % sparse",
    ]


def test_the_sparsity_of_an_empty_network_is_zero():
    summary = Summary((LayerSummary("empty", (0, 5), 0, 0),))
    assert summary.sparsity == 0
    assert str(summary).splitlines()[0] == "empty: 0 of 0 kept, 0.00 % sparse"
