"""The paper: its figures stand where they were recorded, and its references are those that it cites.

Whether it can be built is seen by `make paper`, which needs typst.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "docs" / "paper"
EVIDENCE: dict[str, dict[str, dict[str, Any]]] = tomllib.loads((PAPER / "evidence.toml").read_text(encoding="utf-8"))
SECTIONS = {path: path.read_text(encoding="utf-8") for path in PAPER.glob("*.typ")}
TEXT = "\n".join(text for path, text in SECTIONS.items() if path.name != "library.typ")


def below(source: dict[str, Any]) -> list[str]:
    """The lines below a heading, up to the next one of its level or above."""
    lines = (ROOT / "docs" / source["page"]).read_text(encoding="utf-8").split("\n")
    assert lines.count(source["heading"]) == 1, source["heading"]
    level, found = source["heading"].index(" "), []
    for line in lines[lines.index(source["heading"]) + 1 :]:
        heading = re.match(r"(#+) ", line)
        if heading and len(heading[1]) <= level:
            break
        found.append(line)
    return found


def cells(source: dict[str, Any]) -> list[list[str]]:
    """The head and the rows of a table."""
    blocks = re.findall(r"(?:^\|.*\n)+", "\n".join(below(source)) + "\n", re.MULTILINE)
    lines = blocks[source.get("nth", 0)].splitlines()
    rows = [[re.sub(r"`|\*\*", "", cell).strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("name", EVIDENCE["table"])
def test_tables_stand_where_they_are_read_from(name: str) -> None:
    source = EVIDENCE["table"][name]
    head, *rows = cells(source)
    assert rows
    assert set(source.get("columns", head)) <= set(head)
    assert set(source.get("rename", {})) <= set(head)
    for first in source.get("rows", []):
        assert [row[0] for row in rows].count(first) == 1, first


@pytest.mark.parametrize("name", EVIDENCE["figure"])
def test_quoted_figures_stand_where_they_are_read_from(name: str) -> None:
    source = EVIDENCE["figure"][name]
    assert source["text"] in " ".join(below(source))


def test_all_evidence_is_shown_and_named_with_machine_and_date() -> None:
    assert sorted(re.findall(r'#recorded\("([\w-]+)"', TEXT)) == sorted(EVIDENCE["table"])
    assert sorted(re.findall(r'#said\("([\w-]+)"', TEXT)) == sorted(EVIDENCE["figure"])
    for source in EVIDENCE["table"].values():
        assert source["machine"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", source["date"])


def test_references_are_cited_and_citations_have_a_reference() -> None:
    references = re.findall(r"^@\w+\{([\w-]+),$", (PAPER / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    labels = set(re.findall(r"<(\w+:\w+)>", TEXT))
    named = set(re.findall(r"(?<![\w.])@([a-z]\w*(?::\w+)?)", TEXT))
    assert len(references) == len(set(references)) > 20
    assert {name for name in named if ":" not in name} == set(references)
    assert {name for name in named if ":" in name} <= labels


def test_files_that_the_paper_names_are_there() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|md|typ))`", TEXT))
    assert len(named) > 8
    places = (ROOT, ROOT / "src" / "foretoken")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing, missing


def test_sections_are_parts_of_the_paper() -> None:
    included = set(re.findall(r'#include "(\w+\.typ)"', SECTIONS[PAPER / "paper.typ"]))
    assert included == {path.name for path in SECTIONS} - {"paper.typ", "library.typ"}
