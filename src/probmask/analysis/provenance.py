"""What an artifact says of its training, as lines for people; its metadata may be anybody's."""

from collections.abc import Mapping
from typing import Any

from probmask.analysis.deciding import unusual_settings
from probmask.checks import is_number

# What the training writes down for programs, beside what has a line of its own.
_FOR_PROGRAMS = frozenset(("class_names", "macs_per_weight", "model_args", "data_args"))
_LONGEST = 200  # characters of what anybody may have put there


def provenance(
    metadata: Mapping[str, Any], rounding: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """What is known of the training: pairs of a heading and what there is to say."""
    sparsity = _table(metadata.get("sparsity"))
    lines = [
        ("model", _with_settings(metadata.get("model"), metadata.get("model_args"))),
        ("data", _with_settings(metadata.get("data"), metadata.get("data_args"))),
        ("images", _shape(metadata.get("image_shape"))),
        ("method", _method(metadata.get("method"))),
        ("sparsity", _asked_and_reached(sparsity) or _text(metadata.get("sparsity"))),
        ("epochs", _text(metadata.get("epochs"))),
        ("seed", _text(metadata.get("seed"))),
        ("test accuracy", _accuracy(metadata.get("test"))),
        ("made with", _versions(metadata.get("versions"))),
        ("rounding", _assignments(rounding or {})),
    ]
    known = {"image_shape", "test", "versions", *_FOR_PROGRAMS, *(heading for heading, _ in lines)}
    lines += [(key, _text(metadata[key])[:_LONGEST]) for key in metadata if key not in known]
    return [(heading, text) for heading, text in lines if text]


def _with_settings(name: Any, settings: Any) -> str:
    if name is None:
        return ""
    table = _table(settings)
    return f"{_text(name)} ({_assignments(table)})" if table else _text(name)


def _method(value: Any) -> str:
    """The method, and those of its settings that are not its defaults; the sparsity has a line."""
    table = _table(value)
    if not table:
        return _text(value)
    name = table.get("name", "?")
    unusual = unusual_settings({"name": name, **table})
    other = {key: setting for key, setting in unusual.items() if key != "sparsity"}
    return f"{_text(name)} ({_assignments(other)})" if other else _text(name)


def _asked_and_reached(sparsity: Mapping[str, Any]) -> str:
    shown = [
        f"{100.0 * sparsity[key]:.2f} % {key}"
        for key in ("asked", "reached")
        if is_number(sparsity.get(key))
    ]
    return ", ".join(shown)


def _accuracy(test: Any) -> str:
    table = _table(test)
    if is_number(table.get("accuracy")) and {"correct", "total"} <= table.keys():
        return f"{table['accuracy']:.2f} % ({table['correct']} of {table['total']} correct)"
    return _text(test)


def _versions(value: Any) -> str:
    return ", ".join(f"{name} {_text(version)}" for name, version in _table(value).items())


def _shape(value: Any) -> str:
    return "×".join(_text(size) for size in value) if isinstance(value, list) else _text(value)


def _assignments(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_text(value)}" for key, value in table.items())


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)
