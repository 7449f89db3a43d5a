"""The commands `foretoken` and `python -m benchmarks`, run inside the test's own process, on tiny models."""

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import tiny
from benchmarks import __main__ as benchmarks
from foretoken.cli import main as cli
from foretoken.cli import options


@dataclass(frozen=True)
class Command:
    """Runs a command; (exit code, stdout, stderr)."""

    call: Callable[..., tuple[int, str, str]]

    def __call__(self, *arguments: object, **given: object) -> tuple[int, str, str]:
        return self.call(*arguments, **given)

    def good(self, *arguments: object, **given: object) -> tuple[str, str]:
        """(stdout, stderr) of a command that succeeds."""
        code, out, err = self(*arguments, **given)
        assert code == 0, err
        return out, err

    def json(self, *arguments: object) -> Any:
        """What a command that succeeds prints as JSON."""
        return json.loads(self.good(*arguments, "--json")[0])

    def refused(self, says: str, *arguments: object) -> None:
        """Assert that a command tells these words, in one sentence, and nothing else."""
        code, out, err = self(*arguments)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
        assert err.startswith("foretoken: ")
        assert says in err


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `foretoken ARGUMENTS`, or of `benchmarks NAME ..`; never a traceback."""
    ours = arguments[0] == "benchmarks"
    line = [str(argument) for argument in (arguments if ours else ("foretoken", *arguments))]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(options, "tell_of_compiling", lambda: None)  # as the first command of a fresh clone does
    code, log = 0, logging.getLogger("foretoken")
    handlers, level = [*log.handlers], log.level
    try:
        cli.run(benchmarks.main) if ours else cli.main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:  # a server in this process may log its last request after pytest has ceased to capture the test's output
        log.handlers = handlers
        log.setLevel(level)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore interrupts, and would pass that on to this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target, and a drafter that agrees with it often; no test may change them."""
    target = tiny.llama(0)
    return target, tiny.perturbed(target, 0.15, 1)


@pytest.fixture(scope="session")
def demo(models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the demo models: target, drafter, three held-out texts; no test may change it."""
    root = tmp_path_factory.mktemp("demo")
    for model, name in zip(models, ("target", "drafter"), strict=True):
        tiny.save(deepcopy(model), root / name)  # which notes in the configuration what it saves
    texts = [
        {"id": f"p{i}", "file": "f.py", "prompt": "def f(x):" + "\n" * i, "reference": "    return x\n" * 4}
        for i in range(3)
    ]
    (root / "heldout.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return root


@pytest.fixture(name="cli")
def run_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command as it is, with the models of the repository."""
    return Command(lambda *arguments: run(monkeypatch, capsys, *arguments))


@pytest.fixture(name="run")
def run_with_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path
) -> Command:
    """Run a command in an empty folder, with those models; (exit code, stdout, stderr)."""
    monkeypatch.setattr(options, "demo_folder", lambda: demo)
    monkeypatch.chdir(tmp_path)
    return Command(lambda *arguments: run(monkeypatch, capsys, *arguments))
