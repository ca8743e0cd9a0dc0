"""Assemble the page from markup, style, script and data, as one file that works offline."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from probmask.analysis.records import Run
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.report.payload import make_payload

# Concatenated into one script, in this order.
_SCRIPTS = (
    "elements.js",
    "plot.js",
    "figures.js",
    "training_figures.js",
    "network_figures.js",
    "tables.js",
    "page.js",
)
# Identifies our own pages; it is near the beginning of the file.
_MARK = b'<meta name="generator" content="probmask report">'


def write_page(runs: Sequence[Run], out: Path) -> int:
    """Write the page and return its size in bytes.

    Args:
        runs: Finished runs, at least one.
        out: The file to write. An older page is replaced, but no other file.

    Returns:
        The size of the page in bytes.

    Raises:
        InputError: If there are no runs, or `out` cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from probmask.report import write_page
        >>> write_page([], Path("report.html"))
        Traceback (most recent call last):
        ...
        probmask.errors.InputError: report: no finished runs to show; pass directories with records.
    """
    if not runs:
        raise InputError("report: no finished runs to show; pass directories with records.")
    _check_replaceable(out)
    page = render_page(runs).encode(errors="replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot create its directory ({error.strerror}); choose another."
        ) from error
    write_atomically(out, page, overwrite=True)
    return len(page)


def render_page(runs: Sequence[Run]) -> str:
    """Return the HTML of the page, which depends on the records only.

    Args:
        runs: Finished runs, as `find_records` reads them.

    Returns:
        The HTML text.

    Example:
        >>> from pathlib import Path
        >>> from probmask.analysis.records import Run
        >>> record = {
        ...     "method": {"name": "gmp"}, "config": {}, "seed": 0, "epochs": 30, "layers": [],
        ...     "test": {"accuracy": 90.0}, "sparsity": {"asked": 0.9, "reached": 0.9},
        ...     "kept": 1, "size": 10, "macs": {"dense": 10, "sparse": 1}, "bytes": 4, "seconds": 1,
        ... }
        >>> render_page([Run(Path("record.json"), record)]).splitlines()[0]
        '<!doctype html>'
    """
    payload = make_payload(runs)
    style = _part("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_part, _SCRIPTS)) + "})();\n"
    # The policy permits only this script and this style, whatever a record contains.
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            f"style-src {_digest(style)}",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    titles = {setting["title"] for setting in payload["settings"]}
    title = titles.pop() if len(titles) == 1 else f"{len(payload['settings'])} settings"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _embedded(payload),
    }
    page = _part("page.html")
    pieces = page.split("@")  # in the template, @ only encloses the names of parts
    return "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))


def _embedded(value: Any) -> str:
    """Write JSON without characters that could close or open an HTML element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _check_replaceable(out: Path) -> None:
    if not out.is_file():
        return  # writing raises an error for anything else
    with out.open("rb") as file:
        ours = _MARK in file.read(1024)
    if not ours:
        raise InputError(
            f"--out {out}: the file exists and is not a page of 'probmask report'; choose another "
            "name or delete it."
        )
