"""`python -m benchmarks`: every script is listed and explains itself."""

import pytest

from benchmarks.__main__ import SCRIPTS
from command import run


def test_without_a_name_all_are_listed(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "benchmarks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SCRIPTS)
    assert all(what in out for what in SCRIPTS.values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_has_a_help(monkeypatch, capsys, name):
    code, out, _ = run(monkeypatch, capsys, "benchmarks", name, "--help")
    assert code == 0
    assert f"python -m benchmarks {name}" in out


def test_another_name_is_one_sentence(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "benchmarks", "nope")
    assert (code, out) == (2, "")
    assert err.startswith("foretoken: There is no benchmark nope: choose one of execution, ")
    assert len(err.splitlines()) == 1
