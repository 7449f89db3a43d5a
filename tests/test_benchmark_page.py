"""scripts/benchmark_page.py: every table of figures in docs/benchmarks.md is one that it has measured."""

import re
import sys
from pathlib import Path

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.measure.report import Report
from scripts import benchmark_page
from scripts.benchmark_page import BLOCK, PAGE, blocks, command, selected
from test_docs_commands import free_port

NOT_MEASURED = {"| | |", "| tried | what came out | date |"}  # what words mean, and what brought nothing


def report() -> Report:
    made = Report("made up", {"machine": "none"})
    for title in ("First, T = 0", "Second, T = 1"):
        table = made.table(title, ["rule", "k=1", "k=2"])
        table.add("a", 1, "2 (1-3)")
        table.add(title[0], None, 0.25)
    return made


def test_every_table_of_the_page_is_measured_at_a_commit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    heads = re.findall(r"(?:\A|\n\n)(\|.*\|)\n\|---", BLOCK.sub("", text))
    assert set(heads) == NOT_MEASURED
    found = blocks(text)
    assert len(found) > 20
    for block in found.values():
        assert block.date, f"{block.name} was never measured"
        assert re.fullmatch(r"[0-9a-f]{7,}", block.commit or ""), f"{block.name}: the code was not that of a commit"


def test_what_was_chosen_is_shown() -> None:
    printed = report().markdown()
    whole = selected(printed, {})
    assert whole.count("**") == 4
    assert "| F | - | 0.250 |" in whole
    chosen = selected(printed, {"tables": ["Second"], "columns": ["rule", "k=2"], "rows": ["a"]})
    assert chosen == "| rule | k=2 |\n|---|---|\n| a | 2 (1-3) |\n"
    assert selected(printed, {"rows": ["F", "a"]}).count("| a |") == 2
    for wrong in ({"tables": ["Third"]}, {"columns": ["k=3"]}, {"rows": ["b"]}):
        with pytest.raises(ForetokenError, match="chosen"):
            selected(printed, wrong)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of two tables: of a program that asks a server, and of one that fails."""
    port = free_port()
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("here")
    (tmp_path / "report.txt").write_text(report().markdown())
    (tmp_path / "program.py").write_text(
        "import sys, urllib.request, pathlib\n"
        "assert sys.argv[2:] == ['--markdown'], sys.argv\n"
        "urllib.request.urlopen(sys.argv[1] + '/v1/models')\n"
        "print((pathlib.Path(__file__).parent / 'report.txt').read_text())\n"
    )
    written = tmp_path / "page.md"
    written.write_text(
        "# Figures\n<!-- measured: good\ncolumns: rule | k=1\nrows: a\n-->\n```sh\n"
        f"{sys.executable} -m http.server {port} --bind 127.0.0.1 \\\n    --directory {tmp_path} &\n"
        f"{sys.executable} {tmp_path}/program.py \\\n    http://127.0.0.1:{port}  # a comment\n```\n"
        "<!-- end -->\nBetween.\n\n"
        f"<!-- measured: bad -->\n```sh\n{sys.executable} -c 'raise SystemExit(3)'\n```\nold figures\n<!-- end -->\n"
    )
    monkeypatch.setattr(benchmark_page, "PAGE", written)
    return written


def test_a_table_is_written_under_its_command_and_again(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["good"])
    first = page.read_text()
    assert re.search(r"```\n_\d{4}-\d\d-\d\d, commit [0-9a-f]+\+?, .* cores\._\n\n\*\*First, T = 0\*\*\n", first)
    assert "| a | 1 |\n" in first
    assert "<!-- end -->\nBetween.\n" in first
    assert "old figures" in first
    command(["good"])
    assert page.read_text() == first
    capsys.readouterr()
    command()
    assert re.search(r"^good +\d{4}-.*\nbad +not measured", capsys.readouterr().out)


def test_a_command_that_fails_leaves_the_page(page: Path) -> None:
    before = page.read_text()
    with pytest.raises(ForetokenError, match=r"bad: .* exit code 3"):
        command(["bad"])
    with pytest.raises(ForetokenError, match="no table other"):
        command(["good", "other"])
    assert page.read_text() == before
