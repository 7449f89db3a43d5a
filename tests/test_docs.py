"""The pages for users: tables are up to date, words are the glossary's, and links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.__main__ import script
from foretoken.cli.main import app
from scripts import tables
from snippets import CODE, commands

STALE = "{} is out of date: run `python scripts/tables.py` and commit what it writes"


@pytest.mark.parametrize("name", tables.PAGES)
def test_generated_tables_are_up_to_date(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    assert tables.BLOCK.search(page), f"{name} has no generated table"
    assert tables.filled(page) == page, STALE.format(name)


def test_without_pages_the_script_says_so_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(tables.__file__, tmp_path / "scripts")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"foretoken: There is no folder {tmp_path / 'docs'}: run this script where it stands in a checkout.\n"
    )


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


PAGES = [*sorted(tables.ROOT.glob("*.md")), *sorted(tables.ROOT.glob("docs/*.md"))]
USERS = [page for page in PAGES if str(page.relative_to(tables.ROOT)) not in LOGS]


def anchors(page: Path) -> set[str]:
    """What a link may have behind `#` for each heading of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_that_are_there() -> None:
    broken, followed = [], 0
    for page in USERS:
        for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            file = (page.parent / path).resolve() if path else page
            followed += 1
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {link}")
    assert followed > 50
    assert not broken, broken


def options_of(words: list[str]) -> set[str] | None:
    """The options of a command of ours, as its parser has them; None where the line is none of ours."""
    if words[:3] == ["python", "-m", "benchmarks"] and len(words) > 3:
        command: Any = typer.main.get_command(script(words[3]))
    elif words[:1] == ["foretoken"] and len(words) > 1 and not words[1].startswith("-"):
        command = typer.main.get_command(app).commands[words[1]]  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(command, "commands"):  # bench: its first command is the default
            command = command.commands.get(words[2] if len(words) > 2 else "", command.commands["decoding"])
    else:
        return None
    return {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}


def test_commands_have_the_options_that_the_pages_show() -> None:
    unknown, checked = [], 0
    for page in USERS:
        for command in commands(page):
            words = shlex.split(command.text, comments=True)
            known = options_of(words)
            if known is not None:
                checked += 1
                named = [word.partition("=")[0] for word in words if word.startswith("--")]
                unknown += [f"{page.name}: {command.text}" for name in named if name not in known]
    assert checked > 60
    assert not unknown, unknown


def test_the_sentences_that_troubleshooting_explains_are_in_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (tables.ROOT / "src").rglob("*.py"))
    code = re.sub(r'"\n\s*f?"', "", code)
    page = (tables.ROOT / "docs" / "faq.md").read_text(encoding="utf-8").partition("## Troubleshooting")[2]
    first = [
        line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "(transformers)" not in line
    ]
    parts = [part.strip() for said in re.findall("`(.*?)`", " ".join(first)) for part in said.split("...")]
    said = [part.removesuffix("?") for part in parts if len(part) > 12]
    assert len(said) > 25
    missing = [part for part in said if part not in code]
    assert not missing, missing


def named_in(nav: Any) -> list[str]:
    """The pages of mkdocs.yml's nav, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in named_in(each)]


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((tables.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    of_the_root = ["index.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]  # scripts/site.py adds them
    there = [page.name for page in (tables.ROOT / "docs").glob("*.md")]
    assert sorted(named_in(nav)) == sorted([*of_the_root, *there])


def test_pictures_read_on_a_dark_page() -> None:
    """But for the demo's, which is a terminal with a dark ground of its own."""
    pictures = [path for path in (tables.ROOT / "docs").glob("*.svg") if path.name != "demo.svg"]
    assert len(pictures) == 7
    for picture in pictures:
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture.name
