"""The defaults that records are read with are those of the code."""

import json

from probmask.analysis.defaults import collect_defaults
from probmask.analysis.identity import DEFAULTS, method_label


def test_the_defaults_are_those_of_the_code():
    written = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    assert written == collect_defaults(), (
        "a default has changed since; run `python -m probmask.analysis.defaults`"
    )


def test_a_method_that_is_not_ours_shows_all_of_its_settings():
    assert method_label({"name": "mine", "sparsity": 0.9, "strength": 2.0, "hard": True}) == (
        "mine strength=2 hard=true"
    )
    assert method_label({"name": "probmask", "sparsity": 0.9}) == "probmask"
