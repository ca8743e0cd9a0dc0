"""Update the tables of results in the pages from the committed records.

    python benchmarks/refresh_tables.py

A comment before a table has the command that prints it, `<!-- probmask compare … -->` or
`<!-- python benchmarks/….py … -->`, and another comment ends it, `<!-- end -->`. The script
replaces the text between them by the output of the command. Run it after adding records;
`tests/test_docs.py` fails if a table is outdated.
"""

import argparse
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from probmask.cli import main as run_command

ROOT = Path(__file__).parents[1]
_TABLE = re.compile(
    r"(<!-- (probmask compare [^\n]*|python benchmarks/[^\n]*) -->\n)"
    r"((?:(?!<!--).)*)(<!-- end -->\n)",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Return all pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def tables(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the command and the text of each table of a page."""
    for found in _TABLE.finditer(page.read_text(encoding="utf-8")):
        yield found[2], found[3]


def refresh(page: Path) -> bool:
    """Update the tables of a page and return whether one of them has changed."""
    text = page.read_text(encoding="utf-8")
    fresh = _TABLE.sub(lambda found: f"{found[1]}{printed(found[2])}{found[4]}", text)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")
    return fresh != text


def printed(command: str) -> str:
    """Return the output of the command, with paths relative to the repository.

    It has an empty line before and after it, as between the comments of a page.
    """
    program, *words = shlex.split(command)
    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        if program == "probmask":
            code = run_command(words)
            if code != 0:
                raise SystemExit(f"{command}: failed with exit code {code}")
        else:
            script, *arguments = words
            importlib.import_module(Path(script).stem).main(arguments)
    return f"\n{output.getvalue().strip()}\n\n"


def main() -> None:
    """Update all pages and print those that have changed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    changed = [page for page in pages() if refresh(page)]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: updated")
    if not changed:
        print("all tables are up to date")


if __name__ == "__main__":
    main()
