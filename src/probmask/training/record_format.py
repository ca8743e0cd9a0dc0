"""The format of records, and how they are read and checked.

This is separate from `record` because readers, such as `probmask compare`, start without PyTorch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from probmask.checks import Range
from probmask.errors import InputError
from probmask.files import read_bounded
from probmask.parsing import parse_json
from probmask.schema import mismatch

# Version of the record's keys. Increase it when a key changes its meaning.
RECORD_FORMAT = 5
# Bytes of a record: far above the records of large networks, and low enough for little memory.
LARGEST_RECORD = 2**24

# Configuration keys that do not influence the result, so they may differ when a run is resumed.
# The data and the initial weights may have moved; digests of their content are compared.
NEUTRAL_KEYS = frozenset(
    ("checkpoint_seconds", "data_dir", "init", "tensorboard", "timeout_seconds", "workers")
)
# Keys that may differ when a run is resumed: those, and the ranks, which change the rounding of
# sums, and the noise of methods that draw it on every rank.
KEYS_OF_SESSION = NEUTRAL_KEYS | {"devices", "strategy"}

_Count = Annotated[int, Range(0, meaning="a whole number")]
_Positive = Annotated[int, Range(1, meaning="a whole number")]
_Amount = Annotated[float, Range(0, meaning="a number")]
_Fraction = Annotated[float, Range(0, 1, "a fraction")]
_Percent = Annotated[float, Range(0, 100, "a percentage")]
_Asked = Annotated[float, Range(0, 1 - 2**-53, "a sparsity below 1")]
_Table = dict[str, Any]


class _Method(TypedDict):
    name: str
    sparsity: NotRequired[_Fraction]


class _Sparsity(TypedDict):
    asked: _Asked
    reached: _Fraction


class _Network(TypedDict):
    kept: _Count
    size: _Positive
    sparsity: _Fraction


class _Macs(TypedDict):
    dense: _Amount
    sparse: _Amount


class _Score(TypedDict):
    correct: _Count
    total: _Positive
    accuracy: _Percent


class _Selection(_Score):
    on: str


class _Layer(TypedDict):
    name: str
    shape: list[_Count]
    kept: _Count
    size: _Positive
    sparsity: _Fraction
    macs_per_weight: _Amount


class _Config(TypedDict, total=False):
    data: str
    data_dir: str | None
    data_args: _Table
    model: str
    model_args: _Table
    method: _Table
    optimizer: _Table
    batch_size: _Positive
    epochs: _Positive
    seed: _Count


class _Latency(TypedDict):
    milliseconds: _Amount
    batch: NotRequired[_Positive]
    threads: NotRequired[_Positive]


class HistogramTable(TypedDict):
    """A histogram in a record or in a line of the metrics log."""

    low: float
    high: float
    counts: list[_Count]


class _LogLine(TypedDict, total=False):
    epoch: Annotated[float, Range(0, 2**63, "a number of epochs")]
    histograms: dict[str, HistogramTable]


class _Record(TypedDict):
    """What every reader of a record relies on. Other keys are shown, but not computed with."""

    format: _Positive
    model: str
    data: str
    method: _Method
    seed: _Count
    epochs: _Positive
    updates: _Positive
    sparsity: _Sparsity
    kept: _Count
    size: _Positive
    macs: _Macs
    test: _Score
    layers: list[_Layer]
    seconds: _Amount
    bytes: _Count
    config: _Config
    network: NotRequired[_Network]
    selection: NotRequired[_Selection | None]
    examples: NotRequired[str]
    train_images: NotRequired[_Count]
    unreadable: NotRequired[list[str]]
    versions: NotRequired[_Table]
    hardware: NotRequired[_Table]
    latency: NotRequired[_Latency]
    history: NotRequired[list[_LogLine]]


def without_keys_of_session(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration table that stay the same when a run is resumed."""
    return {key: value for key, value in config.items() if key not in KEYS_OF_SESSION}


def read_record(path: Path) -> dict[str, Any]:
    """Read a record and check it. All records are read here or by `parse_record`.

    Raises:
        InputError: The file cannot be read, is damaged, or has a newer format.
    """
    return parse_record(read_bounded(path, most=LARGEST_RECORD), path)


def parse_record(content: bytes, path: Path) -> dict[str, Any]:
    """Check the content of the record at ``path`` and return it, as `read_record` does."""
    try:
        record: Any = parse_json(content, source=str(path))
    except InputError as error:
        raise damaged_record(path, str(error).removeprefix(f"{path}: ").rstrip(".")) from error
    written = record.get("format") if isinstance(record, dict) else None
    if isinstance(written, int) and written > RECORD_FORMAT:
        raise InputError(
            f"{path}: the record has format {written}, but this version of probmask reads formats "
            f"up to {RECORD_FORMAT}; upgrade probmask."
        )
    wrong = mismatch(record, _Record)
    if wrong is not None:
        raise damaged_record(path, wrong)
    table: dict[str, Any] = record
    return table


def damaged_record(path: Path, reason: str) -> InputError:
    """Return the error for a record that is damaged."""
    return InputError(
        f"{path}: the record is damaged ({reason}); delete it or restore it from a copy."
    )
