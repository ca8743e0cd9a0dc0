"""The defaults that records are read with are those of the code."""

import json

from probmask.analysis.deciding import DEFAULTS, label_of
from probmask.analysis.gather_defaults import gathered_defaults


def test_the_defaults_are_those_of_the_code():
    written = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    assert written == gathered_defaults(), (
        "a default has changed since; run `python -m probmask.analysis.gather_defaults`"
    )


def test_a_method_that_is_not_ours_shows_all_of_its_settings():
    assert label_of({"name": "mine", "sparsity": 0.9, "strength": 2.0, "hard": True}) == (
        "mine strength=2 hard=true"
    )
    assert label_of({"name": "probmask", "sparsity": 0.9}) == "probmask"
