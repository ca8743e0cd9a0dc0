"""What the fuzzers share: mutations of bytes, trees and TOML, limits, and the summary.

A fuzzer is a table of attempts. An attempt gets a random generator, makes a mutant with it, reads
the mutant, and returns the outcome. `fuzz` runs thousands of attempts within the limits. Mutant
number n depends on n alone, so ``--seed n --mutations 1`` repeats it and prints its traceback.
"""

import argparse
import copy
import faulthandler
import io
import json
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from functools import partial
from pathlib import Path
from typing import Any

from probmask.errors import InputError

Mutation = Callable[[bytes, random.Random], bytes]
# Makes a mutant, reads it and returns the outcome. An InputError is the outcome "refused", and any
# other exception a failure.
Attempt = Callable[[random.Random], str]

ACCEPTED, REFUSED, FAILED = "accepted", "refused", "FAILED"
_EXIT_CODES = {0: ACCEPTED, 1: "exit 1", 2: REFUSED}


class TooSlowError(BaseException):
    """An attempt took too long. No ``except Exception`` of the tested code catches it."""


def parse_options(description: str, *, mutations: int = 10_000) -> argparse.Namespace:
    """Parse the options that all fuzzers have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=mutations, help="number of mutants")
    parser.add_argument(
        "--seed", type=int, default=0, help="number of the first mutant; repeats it exactly"
    )
    parser.add_argument(
        "--memory", type=int, default=512, help="limit in MiB beyond PyTorch itself"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a mutant")
    return parser.parse_args()


def fuzz(attempts: Mapping[str, Attempt], options: argparse.Namespace) -> int:
    """Run the attempts, print the failures and a summary, and return the exit code.

    Call it after the imports and the preparation, since it limits the memory of the process.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in attempts}
    slowest, started = (0.0, options.seed), time.perf_counter()
    _limit_memory(options.memory)
    for seed in range(options.seed, options.seed + options.mutations):
        begun = time.perf_counter()
        name, outcome, trace = try_mutant(attempts, seed, partial(_time_limit, options.seconds))
        slowest = max(slowest, (time.perf_counter() - begun, seed))
        counts[name][outcome.partition(":")[0]] += 1
        if outcome.startswith(FAILED):
            print(f"seed {seed}, {name}: {outcome!r:.400}", flush=True)
            if options.mutations == 1:
                print(trace)
    _print_summary(counts)
    failures = sum(counter[FAILED] for counter in counts.values())
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{options.mutations} mutations, {failures} failures, in {seconds:.0f} s;")
    print(
        f"slowest: {1e3 * slowest[0]:.0f} ms (seed {slowest[1]}); peak memory: {peak:.0f} MiB, "
        f"limit: {options.memory} MiB beyond PyTorch itself"
    )
    return 1 if failures else 0


