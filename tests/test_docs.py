"""The pages for users: their generated tables are up to date, and their words are the glossary's."""

import re

import pytest

from scripts import tables

STALE = "{} is out of date: run `python scripts/tables.py` and commit what it writes"


@pytest.mark.parametrize("name", tables.PAGES)
def test_generated_tables_are_up_to_date(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    assert tables.BLOCK.search(page), f"{name} has no generated table"
    assert tables.filled(page) == page, STALE.format(name)


# Words of our own that the field has others for: docs/glossary.md. A lone surrogate is Unicode's own term.
PRIVATE = re.compile(
    r"\b(told|lone(?! surrogate)|aim|shelf|(?:un)?tempered|tokens a (?:step|forward|second))\b", re.IGNORECASE
)
LOGS = ("docs/LOG.md", "CHANGELOG.md")


def test_code_and_pages_use_the_words_of_the_field():
    files = [path for folder in ("src", "docs", "benchmarks", "scripts") for path in (tables.ROOT / folder).rglob("*")]
    read = [path for path in [*files, tables.ROOT / "README.md"] if path.suffix in (".py", ".md")]
    assert len(read) > 200
    found = [
        f"{path.relative_to(tables.ROOT)}:{number}: {match.group()}"
        for path in read
        if str(path.relative_to(tables.ROOT)) not in LOGS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in PRIVATE.finditer(line)
    ]
    assert not found, "words that docs/glossary.md has others for: " + ", ".join(found)
