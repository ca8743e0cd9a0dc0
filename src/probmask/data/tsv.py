"""Sentences and labels of the user, from tab-separated files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from probmask.data.settings import Sentences
from probmask.data.splits import select_test
from probmask.data.tokenized import Texts, TokenizedSentences
from probmask.errors import InputError
from probmask.files import read_bounded
from probmask.messages import listed, shown, suggestion

_TRAIN, _TEST = "train.tsv", "test.tsv"
_VALIDATION = ("dev.tsv", "val.tsv", "valid.tsv", "validation.tsv")
_TEXT_NAMES, _LABEL_NAME = ("sentence", "text"), "label"
_LARGEST_FILE = 2**31  # bytes
_MAX_SHOWN = 60  # characters of a label in a message


@dataclass(frozen=True)
class _Rows:
    """The sentences and labels of one file, as text."""

    path: Path
    sentences: Sequence[str]
    labels: Sequence[str]


def tsv(path: Path | None, settings: Sentences) -> TokenizedSentences:
    """Your own sentences and labels: train.tsv and test.tsv or dev.tsv in DIR, or one FILE.tsv."""
    if path is None:
        raise InputError(
            "--data tsv: needs sentences; pass --data-dir DIR with train.tsv in it, or a file."
        )
    files = _find_files(path)
    rows = {part: _read(file, settings) for part, file in files.items()}
    classes = _class_names(rows["train"])
    parts = {part: _texts(each, classes) for part, each in rows.items()}
    if "test" not in parts:
        everything = parts["train"]
        selected = select_test("tsv", everything.labels, examples="sentences")
        parts["train"] = everything[(~selected).nonzero().flatten()]
        parts["test"] = everything[selected.nonzero().flatten()]
    return TokenizedSentences("tsv", parts, settings, class_names=classes)


def _find_files(path: Path) -> dict[str, Path]:
    """Return the files of the parts. A lone validation file is for testing."""
    if not path.exists():
        raise InputError(f"--data-dir {path}: does not exist; pass a directory with {_TRAIN}.")
    if not path.is_dir():
        return {"train": path}
    if not (path / _TRAIN).exists():
        raise InputError(
            f"--data-dir {path}: contains no {_TRAIN}; put the training sentences there."
        )
    found = {"train": path / _TRAIN}
    validation = [name for name in _VALIDATION if (path / name).exists()]
    if len(validation) > 1:
        raise InputError(
            f"--data-dir {path}: contains {' and '.join(validation)}; keep one validation file."
        )
    if (path / _TEST).exists():
        found["test"] = path / _TEST
    for name in validation:
        found["val" if "test" in found else "test"] = path / name
    return found


def _read(path: Path, settings: Sentences) -> _Rows:
    lines = _lines(path)
    if not lines:
        raise InputError(f"{path}: contains no sentences.")
    first = lines[0][1]
    for number, cells in lines:
        if len(cells) != len(first):
            raise InputError(
                f"{path}: line {number} has {len(cells)} columns, but line {lines[0][0]} has "
                f"{len(first)}; separate the columns by one tab each."
            )
    if len(first) == 1:
        raise InputError(f"{path}: has one column; separate sentence and label by a tab.")
    text, label, header = _columns(path, first, settings)
    body = lines[1:] if header else lines
    if settings.header is None and not header:
        _check_is_no_header(path, body, label)
    for number, cells in body:
        for column, what in ((text, "sentence"), (label, "label")):
            if not cells[column].strip():
                raise InputError(f"{path}: line {number} has no {what}; remove the line.")
    if not body:
        raise InputError(f"{path}: contains no sentences.")
    return _Rows(path, [c[text].strip() for _, c in body], [c[label].strip() for _, c in body])


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the number and the cells of each line that is not empty. There are no quotes."""
    content = read_bounded(path, most=_LARGEST_FILE)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line} is not UTF-8 text.") from error
    numbered = ((n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), start=1))
    return [(number, line.split("\t")) for number, line in numbered if line.strip()]


def _columns(path: Path, first: Sequence[str], settings: Sentences) -> tuple[int, int, bool]:
    """Return the indices of the sentences and of the labels, and whether there is a header."""
    names = {name.strip().lower(): index for index, name in enumerate(first)}
    usual = [name for name in _TEXT_NAMES if name in names]
    is_usual = bool(usual) and _LABEL_NAME in names
    named = any(isinstance(column, str) for column in (settings.text, settings.label))
    header = settings.header if settings.header is not None else named or is_usual
    if not header and named:
        raise InputError(
            "data_args(header=False): a file without header has no names of columns; give "
            "data_args.text and data_args.label as numbers, from 1 on."
        )
    defaults: tuple[int | None, int | None] = (None, None) if len(first) != 2 else (0, 1)
    if header:
        defaults = (names[usual[0]] if usual else None, names.get(_LABEL_NAME))
    chosen = [
        _column(path, setting, column, names if header else {}, len(first), default)
        for (setting, column), default in zip(
            (("text", settings.text), ("label", settings.label)), defaults, strict=True
        )
    ]
    if chosen[0] == chosen[1]:
        raise InputError(f"{path}: sentences and labels are both in column {chosen[0] + 1}.")
    return chosen[0], chosen[1], header


def _column(
    path: Path,
    setting: str,
    column: str | int | None,
    names: Mapping[str, int],
    count: int,
    default: int | None,
) -> int:
    if isinstance(column, str):
        if column.strip().lower() not in names:
            raise InputError(
                f"data_args({setting}={column!r}): {path} has no such column; "
                f"{suggestion(column.strip().lower(), names)}"
            )
        return names[column.strip().lower()]
    if column is not None:
        if column > count:
            raise InputError(f"data_args({setting}={column}): {path} has {count} columns.")
        return column - 1
    if default is None:
        raise InputError(
            f"{path}: has {count} columns, and which of them is the {setting} is not clear; set "
            f"data_args.{setting} to its name, or to its number from 1 on."
        )
    return default


def _check_is_no_header(path: Path, body: Sequence[tuple[int, list[str]]], label: int) -> None:
    """Raise if the first line seems to name the columns: its label occurs nowhere else."""
    counts = Counter(cells[label].strip() for _, cells in body)
    first = body[0][1][label].strip()
    if len(body) > 2 and counts[first] == 1 and not first.isdecimal():
        raise InputError(
            f"{path}: the first line seems to name the columns, because its label "
            f"{shown(first, _MAX_SHOWN)} occurs nowhere else. Set data_args.text and "
            "data_args.label to the names of the columns, or data_args.header to false."
        )


def _class_names(train: _Rows) -> tuple[str, ...]:
    """Return the labels of the training sentences, in numerical order if they are numbers."""
    names = sorted(set(train.labels))
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    if len(names) < 2:
        raise InputError(f"{train.path}: all labels are {names[0]!r}; expected several classes.")
    if len(names) == len(train.labels) > 2:
        raise InputError(
            f"{train.path}: no label occurs twice, so the labels are not classes; check "
            "data_args.label."
        )
    return tuple(names)


def _texts(rows: _Rows, classes: Sequence[str]) -> Texts:
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = sorted(set(rows.labels) - set(classes))
    if unknown:
        raise InputError(
            f"{rows.path}: has the label {shown(unknown[0], _MAX_SHOWN)}, which no training "
            f"sentence has; the classes are {listed([name[:_MAX_SHOWN] for name in classes])}."
        )
    return Texts(rows.sentences, torch.tensor([numbers[label] for label in rows.labels]))
