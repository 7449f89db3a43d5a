"""The command `foretoken`, run inside the test's own process."""

import sys

import pytest

from foretoken.cli import main as cli


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); never a traceback."""
    monkeypatch.setattr(sys, "argv", ["foretoken", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err
