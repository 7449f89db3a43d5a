"""Every script in examples/ runs, and says what it should."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
SAYS = {
    "stream_text.py": r"the same text +True",
    "many_prompts.py": r"(?s)(the same alone: True.*){6}",
    "inside_transformers.py": "the same text as generate's own: True",
    "compare_rules.py": r"(?m)^transport .*\n^optimum ",
    "ask_a_server.py": r"\n",
}


def test_all_are_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == set(SAYS)
    assert scripts == set(re.findall(r"\[(\w+\.py)\]", (ROOT / "examples" / "README.md").read_text()))


@pytest.mark.parametrize("script", [*(name for name in SAYS if name != "ask_a_server.py"),
    pytest.param("ask_a_server.py", marks=pytest.mark.slow)])  # fmt: skip
def test_it_runs(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert re.search(SAYS[script], capsys.readouterr().out)
