"""What a model returns, as JSON: names of outputs and plain values in tuples, lists and dicts."""

from typing import Any

from probmask.storage.encodings import require

_MAX_DEPTH = 20


def names_in(tree: Any, depth: int = 0) -> list[str]:
    """Return the names of the outputs, or raise `ArtifactError` if the tree is not valid."""
    require(depth <= _MAX_DEPTH, "what the network returns is nested too deeply")
    require(isinstance(tree, dict) and len(tree) == 1, "what the network returns is not valid")
    (key, value), *_ = tree.items()
    if key == "value":
        require(isinstance(value, str), "an output has no name")
        return [value]
    if key == "constant":
        plain = value is None or isinstance(value, bool | int | float | str)
        require(plain, "a constant output is not a number or a text")
        return []
    if key == "dict":
        require(isinstance(value, dict), "an output that is a dict is not valid")
        return [name for inner in value.values() for name in names_in(inner, depth + 1)]
    require(key in ("tuple", "list") and isinstance(value, list), "an output is not valid")
    return [name for inner in value for name in names_in(inner, depth + 1)]


class OutputTree:
    """Arranges the outputs as the model's `forward` returned them."""

    def __init__(self, tree: Any) -> None:
        self.names = names_in(tree)
        self._tree = tree

    def __call__(self, values: dict[str, Any]) -> Any:
        """Return the outputs, each in an array of its own."""
        return _filled(self._tree, values, set())


def _filled(tree: Any, values: dict[str, Any], returned: set[str]) -> Any:
    ((key, inner),) = tree.items()
    if key == "value":
        array = values[inner].copy() if inner in returned else values[inner]
        returned.add(inner)
        return array
    if key == "constant":
        return inner
    if key == "dict":
        return {name: _filled(item, values, returned) for name, item in inner.items()}
    items = [_filled(item, values, returned) for item in inner]
    return tuple(items) if key == "tuple" else items
