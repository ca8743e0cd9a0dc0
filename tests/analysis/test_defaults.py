"""defaults.json has the defaults of the code."""

import json

from probmask.analysis.defaults import collect_defaults
from probmask.analysis.identity import DEFAULTS, method_label


def test_the_file_has_the_defaults_of_the_code():
    written = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    assert written == collect_defaults(), (
        "defaults.json is outdated; run `python -m probmask.analysis.defaults`"
    )


def test_label_of_an_unknown_method_has_all_settings():
    assert method_label({"name": "mine", "sparsity": 0.9, "strength": 2.0, "hard": True}) == (
        "mine strength=2 hard=true"
    )
    assert method_label({"name": "probmask", "sparsity": 0.9}) == "probmask"
