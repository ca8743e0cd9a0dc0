"""Facts about records that readers need.

They are separate from `record` because readers, such as `probmask compare`, start without PyTorch.
"""

from collections.abc import Mapping
from typing import Any

# Version of the record's keys. Increase it when a key changes its meaning.
RECORD_FORMAT = 4

# Configuration keys that do not influence the result, so they may differ when a run is resumed.
# The data may have moved; a fingerprint of its content shows whether it is still the same.
NEUTRAL_KEYS = frozenset(("checkpoint_seconds", "data_dir", "tensorboard", "workers"))


def without_neutral_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration table that influence the result."""
    return {key: value for key, value in config.items() if key not in NEUTRAL_KEYS}
