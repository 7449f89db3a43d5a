"""What a reader of the pages has in a checkout when trying a command: models, files of their own, and a shell."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

import gguf_zoo
from foretoken.models.load import load_tokenizer
from serving import TEMPLATE
from snippets import ROOT

TYPED = "Name three rivers.\n"  # at a command that reads the terminal
COPIED = ("benchmarks", "docs", "examples", "scripts")  # what commands may write into
KNOWN = "smollm2-135m-instruct"  # the known model for which the small target stands in
OTHER = "qwen2.5-coder-1.5b-instruct"  # the one for which a tiny model with another vocabulary does
PATIENCE_S = 1500  # until a command that hangs is a failure; most take seconds
CONTEXT = 8192  # tokens, for prompts of thousands of tokens
PROMPTS = ["def read(path):\n", "import os\n", "class Stack:\n", "for line in", "x = [", "# Returns"]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Desk:
    """Models and files by the names that the pages give to a reader's own, and the cache directory.

    things: from the name to the file or folder.
    """

    home: Path
    things: dict[str, Path]

    def environment(self) -> dict[str, str]:
        """The variables of a shell in which foretoken is installed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "FORETOKEN_HOME": str(self.home)}

    def checkout(self, folder: Path, left_out: list[str]) -> None:
        """A checkout in an empty folder, with the reader's things in it but for those that a command is to write."""
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "paper"))
        for path in ROOT.iterdir():
            if path.name in ("models", "src", "tests") or (path.is_file() and path.suffix != ".md"):
                (folder / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy(path, folder)
        (folder / ".venv").symlink_to(sys.prefix)
        for name, thing in self.things.items():
            if name not in left_out:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(thing)

    def run(self, line: str, folder: Path) -> Done:
        """Let a shell run a line there, and wait for its end."""
        with self._started(line, folder) as process:
            out, err = process.communicate(TYPED, timeout=PATIENCE_S)
        return Done(process.returncode, out, err)

    @contextmanager
    def serve(self, line: str, folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
        """Let a shell start a server there that will have this address, and wait until it is ready."""
        with (folder / "server.log").open("w") as log, self._started(f"exec {line}", folder, log) as process:
            end = time.monotonic() + PATIENCE_S
            while not _ready(url):
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < end, "the server is not ready"
                time.sleep(0.2)
            yield process

    @contextmanager
    def _started(self, line: str, folder: Path, log: object = None) -> Iterator[subprocess.Popen[str]]:
        streams = (subprocess.PIPE, subprocess.PIPE) if log is None else (log, log)
        with subprocess.Popen(
            ["bash", "-c", line], cwd=folder, env=self.environment(), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=streams[0], stderr=streams[1],
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def desk(folder: Path) -> Desk:
    """Write a reader's things into a folder."""
    home, models = folder / "home", ROOT / "models"
    chat = home / "models" / KNOWN
    _write_chat_model(chat)
    packed = chat.with_name(f"{KNOWN}.gguf")
    gguf_zoo.save(gguf_zoo.model("llama", max_position_embeddings=CONTEXT), "llama", packed)
    _write_other_model(home / "models" / OTHER)
    texts = {
        "prompts.jsonl": "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS),
        "texts.jsonl": "".join(
            json.dumps({"text": record["prompt"] + record["reference"]}) + "\n"
            for record in map(json.loads, (models / "heldout.jsonl").read_text().splitlines())
        ),
        "notes.txt": "Rivers run to the sea. Most of them are short.\n" * 20,
        "prompt.txt": "def main():\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    things = {
        "TARGET": chat,
        "DRAFTER": models / "drafter",
        "FOLDER": chat,
        "path/to/folder": chat,
        "model.gguf": packed,
        "FILE": packed,
        "my-head": models / "heads" / "gumiho",
        **{name: folder / name for name in texts},
    }
    return Desk(home, things)


def _write_other_model(folder: Path) -> None:
    """A folder, and a GGUF file beside it, of the same tiny weights."""
    made, packed = gguf_zoo.model("qwen2", max_position_embeddings=CONTEXT), folder.with_name(f"{OTHER}.gguf")
    gguf_zoo.save(made, "qwen2", packed)
    made.save_pretrained(folder)
    load_tokenizer(str(packed)).save_pretrained(folder)


def _write_chat_model(folder: Path) -> None:
    """The small target with a longer context and a chat template."""
    target = ROOT / "models" / "target"
    folder.mkdir(parents=True)
    for path in target.iterdir():
        if path.suffix != ".json":
            (folder / path.name).symlink_to(path)
            continue
        values = json.loads(path.read_text())
        if path.name == "config.json":
            values["max_position_embeddings"] = CONTEXT
        if path.name == "tokenizer_config.json":
            values["chat_template"] = TEMPLATE.replace("<|end|>", values["eos_token"])
        (folder / path.name).write_text(json.dumps(values))