def try_mutant(
    attempts: Mapping[str, Attempt],
    seed: int,
    limit: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[str, str, str]:
    """Make the mutant with this number; return its kind, its outcome, and a failure's traceback."""
    rng = random.Random(seed)
    name = rng.choice(list(attempts))
    try:
        with limit():
            return name, attempts[name](rng), ""
    except InputError:
        return name, REFUSED, ""
    except (Exception, TooSlowError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = f"{FAILED}: {type(error).__name__} in {place}: {str(error)[:250]}"
        return name, outcome, traceback.format_exc()


def run_command(arguments: Sequence[str]) -> str:
    """Run a command of probmask in this process; return the outcome that its exit code means.

    Raises:
        AssertionError: The command printed a traceback or a control character, or its exit code
            is unknown.
    """
    from probmask.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: object = main(arguments)
        except SystemExit as error:  # argparse
            code = error.code
    printed = out.getvalue() + err.getvalue()
    assert "Traceback" not in printed, printed
    control = re.search(r"[^\n\t -~\u00a0-\U0010ffff]", printed)
    assert control is None, f"control character {control.group()!r} in {printed[:300]!r}"
    assert code in _EXIT_CODES, f"exit code {code}"
    return _EXIT_CODES[code]  # type: ignore[index]


def _limit_memory(mebibytes: int) -> None:
    """Limit this process to `mebibytes` beyond its current size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # A signal does not interrupt compiled code. Then the process prints its stack and ends.
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _print_summary(counts: Mapping[str, Counter[str]]) -> None:
    total = sum(counts.values(), Counter[str]())
    columns = [*sorted({*total} - {FAILED}, key=lambda name: -total[name]), FAILED]
    print("\n| mutation | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, counter in {**counts, "all": total}.items():
        print(f"| {name} | " + " | ".join(f"{counter[column]:,}" for column in columns) + " |")


# Mutations of bytes.


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    """Flip one to four bits."""
    changed = bytearray(content or b"\0")
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Truncate the file, sometimes to nothing."""
    return content[: rng.choice([0, *rng.choices(range(max(1, len(content))), k=9)])]


def splice(content: bytes, rng: random.Random) -> bytes:
    """Replace, insert or delete a few bytes."""
    at, dropped = rng.randrange(len(content) + 1), rng.randrange(20)
    return content[:at] + rng.randbytes(rng.randrange(20)) + content[at + dropped :]


def move_blocks(content: bytes, rng: random.Random) -> bytes:
    """Copy one block over another, as a torn write does."""
    size = min(rng.choice([8, 64, 512]), len(content) // 2)
    source, target = (rng.randrange(len(content) - size + 1) for _ in range(2))
    return content[:target] + content[source : source + size] + content[target + size :]


def write_zeros(content: bytes, rng: random.Random) -> bytes:
    """Replace a part by NUL bytes, as a file system does after a power failure."""
    begin = rng.randrange(len(content) + 1)
    end = min(len(content), begin + rng.choice([1, 16, 512, len(content)]))
    return content[:begin] + bytes(end - begin) + content[end:]


def insert_text(content: bytes, rng: random.Random) -> bytes:
    """Insert bytes that text should not contain: BOM, invalid UTF-8, escapes, line separators."""
    odd = [
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\x1b[2J",
        b"\0",
        b"\r",
        b"\x85",
    ]
    at = rng.choice([0, rng.randrange(len(content) + 1), len(content)])
    return content[:at] + rng.choice(odd) + content[at:]


def shuffle_lines(content: bytes, rng: random.Random) -> bytes:
    """Repeat, drop, halve or move a line."""
    lines = content.split(b"\n")
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    line = lines[at]
    action = rng.randrange(4)
    if action == 0:
        lines.insert(to, line)
    elif action == 1:
        del lines[at]
    elif action == 2:
        lines[at] = line[: len(line) // 2]
    else:
        lines.insert(to, lines.pop(at))
    return b"\n".join(lines)


def unchanged(content: bytes, rng: random.Random) -> bytes:  # noqa: ARG001
    """Change nothing, to check that the tested code accepts the intact file."""
    return content


DAMAGE: tuple[Mutation, ...] = (
    flip_bits,
    cut,
    splice,
    move_blocks,
    write_zeros,
    insert_text,
    shuffle_lines,
)

# Mutations of trees: what JSON and TOML decode to.

_NUMBERS = (
    0,
    1,
    -1,
    255,
    256,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64,
    10**400,
    1.5,
    1e308,
    5e-324,
)
_TEXTS = ("", "none", "dense", "\ud800", "\0", "\x1b[31m", "[/red]", "x" * 999, "1", "NaN", "../..")
_TABLES = ([], {}, [[]], {"": 0}, [2**40], [0, 2**62], [1] * 65, [None], [{}], {"a": {"a": []}})


def edited(tree: Any, rng: random.Random, words: Sequence[Any] = ()) -> Any:
    """Return a copy of the tree with one node changed, removed, moved, copied or renamed.

    `words` are values that mean something to the tested code, in addition to the usual odd ones.
    """
    tree = copy.deepcopy(tree)
    holders = [node for node in _nodes(tree) if isinstance(node, dict | list) and node]
    if not holders:
        return anything(rng, words)
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    action = rng.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1:
        holder[key] = anything(rng, words)
    elif action == 2:
        holder[key] = copy.deepcopy(rng.choice(_nodes(tree)))
    elif action == 3 and isinstance(holder, dict):
        names = [name for name in (*words, f"{key}x", "name") if isinstance(name, str)]
        holder[rng.choice(names)] = holder[key]
    else:
        holder[key] = near(holder[key], rng, words)
    return tree


def anything(rng: random.Random, words: Sequence[Any] = ()) -> Any:
    """Return a value that the code may not expect."""
    others = (None, True, False)
    pools = [_NUMBERS, _TEXTS, _TABLES, others, *([words] if words else [])]
    return copy.deepcopy(rng.choice(rng.choice(pools)))


def _nodes(tree: Any) -> list[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tree, *(node for child in children for node in _nodes(child))]


def near(value: Any, rng: random.Random, words: Sequence[Any] = ()) -> Any:
    """Return a value close to this one: the next number, a longer list, or anything."""
    if isinstance(value, list):
        return [*value, rng.choice([0, 1, 2, 2**20, 2**40])]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return anything(rng, words)
    return rng.choice([value + 1, value - 1, value + 8, value - 8, 2 * value, -value, str(value)])


# Mutations of the text of JSON and TOML: what no encoder writes.

_HUGE = "1" + "0" * 5000
_JSON_VALUES = (
    "NaN",
    "-Infinity",
    "1e999",
    _HUGE,
    f"-{_HUGE}",
    f"0.{_HUGE}e{_HUGE[:9]}",
    "[" * 10_000 + "]" * 10_000,
    '{"a":' * 10_000 + "0" + "}" * 10_000,
    "[" * 500 + "]" * 500,
    '{"a": 1, "a": 2}',
    '"\\ud800"',
    '"\\u0000"',
    "'a'",
    "",
    "0x1",
    "01",
    "tru",
)
_JSON_SCALAR = re.compile(rb'(?<=: )(?:-?[0-9][0-9.e+-]*|"[^"\\]*"|true|false|null)')
_TOML_VALUES = (
    "inf",
    "-nan",
    "1e999",
    _HUGE,
    f"0x{_HUGE}",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    '[1, "a", [true]]',
    "[" * 5000 + "]" * 5000,
    "[" * 200 + "]" * 200,
    "{a = " * 5000 + "1" + "}" * 5000,
    "{}",
    "[]",
    "[{}]",
    '""',
    '"\\u001b[31m"',
    '"\\ud800"',
    "'''\n[/red]\n'''",
    '"none"',
    "0",
    "-1",
    "9223372036854775807",
    "0.5",
    "true",
    "",
)
_TOML_KEYS = (
    '""',
    '"\\u001b[2J"',
    "ä",
    '"[/red]"',
    "a.b.c",
    ".".join("a" * 5000),
    ".".join("a" * 60),
    "[a]",
    "[[grid]]",
    "[run.optimizer.lr]",
)
_TOML_LINE = re.compile(rb"^([\w.\"-]+) = (.*)$", re.MULTILINE)


def edit_json_text(content: bytes, rng: random.Random) -> bytes:
    """Replace a value of JSON (written with a space after each colon) by text of another kind."""
    return _replaced(content, rng, _JSON_SCALAR, _JSON_VALUES)


def edit_toml_value(content: bytes, rng: random.Random) -> bytes:
    """Replace the value of a key of TOML."""
    matches = list(_TOML_LINE.finditer(content))
    if not matches:
        return content
    match = rng.choice(matches)
    text = match[2].decode(errors="replace")
    values = [rng.choice(_TOML_VALUES), rng.choice(matches)[2].decode(errors="replace")]
    if re.fullmatch(r"[1-9]\d{0,9}(\.\d{1,9})?", text):
        values.append(str(near(json.loads(text), rng)))
    value = rng.choice(values)
    return content[: match.start(2)] + value.encode() + content[match.end(2) :]


def edit_toml_key(content: bytes, rng: random.Random) -> bytes:
    """Rename a key of TOML, or add one."""
    matches = list(_TOML_LINE.finditer(content))
    if not matches:
        return content
    match = rng.choice(matches)
    key = rng.choice([*_TOML_KEYS, rng.choice(matches)[1].decode(errors="replace")])
    if rng.random() < 0.5:
        return content[: match.start(1)] + key.encode() + content[match.end(1) :]
    line = key if key.startswith("[") else f"{key} = 1"
    return content[: match.start()] + f"{line}\n".encode() + content[match.start() :]


TOML_EDITS: tuple[Mutation, ...] = (edit_toml_value, edit_toml_value, edit_toml_key)


def _replaced(
    content: bytes, rng: random.Random, pattern: "re.Pattern[bytes]", values: Sequence[str]
) -> bytes:
    matches = list(pattern.finditer(content))
    if not matches:
        return content
    match = rng.choice(matches)
    return content[: match.start()] + rng.choice(values).encode() + content[match.end() :]


def json_bytes(tree: Any) -> bytes:
    """Return the tree as JSON, with one key per line as probmask writes it."""
    return json.dumps(tree, indent=2).encode()


def several(mutations: Sequence[Mutation], most: int = 3) -> Mutation:
    """Return a mutation that applies one to `most` of the mutations."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        for _ in range(rng.randint(1, most)):
            content = rng.choice(mutations)(content, rng)
        return content

    return mutate
