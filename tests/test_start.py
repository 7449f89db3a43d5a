"""How soon a command starts: help and bad input come before torch; and what becomes of the standard streams."""

import errno
import gc
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import foretoken
from foretoken.cli import command as making
from foretoken.cli.main import app, main
from foretoken.core.lazy import imported, uncollected
from foretoken.heads import HEADS
from foretoken.names import MADE_BY, law_family
from foretoken.recipe import KINDS, LAWS, METHODS
from foretoken.trees.forms import TREES
from foretoken.verify import VERIFIERS
from raising import raising

SLOW = ("torch", "transformers", "numba", "scipy", "matplotlib", "fastapi", "uvicorn")
# Runs the command lines of a JSON file in one process; prints of each the exit code, stderr and what was imported.
PROGRAM = """
import contextlib, io, json, sys
from foretoken.cli.main import main
for line in json.loads(open(sys.argv[1]).read()):
    sys.argv = ["foretoken", *line]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code
    slow = [name for name in SLOW if name in sys.modules]
    print(json.dumps([code or 0, out.getvalue(), err.getvalue(), slow]))
"""
NAMES = ("generate", "chat", "serve", "fetch", "demo", "audit", "bench", "bench acceptance", "tune", "vocab", "train")
HELP = [[], *(name.split() for name in NAMES)]
NONE = "/nonexistent"
TARGET = str(Path(__file__).resolve().parents[1] / "models/target")  # which has no chat template
LINES = [  # of a batch file
    ('{"messages": []}', "The conversation of line 1 of"),
    ('{"messages": [{"role": "user"}]}', "has no content"),
    ('{"prompt": "a\\ud800b"}', "U+D800"),
    ('{"prompt": 5}', "Line 1 of"),
    ('{"prompt": "x", "messages": []}', "Line 1 of"),
    ("{", "Line 1 of"),
]
BAD = [
    (["generate", "x", "--target", NONE], NONE),
    (["generate", "x", "--target", ""], "There is no model '' here"),
    (["generate", "x", "--drafter", ""], "There is no model '' here"),
    (["generate", "x", "--drafter", "none", "--compare"], "--compare runs a drafter beside plain decoding"),
    (["generate", "x", "--target", "no/such/model.gguf"], "no/such/model.gguf here: no file or folder has this name"),
    (["generate", "x", "--target", "smollm2"], "There is no model smollm2 here: did you mean smollm2-135m-instruct?"),
    (["generate", "x", "--ray-cpus", "-1"], "ray_cpus is -1"),
    (["generate", "x", "--ray", "1", "--json", "--trace", "t.html"], "leave out --trace and --json"),
    (["generate", "x", "--drafter", NONE], NONE),
    (["generate", "x", "--profile", NONE], NONE),
    (["generate", "x", "--tree", "bush:3"], "bush"),
    (["generate", "x", "--tree", "kary:9x9"], "kary:9x9 has more than 4096 nodes"),
    (["generate", "x", "--tree", "chain:" + "9" * 24], "999 nodes has more than 4096"),
    (["generate", "x", "--tree", "list:BRACKETS"], "is not JSON"),
    (["generate", "x", "--tree", "sequoia:8@BRACKETS"], "must hold JSON"),
    (["generate", "x", "--tree", "list:LONG"], "A tree of 5000 nodes has more than 4096"),
    (["generate", "x", "--verifier", "nope"], "nope"),
    (["generate", "x", "--verifier", ""], "Unknown verifier '': choose one of"),
    (["generate", "x", "--method", ""], "Unknown method '': choose one of"),
    (["generate", "x", "--tree", ""], "Unknown tree ''"),
    (["generate", "x", "--law", "nope"], "nope"),
    (["generate", "x", "--method", "nope"], "nope"),
    (["generate", "x", "--vocab", "nope"], "nope"),
    (["generate", "x", "--dtype", "int3"], "int3"),
    (["generate", "x", "--compile", "maybe"], "maybe"),
    (["generate", ""], "The prompt is empty"),
    (["generate", "x", "--stop", ""], "stop string is empty"),
    (["generate", "x", "--temperature", "nan"], "temperature is nan"),
    (["generate", "x", "--draft-probability", "2"], "draft probability is 2"),
    (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["generate", "x", "--seed", "-1"], "seed is -1"),
    (["generate", "--batch-file", NONE], NONE),
    (["generate", "x", "--drafter", "ngram", "--suffix-store", "x"], "suffix_store is for drafter suffix"),
    (["generate", "x", "--drafter", "suffix", "--suffix-store", NONE + "/x"], f"Cannot write {NONE}/x"),
    (["generate", "--batch-file", "BATCH", "--ray", "2", "--out", "z"], "--seed"),
    (["generate", "x", "--out", "z"], "--out"),
    (["generate", "--batch-file", "BATCH", "--ray", "2", "--out", "z", "--seed", "0", "--drafter", "suffix",
      "--suffix-store", "x"], "suffix_store x is kept by one process: leave it out, or --ray"),
    (["generate", "x", "--regex", "a", "--json-schema", "EMPTY"], "leave one out"),
    (["generate", "x", "--batch-file", "f"], "Both a prompt and --batch-file"),
    (["generate", "--batch-file", "f", "--compare"], "--compare measures one prompt"),
    (["generate", "x", "--show-drafts", "--json"], "--show-drafts tints"),
    (["generate", "--target", NONE], "No prompt was given"),
    (["generate", "--chat"], "No prompt was given"),
    (["generate", "x", "--chat", "--target", TARGET], "needs a chat template"),
    (["chat", "--target", TARGET], "needs a chat template"),
    (["generate", "a\udcffb"], "U+DCFF"),
    (["generate", "x", "--system", "a\udcffb"], "The system message is not valid Unicode"),
    (["generate", "x", "--trace", NONE + "/t.html"], NONE),
    (["generate", "x", "--trace", "t.txt"], "--trace t.txt is a page for a browser"),
    (["generate", "x", "--drafter", "lookup"], "A drafter can also be one of self, mtp, ngram"),
    (["generate", "x", "--device", "abacus"], "Unknown device abacus"),
    (["generate", "x", "--tree", "plain"], "Unknown tree plain"),
    (["audit", "--temperature", "0"], "temperature is 0.0: the audit samples"),
    (["audit", "--samples", "50"], "needs at least 200"),
    (["audit", "--exact-only", "--seed", "-1"], "seed is -1"),
    (["audit", "--exact-only", "--tree", "bush:3"], "bush"),
    (["tune", "--max-new-tokens", "8"], "runs below 16 tokens measure nothing"),
    (["tune", "--drafter", "none"], "There is no drafter to tune"),
    (["bench", "--drafter", "none", "--tree", "chain:3"], "leave --tree out"),
    (["bench", "--markdown", "--json"], "two forms of one report"),
    (["train", "eagle3", "--data", "EMPTY", "--out", "new", "--draft-vocab", "-3"], "draft_vocab is -3"),
    (["audit", "--compile", "never"], "never"),
    *((["generate", "--batch-file", f"LINE{i}"], words) for i, (_, words) in enumerate(LINES)),
    (["bench", "--out", "TARGET/config.json"], "is not a file of foretoken bench, and would be replaced"),
    (["tune", "--out", "TARGET/config.json"], "is not a profile, and would be replaced"),
    (["train", "eagle", "--data", "EMPTY", "--out", "new", "--roots", "0"], "--roots is 0"),
    (["train", "eagle", "--data", "EMPTY", "--out", "new", "--batch", "0"], "batch is 0"),
    (["train", "gumiho", "--data", "EMPTY", "--out", "new", "--lr", "2"], "--lr is 2.0: it must lie between 0 and 1"),
    (["train", "gumiho", "--data", "EMPTY", "--out", "new", "--tokens", "0"], "at least 1"),
    (["train", "gumiho", "--data", "EMPTY", "--out", "new", "--layers", "999"], "--layers is 999: it must be from 1"),
    (["train", "gumiho", "--data", "EMPTY", "--out", "new", "--seed", "-1"], "seed is -1: it must be in 0..2**32 - 1"),
    (["bench", "--target", NONE], NONE),
    (["bench", "--temperature", "-1"], "temperature is -1.0"),
    (["bench", "--rounds", "0"], "rounds is 0"),
    (["bench", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["bench", "--prompts", "0"], "Cannot take 0 held-out prompts"),
    (["bench", "--batch", "0"], "batch is 0"),
    (["bench", "--drafter", "suffix"], "Drafter suffix remembers the texts of earlier runs"),
    (["bench", "--drafter", "ngram+self"], "Drafter ngram+self is two in a row"),
    (["tune", "--drafter", "ngram+self"], "Drafter ngram+self is two in a row"),
    (["tune", "--drafter", "suffix"], "every prompt is run several times here: take ngram in place of suffix"),
    (["tune", "--best", "0"], "best is 0"),
    (["tune", "--out", NONE + "/p.json"], "Cannot write"),
    (["bench", "--out", NONE + "/b.jsonl"], NONE),
    (["bench", "--prompts", "1000"], "Cannot take 1000 held-out prompts"),
    (["bench", "acceptance", "--children", "0"], "children is 0"),
    (["tune", "--target", NONE], NONE),
    (["tune", "--workload", "EMPTY", "--prompts", "2"], "Prompt 2 is empty"),
    (["vocab", NONE, NONE], NONE),
    (["vocab", NONE, "self"], "Drafter self has no tokenizer of its own"),
    (["audit", "--samples", "9" * 20], "it must be at most 1000000000"),
    (["generate", "x", "--profile", ""], "Cannot read profile ''"),
    (["serve", NONE, "--port", "0"], NONE),
    (["serve", "x", "--target", "y"], "Both x and --target y"),
    (["chat", "x", "--target", "y"], "Both x and --target y"),
    (["bench", "--vocab", "x"], "Unknown vocab x"),
    (["serve", "--port", "70000"], "port is 70000"),
    (["serve", "--max-queue", "-1"], "max_queue is -1"),
    (["serve", "--max-batch", "0"], "max_batch is 0"),
    (["serve", "--timeout", "0"], "timeout is 0"),
    (["serve", "--drain", "-1"], "drain is -1"),
    (["serve", "--log", "xml"], "Unknown log xml"),
    (["serve", "--ray", "2", "--ray-cpus", "0"], "ray_cpus is 0"),
    (["serve", "--ray", "2", "--device", "cuda:1"], "--device cuda:1 names one GPU"),
    (["serve", "--ray", "0"], "ray is 0"),
    (["serve", "--max-replicas", "2"], "--max-replicas needs --ray"),
    (["train", "nope", "--data", "EMPTY", "--out", "new"], "nope"),
    (["train", "eagle", "--data", NONE, "--out", "new"], NONE),
    (["train", "eagle", "--data", "EMPTY", "--out", "TARGET"], "no training run"),
    (["train", "medusa", "--data", "EMPTY", "--out", "new", "--levels", "100000"], "--levels is 100000"),
]  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str, list[str]]]:
    """What each of HELP and BAD told, in order."""
    folder = tmp_path_factory.mktemp("start")
    names = {"BRACKETS": "[" * 100_000, "LONG": json.dumps([-1, *range(5000)]), "BATCH": '{"prompt": "a"}\n'}
    names["EMPTY"] = names["BATCH"] + '""\n'
    names |= {f"LINE{i}": text for i, (text, _) in enumerate(LINES)}
    for name, text in names.items():
        (folder / name).write_text(text)
    (folder / "TARGET").mkdir()
    (folder / "TARGET" / "config.json").write_text("{}")
    lines = [[*line, "--help"] for line in HELP] + [line for line, _ in BAD]
    (folder / "lines.json").write_text(json.dumps(lines))
    program = PROGRAM.replace("SLOW", repr(SLOW))
    package = str(Path(foretoken.__file__).parents[1])  # a relative PYTHONPATH means another package in that folder
    done = subprocess.run(
        [sys.executable, "-c", program, "lines.json"], cwd=folder, env={**os.environ, "PYTHONPATH": package},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_help_and_bad_input_do_not_wait_for_torch(told: list[tuple[int, str, str, list[str]]]) -> None:
    assert len(told) == len(HELP) + len(BAD)
    for line, (code, out, err, slow) in zip(HELP, told, strict=False):
        assert (code, err, slow) == (0, "", []), line
        assert "Usage" in out
    for (line, words), (code, _, err, slow) in zip(BAD, told[len(HELP) :], strict=True):
        assert (code, slow) == (2, []), (line, err)
        assert words in err, (line, err)
        assert err.startswith("foretoken: "), line
        assert len(err.splitlines()) == 1, err


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_the_help_says_that_a_models_own_settings_are_not_used(name: str) -> None:
    commands: Any = get_command(app)
    (temperature,) = (param for param in commands.commands[name].params if param.name == "temperature")
    assert "Sampling settings in the model's generation config are not used." in temperature.help


def test_every_option_has_its_help() -> None:
    groups = [get_command(app)]
    for group in groups:
        for command in group.commands.values():  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(command, "commands"):
                groups.append(command)
            assert all(param.help for param in command.params), command.name


def test_an_option_has_no_help_but_that_of_its_own_command() -> None:
    def made(*, tree: str = "", json_: bool = False) -> None:
        """Do nothing."""

    def helps(*shared: Mapping[str, str]) -> list[str | None]:
        found = signature(making.command(made, *shared)).parameters.values()
        return [each.annotation.__metadata__[0].help for each in found]

    assert helps() == [None, "Print JSON instead of text."]
    assert helps({"tree": "A tree."}) == ["A tree.", None]


@pytest.mark.parametrize("home", ["core.errors:ForetokenError", "core.errors:Nothing", "nowhere:Nothing"])
def test_garbage_is_collected_again_after_an_import(home: str) -> None:
    with suppress(ImportError, AttributeError):
        imported(home)
    assert gc.isenabled()


def test_garbage_collection_rests_and_what_was_made_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()  # of what other tests have loaded
    monkeypatch.delitem(sys.modules, "foretoken.version")
    made: list[object] = [[] for _ in range(5)]
    imported("version:__version__")
    assert gc.isenabled()
    assert any(each is made[-1] for each in gc.get_objects(generation=2))


def test_what_others_froze_stays_frozen_and_a_collector_that_was_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "foretoken.version")
    gc.freeze()
    try:
        imported("version:__version__")
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_objects_are_not_counted_at_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count a million takes a twentieth of a second."""
    assert foretoken.law is not None
    monkeypatch.setattr(gc, "get_freeze_count", raising(AssertionError))
    assert foretoken.law is imported("names:law")


def test_the_package_itself_is_light() -> None:
    code = f"import sys, foretoken; sys.exit(any(name in sys.modules for name in {SLOW}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_python_without_docstrings_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-OO", "-m", "foretoken", "--help"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "leave it out" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    """The kernel's sources and the table of known models are read as files."""
    package = Path(foretoken.__file__).parent
    with zipfile.ZipFile(tmp_path / "foretoken.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    command = [sys.executable, "-m", "foretoken", "--version"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "foretoken.zip")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = "ImportError: Foretoken must be installed as files, as by pip install: it does not run from a zip archive."
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.long
def test_the_package_needs_no_jaxtyping_to_run() -> None:
    code = "import sys; sys.modules['jaxtyping'] = None; import foretoken; foretoken.load, foretoken.custom_generate"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_that_is_told_without_torch_is_one_of_something() -> None:
    assert set(MADE_BY) == set(TREES)
    assert all(callable(kind.make) for kind in KINDS.values())
    for table in (LAWS, HEADS, VERIFIERS):
        assert all(callable(thing) for thing in table.values())
    assert all(law_family(name).name == name for name in LAWS)
    assert all(rule.name == name for name, rule in VERIFIERS.items())
    assert all(foretoken.tree(tree).max_nodes > 1 for tree in METHODS.values())
    assert "nope" not in VERIFIERS
    with pytest.raises(KeyError):
        VERIFIERS["nope"]


def foretoken_run(shell: str) -> subprocess.CompletedProcess[str]:
    """A shell's line in which FORETOKEN is the command."""
    command = f"{sys.executable} -m foretoken"
    return subprocess.run(
        ["bash", "-c", shell.replace("FORETOKEN", command)], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence() -> None:
    done = foretoken_run("FORETOKEN --version > /dev/full")
    assert (done.returncode, done.stderr) == (2, "foretoken: Cannot write the output: No space left on device.\n")


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("NUMBA_DISABLE_JIT=1", "NUMBA_DISABLE_JIT is set, and Foretoken's loops run only as compiled code: unset it."),
        ("NUMBA_NUM_THREADS=0", "NUMBA_NUM_THREADS is 0: it must be at least 1; set it to that, or unset it."),
        ("NUMBA_NUM_THREADS=x NUMBA_DISABLE_JIT=", NONE),
        ("mkdir gone && cd gone && rmdir ../gone;", "The current folder was removed: change to another one."),
    ],
)
def test_surroundings_in_which_libraries_fail_are_refused(
    before: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(foretoken.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    done = foretoken_run(f"{before} FORETOKEN generate x --target {NONE}")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert says in done.stderr


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_an_interrupt_during_imports_ends_quietly(tmp_path: Path, code: str) -> None:
    (tmp_path / "typer.py").write_text(code)  # in the place of the first library that is imported
    done = foretoken_run(f"PYTHONPATH={tmp_path}:$PYTHONPATH FORETOKEN --help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_a_library_cannot_find_is_not_called_output() -> None:
    """Such an error has no number: nothing failed to be written."""
    code = "from foretoken.cli.main import _streams\nwith _streams(): raise FileNotFoundError('no library llama.')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ForetokenError: FileNotFoundError: no library llama.\n")


@pytest.mark.parametrize(
    ("line", "code", "err"),
    [
        ("FORETOKEN --version >&-", 2, "foretoken: Standard output is closed: leave it open"),
        ("FORETOKEN generate - <&-", 2, "foretoken: The prompt is - and stdin is closed"),
        ("FORETOKEN generate x --tree nope 2>&-", 2, ""),
        ("FORETOKEN --help | head -c 1; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_streams_that_are_closed(line: str, code: int, err: str) -> None:
    done = foretoken_run(line)
    assert done.returncode == code
    assert done.stderr.startswith(err)
    assert len(done.stderr.splitlines()) == bool(err)


class Gone(io.StringIO):
    """A stream that fails."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_a_reader_that_went_away_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    monkeypatch.setattr(sys, "argv", ["foretoken", "--version"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    monkeypatch.setattr(sys, "stdout", Gone(OSError(errno.ENOSPC, "No space left on device", "/full")))
    monkeypatch.setattr(sys, "argv", ["foretoken", "--version"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "foretoken: Cannot use /full: No space left on device.\n"
