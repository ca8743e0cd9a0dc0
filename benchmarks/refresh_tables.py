"""Update the tables of results in the pages from the committed records.

    python benchmarks/refresh_tables.py

A comment before a table has the command that prints it, `<!-- probmask compare … -->`, and another
comment ends it, `<!-- end -->`. The script replaces the text between them by the output of the
command. Run it after adding records; `tests/test_docs.py` fails if a table is outdated.
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
    """Update the tables of a page and return whether one of them has changed."""
    text = page.read_text(encoding="utf-8")
    fresh = _TABLE.sub(lambda found: f"{found[1]}\n{printed(found[2])}\n\n{found[3]}", text)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")
    return fresh != text


def printed(command: str) -> str:
    """Return the output of the command, with paths relative to the repository."""
    words = [str(ROOT / word) if "/" in word else word for word in shlex.split(command)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run_command(words)
    if code != 0:
        raise SystemExit(f"probmask {command}: failed with exit code {code}")
    return output.getvalue().strip()


def main() -> None:
    """Update all pages and print those that have changed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    changed = [page for page in pages if refresh(page)]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: updated")
    if not changed:
        print("all tables are up to date")


if __name__ == "__main__":
    main()
