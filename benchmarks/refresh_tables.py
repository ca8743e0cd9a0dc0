"""Put the tables of today's records into the pages that show them.

    python benchmarks/refresh_tables.py

A page says by a comment which command makes a table, `<!-- probmask compare … -->`, and where it
ends, `<!-- end -->`; what is between is replaced by what the command prints. Run it after records
were added; `tests/test_docs.py` fails as long as a page shows another table.
"""

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

from probmask.cli import main as run_command

ROOT = Path(__file__).parents[1]
_TABLE = re.compile(
    r"(<!-- probmask (compare [^\n]*) -->\n)(?:(?!<!--).)*(<!-- end -->\n)", re.DOTALL
)


def refresh(page: Path) -> bool:
    """Replace the tables of a page; whether one of them has changed."""
    text = page.read_text(encoding="utf-8")
    fresh = _TABLE.sub(lambda found: f"{found[1]}\n{printed(found[2])}\n\n{found[3]}", text)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")
    return fresh != text


def printed(command: str) -> str:
    """What the command prints, its paths being those of the repository."""
    words = [str(ROOT / word) if "/" in word else word for word in shlex.split(command)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run_command(words)
    if code != 0:
        raise SystemExit(f"probmask {command}: ended with {code}")
    return output.getvalue().strip()


def main() -> None:
    """Refresh all pages, and name those that have changed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    changed = [page for page in pages if refresh(page)]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: refreshed")
    if not changed:
        print("nothing to change: all tables are those of the records")


if __name__ == "__main__":
    main()
