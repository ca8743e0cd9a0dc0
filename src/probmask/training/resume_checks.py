"""Checks that a checkpoint belongs to the run that continues from it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probmask.errors import CheckpointError, NonFiniteError, VersionWarning
from probmask.masking.distributed import gathered
from probmask.messages import printable
from probmask.training import checkpoint_schema as schema
from probmask.training.config import TrainConfig, to_table
from probmask.training.record import versions
from probmask.training.record_format import without_keys_of_session

_MAX_SECONDS = 1e12  # of training


def field_rules(total_steps: int) -> dict[str, schema.Rule]:
    """Return the rules of all fields, except that parts of the state may have any content."""
    return {
        "config": schema.table_of(schema.text, schema.plain),
        "data": schema.text,
        "step": schema.whole_number(0, total_steps),
        "sums": schema.rows_of_sums,
        "seconds": schema.number(0, _MAX_SECONDS),
        "log": schema.text,
        "unreadable": schema.table_of(schema.text, schema.text),
        "versions": schema.list_of(schema.table_of(schema.text, schema.text)),
        **dict.fromkeys(("model", "optimizer", "sparsifier"), schema.anything),
    }


def check_together(
    state: Mapping[str, Any], rules: Mapping[str, schema.Rule], field: schema.Field
) -> None:
    """Apply rules to fields of the state; a rank of a sharded network examines its rows only.

    Raises:
        CheckpointError: A field does not fit, on all ranks.
    """
    problem = None
    try:
        for key, rule in rules.items():
            rule(state[key], field[key])
    except CheckpointError as error:
        problem = str(error)
    for text in gathered(problem):
        if text is not None:
            raise CheckpointError(text)


def same_settings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare configurations. Settings that an earlier version did not have are the defaults."""
    defaults = to_table(TrainConfig())
    before, after = (without_keys_of_session(each) for each in ({**defaults, **earlier}, now))
    optimizers = [before.pop("optimizer"), after.pop("optimizer")]
    if isinstance(optimizers[0], Mapping):
        optimizers[0] = {"args": {}, **optimizers[0]}
    return before == after and optimizers[0] == optimizers[1]


@contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """Add to a `NonFiniteError` where the last finite checkpoint is, if there is one."""
    try:
        yield
    except NonFiniteError as error:
        if not path.exists():
            raise
        raise NonFiniteError(
            f"{error} The last finite checkpoint is {path}. A run resumes only with its own "
            "settings, so change them in a new run."
        ) from error


def joined_versions(earlier: Sequence[dict[str, str]], path: Path) -> list[dict[str, str]]:
    """Return the versions of all sessions; warn if those of this one differ from the last ones."""
    now = versions()
    before = earlier[-1] if earlier else now
    if before == now:
        return [*earlier] or [now]
    changed = [
        f"{name} {before.get(name, 'absent')} (now {now.get(name, 'absent')})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    warnings.warn(
        f"{path}: was written with {printable(', '.join(changed))}; the result may differ from "
        "that of an uninterrupted run.",
        VersionWarning,
        stacklevel=2,
    )
    return [*earlier, now]
