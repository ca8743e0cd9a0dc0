"""TOML and JSON of strangers, and dataclasses built from tables: values, conversions, errors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from probmask.errors import InputError
from probmask.parsing import parse, parse_fields, parse_json, read_toml


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    kind: Literal["step", "epoch"] = "step"


@dataclass(frozen=True)
class Outer:
    count: int
    rate: float = 1.0
    text: str = ""
    switch: bool = False
    limit: int | None = 5
    numbers: tuple[float, ...] | None = None
    counts: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()
    table: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def parsed(**table):
    return parse(Outer, {"count": 1, **table}, prefix="run.", source="run.toml")


def refused(table):
    with pytest.raises(InputError) as caught:
        parse(Outer, table, prefix="run.", source="run.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_keys_keep_their_defaults():
    assert parsed() == Outer(1)
    assert parsed(inner={"rate": 0.5}).inner == Inner(rate=0.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", -7),
        ("rate", 0.5),
        ("rate", math.inf),
        ("text", "some"),
        ("text", "none"),
        ("switch", True),
        ("limit", 3),
        ("limit", None),
        ("numbers", None),
        ("table", {"any": {"thing": [1]}}),
    ],
)
def test_a_value_of_the_right_type_is_unchanged(key, value):
    passed = getattr(parsed(**{key: value}), key)
    assert passed is value or passed == value
    assert type(passed) is type(value)


def test_an_integer_is_converted_to_float():
    rate = parsed(rate=3).rate
    assert rate == 3
    assert type(rate) is float


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_becomes_a_tuple_of_its_type(kind):
    made = parsed(numbers=kind([1, 0.5]), counts=kind([1, 2]))
    assert made.numbers == (1.0, 0.5)
    assert [type(number) for number in made.numbers] == [float, float]
    assert made.counts == (1, 2)
    assert [type(number) for number in made.counts] == [int, int]
    assert parsed(numbers=[]).numbers == ()
    hash(made.numbers)


def test_the_word_none_is_none():
    assert parsed(limit="none", numbers="none") == Outer(1, limit=None, numbers=None)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("count", "1", "a whole number"),
        ("count", 1.0, "a whole number"),
        ("count", True, "a whole number"),
        ("count", "none", "a whole number"),
        ("count", None, "a whole number"),
        ("rate", "fast", "a number"),
        ("rate", False, "a number"),
        ("text", 3, "text"),
        ("switch", 1, "true or false"),
        ("switch", "true", "true or false"),
        ("limit", "all", "a whole number"),
        ("limit", True, "a whole number"),
        ("numbers", 1.5, "a list of numbers"),
        ("numbers", "1.5", "a list of numbers"),
        ("numbers", {1.5}, "a list of numbers"),
        ("patterns", "head", "a list of texts"),
        ("table", [1], "a table"),
    ],
)
def test_a_wrong_type_raises(key, value, expected):
    assert refused({"count": 1, key: value}) == (
        f"run.toml: run.{key} = {value!r}: expected {expected}."
    )


def test_a_large_value_is_shortened_in_the_message():
    digits = "1" + "0" * 78
    message = f"run.toml: run.rate = {digits}…: expected a number."
    assert refused({"count": 1, "rate": 10**400}) == message
    message = "run.toml: run.count = a very large list: expected a whole number."
    assert refused({"count": [10**5000]}) == message


def test_a_wrong_type_within_a_list_raises():
    assert refused({"numbers": [1, "b"]}) == "run.toml: run.numbers = 'b': expected a number."
    assert refused({"counts": [1, 0.5]}) == "run.toml: run.counts = 0.5: expected a whole number."
    assert refused({"numbers": [[1]]}) == "run.toml: run.numbers = [1]: expected a number."


def test_only_listed_choices_are_accepted():
    assert parsed(inner={"kind": "epoch"}).inner.kind == "epoch"
    for value in ("steps", 1, None, ["step"]):
        assert refused({"count": 1, "inner": {"kind": value}}) == (
            f"run.toml: run.inner.kind = {value!r}: expected 'step' or 'epoch'."
        )


def test_an_unknown_key_raises_with_the_nearest_key():
    assert refused({"cout": 1}) == "run.toml: unknown key run.cout; did you mean 'count'?"
    assert refused({"count": 1, "inner": {"rat": 1}}) == (
        "run.toml: unknown key run.inner.rat; did you mean 'rate'?"
    )
    assert refused({"zzz": 1, "count": "x"}) == (
        "run.toml: unknown key run.zzz; choose from count, counts, inner, limit, numbers, "
        "patterns, rate, switch, table, text."
    )


def test_a_value_in_place_of_a_table_raises():
    assert refused({"count": 1, "inner": 3}) == "run.toml: run.inner must be a table, not 3."


def test_a_missing_key_raises():
    assert refused({}) == "run.toml: run.count is missing."


def test_some_fields_can_be_parsed_alone():
    given = {"rate": 2, "numbers": [1], "inner": {"rate": 1}}
    fields = parse_fields(Outer, given, prefix="", source="here")
    assert fields == {"rate": 2.0, "numbers": (1.0,), "inner": Inner(rate=1.0)}
    assert given == {"rate": 2, "numbers": [1], "inner": {"rate": 1}}
    assert parse_fields(Outer, {}, prefix="", source="here") == {}
    with pytest.raises(InputError, match=r"^here: unknown key rte; did you mean 'rate'\?$"):
        parse_fields(Outer, {"rte": 2}, prefix="", source="here")


# Text that TOML or JSON decoders accept, or that makes them fail in their own ways.
HUGE = "1" + "0" * 4999
INFINITE = "a number must be finite and below 1e+300"
OTHER_TYPE = "expected text, a number, true or false, a list or a table"


TOO_DEEP = "tables and lists are nested too deeply"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a = 1\nb = [1 2]", "not valid TOML: Unclosed array (at line 2, column 8)"),
        (b"a = 1\nb = '\xff'", "not valid TOML: line 2 is not UTF-8 text"),
        (f"a = {HUGE}", "not valid TOML: a number has more than 4,300 digits"),
        (f"a = {HUGE[:60]}", f"a = {HUGE[:60]}: a whole number must fit in 64 bits"),
        (f"a.b = [1, 0x{HUGE}]", "a.b[1] = a very large int: a whole number must fit in 64 bits"),
        ("a = inf", f"a = inf: {INFINITE}"),
        ("a = [{ b = -nan }]", f"a[0].b = nan: {INFINITE}"),
        ("a = 1e999", f"a = inf: {INFINITE}"),
        ('"\\n" = 07:32:00', f"\\n = datetime.time(7, 32): {OTHER_TYPE}"),
        (f"a = {'[' * 5000}{']' * 5000}", f"not valid TOML: {TOO_DEEP}"),
        (f"a = {'[' * 40}{']' * 40}", f"{TOO_DEEP}; at most 32 levels are allowed"),
        (".".join("a" * 99) + " = 1", "not valid TOML: a key has more than 32 parts"),
        ("'a b' . " * 120_000, "not valid TOML: a key has more than 32 parts"),
        ("#" * 2**20 + "\n", "has 1,048,577 bytes, but such a file has at most 1,048,576"),
    ],
    ids=range(14),
)
def test_toml_that_no_record_can_store_raises(tmp_path, content, reason):
    path = tmp_path / "run.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        read_toml(path)
    assert str(caught.value) == f"{path}: {reason}."


def test_ordinary_toml_is_read(tmp_path):
    text = f'\ufeffa = {2**64 - 1}\r\nb.c = [{-(2**63)}, 1e300, "é", true]\r\n'
    (tmp_path / "run.toml").write_bytes(text.encode())
    expected = {"a": 2**64 - 1, "b": {"c": [-(2**63), 1e300, "é", True]}}
    assert read_toml(tmp_path / "run.toml") == expected
    deepest = f"a = {'[' * 31}{']' * 31}"
    (tmp_path / "run.toml").write_text(deepest)
    assert str(read_toml(tmp_path / "run.toml")["a"]) == deepest.removeprefix("a = ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"a": 1, "b": 2, "a": 3}', "not valid JSON: the key 'a' occurs twice"),
        ("[" * 100_000, "not valid JSON: tables and lists are nested too deeply"),
        (f"[{HUGE}]", "not valid JSON: a number has more than 4,300 digits"),
        ('{"a": {"b": [NaN]}}', f"a.b[0] = nan: {INFINITE}"),
        ('{"a": "\\ud800"}', "a = '\\ud800': the text is not valid Unicode"),
        ('[{"\\ud800": 1}]', "[0] = {'\\ud800': 1}: the text is not valid Unicode"),
    ],
    ids=range(7),
)
def test_json_that_no_record_can_store_raises(text, reason):
    with pytest.raises(InputError) as caught:
        parse_json(text.encode(), source="here")
    assert str(caught.value) == f"here: {reason}."
