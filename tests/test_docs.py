"""The pages for users: their generated tables are up to date, and their words are the glossary's."""

import pytest

from scripts import tables

STALE = "{} is out of date: run `python scripts/tables.py` and commit what it writes"


@pytest.mark.parametrize("name", tables.PAGES)
def test_generated_tables_are_up_to_date(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    assert tables.BLOCK.search(page), f"{name} has no generated table"
    assert tables.filled(page) == page, STALE.format(name)
