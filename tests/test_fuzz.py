"""Command lines and calls of random values: an exit code and one sentence, or a result; never a traceback.

Options are those of the commands themselves, so that a new one is tried as soon as it is there. `generate` runs whole,
with tiny models. All other commands run up to where they would load models: they measure for minutes.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

import foretoken
import tiny
from benchmarks import optimum
from benchmarks.__main__ import SCRIPTS, script
from benchmarks.expand import SIZES
from command import run
from foretoken.cli import options
from foretoken.cli.main import app
from foretoken.models.named import COMPILE, DTYPES
from foretoken.recipe import LAWS, METHODS, VOCABS
from foretoken.verify import VERIFIERS
from raising import raising

NUMBERS = [
    "0", "1", "2", "3", "7", "-1", "-0.0", "0.5", "1.5", "1e-320", "1e-30", "1e30", "1e39", "1e308", "-1e39", "nan",
    "inf", "-inf", "4294967295", "4294967296", "-4294967296", "9" * 30, "1,2", "1,,2", "1e3", "0x10", "١",
]  # fmt: skip
TEXTS = [
    "", " ", "x", "def f(", "-", "--", "none", "ngram", "auto", "é🙂", "\udcff", "\u202e", "a\nb", "%s{}", "x" * 600,
    "~", ".", "/", "/nonexistent", "/dev/null", "/proc/self/mem", "org/name/more", "[bold]", "\\",
]  # fmt: skip
TREES = [
    "chain:1", "chain:3", "chain:3@0.5", "chain:3@nan", "chain:0", "chain:-1", "chain:x", "chain:", "chain:4096",
    "chain:9999", "chain:" + "9" * 30, "chain:²", "kary:2x2", "kary:2x2@0.3", "kary:0x2", "kary:2x", "kary:99x99",
    "kary:1x4096", "delayed:1+2x2", "delayed:0+9x", "delayed:1+9999x9999", "budget:4", "budget:0",
    "budget:1e3", "dynamic:4", "dynamic:9999", "opt-tree:4", "opt-tree:inf", "product:4", "sequoia:4",
    "sequoia:4@/dev/null", "sequoia:4@", "list:", "list:/dev/null", "list:/", "bush:1", ":",
]  # fmt: skip
NAMES = [*VERIFIERS, *LAWS, *VOCABS, *METHODS, *DTYPES, *COMPILE]
DEVICES = ["cpu", "abacus", "cuda:99", "cpu:7", "cuda:x", ""]
WHOLE = 40  # runs of generate
BEGUN = 12  # of every other command, up to its models
CALLS = 80
LEFT_OUT = ("--help", "--toy", "--speed", "--exact-only", "--list", "--version")  # would measure without models


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of all commands."""
    found = typer.main.get_command(app) if group is None else group
    for name, command in found.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command
    if group is None:
        for name in SCRIPTS:
            yield ("benchmarks", name), typer.main.get_command(script(name))


def value(rng: random.Random, option: str, files: list[str]) -> str:
    """Often one that may fit the option, so that what comes behind the first check is reached too."""
    if rng.random() < 0.15:
        return rng.choice([*NUMBERS, *TEXTS, *TREES, *NAMES])
    fitting = {
        "--tree": TREES, "--verifier": [*VERIFIERS], "--law": [*LAWS], "--vocab": [*VOCABS, "auto"],
        "--method": [*METHODS], "--dtype": [*DTYPES], "--compile": ["auto", "off"], "--device": DEVICES,
        "--target": files, "--begin": files,
        "--drafter": [*files, "none", "ngram", "suffix", "self", "self:q4_0", "self:"], "--profile": [*files, *TEXTS],
        "--head": files, "--same": files, "--stop": TEXTS, "--text": TEXTS, "--plot": ["p.png", "p.nope", *TEXTS],
        "--out": ["out", *TEXTS], "--data": [*files, *TEXTS], "--cache": ["out", *TEXTS], "--part": ["out", *TEXTS],
        "--acceptance": ["out", *TEXTS], "--workload": TEXTS, "--batch-file": TEXTS, "--size": [*SIZES],
        "--held-out": TEXTS, "--optimizer": ["adamw", "muon"], "--expand": [*SIZES],
    }  # fmt: skip
    return rng.choice(fitting.get(option, NUMBERS))


