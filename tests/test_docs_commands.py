"""Every command of the pages runs as it stands there, beside small models and files with the names that it gives them.

Most take from seconds to minutes: `python -m pytest -m slow tests/test_docs_commands.py`. Which are not executed, and
why, says NOT_EXECUTED; what is appended to a line so that it ends soon says SHORTER.
"""

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foretoken.serve.listen import bound
from reader import Desk, desk
from snippets import PAGES, ROOT, Command, shown

MAKES = "It makes an environment first; what it runs there is {}."
# A command with such a part is not executed.
NOT_EXECUTED = {
    "pip install ": "It installs packages into an environment.",
    "make demo": MAKES.format("`foretoken demo`, which is executed"),
    "make audit": MAKES.format("`foretoken audit`, which is executed"),
    "make bench": MAKES.format("`foretoken bench`, which is executed"),
    "make test": MAKES.format("the fast test suite, that is this test"),
    "make lint": MAKES.format("linters, which every change must pass"),
    "make site": MAKES.format("mkdocs, which is installed there"),
    "make paper": MAKES.format("typst, which is installed there"),
    ".ci/run": "It is `make lint` and `make test`.",
    "pytest -m slow": "It is the slow test suite, that is this test.",
    "llama-server ": "It is a program of llama.cpp.",
    "transformers serve ": "It is a program of transformers that needs packages which this one does not.",
    " --server llama.cpp=": "It asks llama.cpp's server; the same benchmark without one is executed.",
    " --openvino ": "It needs OpenVINO GenAI, a large package; the same benchmark without it is executed.",
    " --ray ": "It needs Ray, a large package; tests/test_cluster.py and tests/test_cluster_serve.py start it.",
}
# What is appended to the commands that begin so; the longest beginning counts, and of an option given twice the last.
ONE_SHORT_RUN = "--prompts 1 --max-new-tokens 16 --rounds 1"
SHORTER = {
    ". .venv/bin/activate": "&& foretoken --version",
    "foretoken audit": "--samples 400",
    "foretoken bench": ONE_SHORT_RUN,
    "foretoken bench acceptance": "--prompts 2 --max-new-tokens 8",
    "foretoken chat": "--max-new-tokens 16",
    "foretoken generate": "--max-new-tokens 24",
    "foretoken train": "--tokens 3000 --evaluate-every 1000",
    "foretoken train eagle3": "--tokens 3000 --evaluate-every 1000 --draft-vocab 1024",  # of the small target's 4096
    "foretoken tune": "--prompts 2 --max-new-tokens 16 --best 1",
    "python -m benchmarks arena": "--prompts 1 --places 1 --nodes 8 --max-new-tokens 16 --temperature 1",
    "python -m benchmarks auto": ONE_SHORT_RUN,
    "python -m benchmarks compare": ONE_SHORT_RUN,
    "python -m benchmarks execution": "--nodes 1,4 --context 64 --batch 1 --rounds 1",
    "python -m benchmarks heads": "--prompts 1 --max-new-tokens 8",
    "python -m benchmarks optimum": "--pairs 1",
    "python -m benchmarks peers": ONE_SHORT_RUN,
    "python -m benchmarks quantised": "--nodes 1 --batch 2 --prompt 16 --rounds 1 --num-tokens 128",
    "python -m benchmarks randomised": ONE_SHORT_RUN,
    "python -m benchmarks repetitive": "--kind chat --unseen --max-new-tokens 16 --rounds 1",
    "python -m benchmarks rules": "--positions 8 --draws 1,2",
    "python -m benchmarks serving": "--max-new-tokens 8 --rounds 1",
    "python -m benchmarks soak": "--minutes 1.5 --users 4",
    "python -m benchmarks vocab": "--prompts 1 --max-new-tokens 8 --rounds 1 --samples 20",
    "python scripts/write_answers.py": "--tokens 1000",
}
# What a command reads and another one of the pages writes: that one is run first.
WRITTEN_BY = {
    "foretoken-profile.json": "foretoken tune --target TARGET --drafter DRAFTER --workload prompts.jsonl "
    "--temperature 0.8",
    "foretoken-acceptance/rrsw-1.json": "foretoken bench acceptance --verifier rrsw --temperature 1",
    "large": "python -m benchmarks expand large --size 100m",
    "states": "python scripts/write_answers.py --target smollm2-135m-instruct --out answers.jsonl --cache states "
    "--tokens 1000000",
}
QUICK = ("foretoken fetch", "foretoken fetch smollm2-135m-instruct")
SILENT = (".venv/bin/python scripts/tables.py", "python -m benchmarks expand large --size 100m")  # they write files
SERVER = "foretoken serve "
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+(#\w+)?")  # and the name of a model there

SHOWN = shown()
EXECUTED = [command for text, command in SHOWN.items() if not any(part in text for part in NOT_EXECUTED)]


def as_parameters(commands: list[Command]) -> list:
    """One for each command, called as it reads; all but the quick ones are slow."""
    slow = [() if command.text in QUICK else (pytest.mark.slow,) for command in commands]
    return [pytest.param(each, id=each.text, marks=marks) for each, marks in zip(commands, slow, strict=True)]


def beginning(text: str) -> str | None:
    """The entry of SHORTER that is meant for a command."""
    return max((known for known in SHORTER if f"{text} ".startswith(f"{known} ")), key=len, default=None)


def line(text: str) -> str:
    """What a shell is given for a command."""
    known = beginning(text)
    return text if known is None else f"{text} {SHORTER[known]}"


def free_port() -> int:
    with bound("127.0.0.1", 0) as listening:
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return desk(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def url(reader: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server, for commands that ask one; llama.cpp's is asked by the same protocol."""
    port, folder = free_port(), tmp_path_factory.mktemp("server")
    address = f"http://127.0.0.1:{port}"
    with reader.serve(f"{SERVER}smollm2-135m-instruct --max-batch 32 --port {port}", folder, address):
        yield address


def test_the_lists_are_of_commands_that_the_pages_show() -> None:
    assert len(EXECUTED) > 60
    assert [part for part in NOT_EXECUTED if not any(part in text for text in SHOWN)] == []
    assert {*QUICK, *SILENT} <= {command.text for command in EXECUTED}
    assert set(SHORTER) == {beginning(command.text) for command in EXECUTED} - {None}
    assert set(WRITTEN_BY.values()) <= {command.text for command in EXECUTED}


def test_no_shell_block_is_written_in_a_way_that_is_not_found() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*```(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {"bash", "console", "shell", "zsh"} & set(fences), page
        assert fences.count("sh") == len(re.findall(r"^```sh$", page.read_text(encoding="utf-8"), re.MULTILINE)), page


def test_what_a_command_names_is_there(reader: Desk) -> None:
    """A name in capitals, a file or a folder that is new in a page is refused here, and not minutes later."""
    there = {*reader.things, *WRITTEN_BY}
    for command in EXECUTED:
        written = {file for text in needed(command) for file in SHOWN[text].writes}
        for name in command.names:
            if re.fullmatch(r"[A-Z_]{2,}|[^{}]+\.(jsonl?|txt|gguf)|\S+/to/\S+", name) and "://" not in name:
                known = name in there | written or (ROOT / name).exists() or (reader.home / "models" / name).exists()
                assert known, f"{command.page}: {command.text}: nothing stands for {name}; see tests/reader.py"


@pytest.mark.parametrize("text", [text for text in NOT_EXECUTED if text.startswith("make ")])
def test_make_knows_what_is_not_executed(text: str) -> None:
    subprocess.run([*shlex.split(text), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def needed(command: Command) -> list[str]:
    """Commands that write what this one reads."""
    return [text for name, text in WRITTEN_BY.items() if name in command.names and text != command.text]


def finished(reader: Desk, command: Command, folder: Path, text: str) -> None:
    """Run a command, as this text, to its end; fail where that is not a good one or nothing comes of it."""
    done = reader.run(text, folder)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert done.out or command.text in SILENT
    for file in command.writes:
        assert (folder / file).exists(), file


def asked(reader: Desk, text: str, folder: Path) -> None:
    """Start a server, ask it for a text, and end it."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with reader.serve(f"{text} --port {port}", folder, address) as process:
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "def main():", "max_tokens": 8}, timeout=600)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "server.log").read_text()


@pytest.mark.parametrize("command", as_parameters(EXECUTED))
def test_it_runs(command: Command, reader: Desk, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reader.checkout(tmp_path, command.writes)
    for first in needed(command):
        finished(reader, SHOWN[first], tmp_path, line(first))
    if command.text.startswith(SERVER):
        asked(reader, line(command.text), tmp_path)
        return
    text = line(command.text)
    if ADDRESS.search(text):
        text = ADDRESS.sub(request.getfixturevalue("url"), text)
    finished(reader, command, tmp_path, text)
