"""The page as one file: markup, style, script and data put together, so that it works offline."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from probmask.analysis.records import Run
from probmask.analysis.report.payload import make_payload
from probmask.errors import InputError
from probmask.files import write_atomically

# Put together into one script.
_SCRIPTS = (
    "elements.js",
    "statistics.js",
    "marks.js",
    "scales.js",
    "pointing.js",
    "plot.js",
    "saving.js",
    "figures.js",
    "accuracy_figures.js",
    "layer_figure.js",
    "curve_figure.js",
    "histogram_figure.js",
    "cost_figures.js",
    "tables.js",
    "headline.js",
    "runs_table.js",
    "view.js",
    "page.js",
)
# What our own pages say near their beginning, and nobody else's.
_MARK = b'<meta name="generator" content="probmask report">'


def write_page(runs: Sequence[Run], out: Path) -> int:
    """Write the page, over an older one of ours but over nothing else; return its size in bytes."""
    if not runs:
        raise InputError("report: there is no finished run to show; pass directories with records.")
    _refuse_another_s_file(out)
    page = render_page(runs).encode(errors="replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {out}: its directory cannot be made ({error.strerror}); choose another."
        ) from error
    write_atomically(out, page, overwrite=True)
    return len(page)


def render_page(runs: Sequence[Run]) -> str:
    """The page's text; the same for the same records."""
    payload = make_payload(runs)
    style = _part("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_part, _SCRIPTS)) + "})();\n"
    # Nothing runs and nothing is loaded but what is written here, whatever a record holds.
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
    pieces = page.split("@")  # the template has an @ around the names of its parts only
    return "".join(piece if place % 2 == 0 else parts[piece] for place, piece in enumerate(pieces))


def _embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in, nor begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _refuse_another_s_file(out: Path) -> None:
    if not out.is_file():
        return  # what else it may be, the writing finds out
    with out.open("rb") as file:
        ours = _MARK in file.read(1024)
    if not ours:
        raise InputError(
            f"--out {out}: is there already, and is no page of 'probmask report'; choose another "
            "name, or delete it."
        )