def line(rng: random.Random, command: Any, files: list[str]) -> list[str]:
    words: list[str] = []
    for param in command.params:
        if param.param_type_name == "argument":
            if rng.random() < 0.9:
                words.append(rng.choice([*TEXTS, *files]))
            continue
        option = param.opts[0]
        if option in LEFT_OUT or rng.random() > (0.8 if param.required else 3 / len(command.params)):
            continue
        words += [option] if param.is_flag else [option, value(rng, option, files)]
    return words


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Model folders, good ones and others."""
    root = tmp_path_factory.mktemp("fuzz")
    target = tiny.llama(0, context=48)
    good = tiny.save(target, root / "target"), tiny.save(tiny.perturbed(target, 0.15, 1), root / "drafter")
    other = tiny.save(tiny.llama(2, vocab=259, context=48), root / "other", extra=("ab", "cd"))
    (root / "empty").mkdir()
    (root / "array").mkdir()
    (root / "array" / "config.json").write_text("[]")
    return [*good, other, str(root / "empty"), str(root / "array"), str(root / "none")]


@pytest.fixture(autouse=True)
def stage(monkeypatch: pytest.MonkeyPatch, demo: Path, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(options, "demo_folder", lambda: demo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


def check(words: list[str], code: int, err: str) -> None:
    """Exit code 0, or 2 with one sentence."""
    assert code in (0, 2), (words, code, err)
    if code == 2:
        told = [x for x in err.splitlines() if x.startswith("foretoken: ") and ": warning: " not in x]
        sentence = [x for x in told if not x.startswith("foretoken: no prompt named")]
        assert len(sentence) == 1, (words, err)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("unchecked")
def test_generate(files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = dict(commands())["generate",]
    rng = random.Random(0)
    codes = []
    for _ in range(WHOLE):
        words = ["generate", *line(rng, command, files)]
        if rng.random() < 0.6:
            words += ["--target", files[0], "--drafter", files[1]]
        if rng.random() < 0.7:
            words += ["--max-new-tokens", "4"]
        code, _, err = run(monkeypatch, capsys, *words)
        check(words, code, err)
        codes.append(code)
    assert codes.count(0) > WHOLE / 20  # not all is refused at the door


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("words", [words for words, _ in commands() if words != ("generate",)], ids=" ".join)
def test_other_commands_up_to_their_models(
    words: tuple[str, ...], files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "quiet", raising(typer.Exit))
    monkeypatch.setattr(optimum, "drawn", raising(typer.Exit))  # this command has no model, and measures for a minute
    rng = random.Random(" ".join(words))
    command = dict(commands())[words]
    for _ in range(BEGUN):
        tried = [*words, *line(rng, command, files)]
        code, _, err = run(monkeypatch, capsys, *tried)
        check(tried, code, err)


def number(rng: random.Random) -> float | int:
    found = float(rng.choice([x for x in NUMBERS if "," not in x and "0x" not in x]))
    return int(found) if rng.random() < 0.5 and abs(found) < 1e18 else found


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("unchecked")
def test_calls(files: list[str]) -> None:
    """Wrong types may raise TypeError; the engine works on after all of it."""
    engine = foretoken.load(files[0], drafter=files[1], tree="chain:2")
    expected = engine.generate("def f(", max_new_tokens=6, seed=1).token_ids
    rng = random.Random(0)
    settings = [
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    ]  # fmt: skip
    done = 0
    for _ in range(CALLS):
        asked: dict[str, Any] = {name: number(rng) for name in settings if rng.random() < 0.25}
        if rng.random() < 0.3:
            asked["logit_bias"] = {rng.choice([-1, 0, 5, 256, 257, 10**12]): number(rng)}
        if rng.random() < 0.3:
            asked["stop"] = rng.choice([*TEXTS, [], ["", "a"], ["a", "b"]])
        prompt = rng.choice([*TEXTS, "x", "def", [1, 2, 3], [], [-1], [10**30], [5.5], [[1], "a"]])
        with suppress(foretoken.ForetokenError, TypeError):
            engine.generate(prompt, max_new_tokens=rng.choice([1, 4, 0, -3, 10**12]), **asked)
            done += 1
    assert done > CALLS / 20
    assert engine.generate("def f(", max_new_tokens=6, seed=1).token_ids == expected


@pytest.mark.usefixtures("unchecked")
def test_names() -> None:
    for spec in [*TREES, *TEXTS, *NUMBERS, *NAMES]:
        for named in (foretoken.tree, foretoken.verifier, foretoken.law):
            with suppress(foretoken.ForetokenError):
                named(spec)
