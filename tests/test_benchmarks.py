"""`python -m benchmarks`: every script is listed and explains itself."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from benchmarks import quantised, soak
from benchmarks.__main__ import SCRIPTS, script
from command import Command
from foretoken.models.named import NO_MODELS
from foretoken.serve.listen import bound


def test_without_a_name_all_are_listed(cli):
    out, _ = cli.good("benchmarks")
    assert [line.split()[0] for line in out.splitlines()] == list(SCRIPTS)
    assert all(what in out for what in SCRIPTS.values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_has_a_help(cli, name):
    out, _ = cli.good("benchmarks", name, "--help")
    assert f"python -m benchmarks {name}" in out
    assert [option.name for option in get_command(script(name)).params if not vars(option)["help"]] == []


@pytest.mark.parametrize("name", ["rules", "reproduce", "randomised"])
def test_the_help_names_no_drafter_that_is_refused(name: str) -> None:
    (drafter,) = (option for option in get_command(script(name)).params if option.name == "drafter")
    assert not {word for word in (*NO_MODELS, "vocab", "head") if re.search(rf"\b{word}\b", vars(drafter)["help"])}


BAD = [
    ("optimum --json --markdown", "two forms of one report"),
    ("nope", "There is no benchmark nope: choose one of compare, "),
    ("execution --nodes 1,two", "--nodes is '1,two'"),
    ("execution --batch -1", "--batch must be"),
    ("execution --rounds 0", "rounds is 0"),
    ("execution --out nowhere/x.jsonl", "Cannot write nowhere/x.jsonl"),
    ("execution --plot x.docx", "plot"),
    ("arena --pair nonsense", "There is no pair nonsense: choose one of smollm2, "),
    ("arena --pair toy --prompts 2 --rule nonsense", "choose one of exact-match, "),
    ("arena --pair toy --prompts 2 --rule string-rejection", "Unknown rule of the arena"),
    ("arena --pair toy --nodes 4,x", "whole numbers"),
    ("arena --pair toy --nodes 0", "nodes is 0"),
    ("arena --pair toy --places 0", "places is 0"),
    ("arena --pair toy --prompts 2 --plot x.docx", "plot"),
    ("arena --pair nowhere,ngram", "nowhere"),
    ("heads --nodes 100000", "A tree of 100000 nodes has more than 4096"),
    ("vocab --method nonsense", "choose one of"),
    ("vocab --target models/target", "--drafter"),
    ("vocab --lookahead 0", "lookahead is 0"),
    ("vocab --tree chain:2", "METHOD=TREE"),
    ("vocab --method tli --tree slem=chain:2", "a method of tli"),
    ("vocab --tree tli=chain:x", "chain:D"),
    ("soak --target nothing --users 0", "users is 0"),
    ("soak --target nothing --minutes 0", "minutes is 0"),
    ("serving --server x=http://127.0.0.1:9 --long 0", "long is 0"),
    ("rules --draws 1,x", "--draws is '1,x'"),
    ("rules --draws 0", "draws is [0]"),
    ("rules --draws 1000000", "--draws is 1000000: give numbers up to 256"),
    ("rules --temperature 0", "temperature is [0.0]"),
    ("rules --positions 0", "positions is 0"),
    ("rules --positions 1000000", "fewer than 1000000"),
    ("rules --text nowhere.txt", "Cannot read text file nowhere.txt"),
    ("rules --drafter ngram", "no distribution"),
    ("rules --toy --draws 9", "up to 4"),
    ("rules --plot x.docx", "plot"),
    ("rules --speed --toy", "one at a time"),
    ("rules --speed --plot x.png", "leave one of them out"),
    ("reproduce", "No name was given: choose one of spechub-figures"),
    ("reproduce table9", "Nothing is known as table9"),
    ("reproduce spechub-figures --cell-seconds 0", "cell-seconds is 0.0"),
    ("randomised --temperature 0 --prompts 1 --max-new-tokens 16", "wins nothing at temperature 0"),
    ("randomised --drafter ngram --prompts 1 --max-new-tokens 16", "no language model"),
    ("expand out --size 7b", "choose one of 100m, 300m, 1b"),
    ("repetitive --kind poems", "Unknown kind poems: choose one of edits, logs, quotes, chat"),
    ("repetitive --method best", "Unknown method best"),
    ("optimum --case kary:2x1", "is not TREE/V"),
    ("optimum --case kary:2x1/1", "is not TREE/V"),
    ("peers --rounds 0", "rounds is 0"),
    ("peers --target TARGET --server nonsense", "--server nonsense names no server: give NAME=URL"),
    ("peers --target TARGET --openvino nowhere", "pip install openvino-genai"),
    ("peers --target TARGET --plot x.docx", "plot"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_input_is_one_sentence(run: Command, demo: Path, tmp_path: Path, line: str, words: str) -> None:
    code, out, err = run("benchmarks", *line.replace("TARGET", str(demo / "target")).split())
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("foretoken: ")
    assert words in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


DYING = f"""#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Dying(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        os._exit(3)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Dying).serve_forever()
"""


def test_the_soak_tells_that_the_server_died(run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.write_text(DYING)
    server.chmod(0o755)
    monkeypatch.setattr(soak, "sys", SimpleNamespace(executable=str(server)))
    monkeypatch.setattr(soak, "tasks", lambda *_: [soak.Task({"messages": []}, "")])
    with bound("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    code, out, err = run("benchmarks", "soak", "--target", "any", "--prompts", "1", "--port", port)
    assert (code, out) == (2, "")
    assert re.match(r"foretoken: The server died after \d+ requests, with exit code 3: ", err.splitlines()[-1])


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert soak.resident(ended.pid) == 0
    assert soak.resident(os.getpid()) > 1_000_000


def test_quantised_tells_its_tables_in_json() -> None:
    found = quantised.report({"threads": 1}, [], quantised.Distance(9, 0.001, 0.002, 3.5, 3.4), False).json()
    assert [table["title"] for table in found["tables"]] == [
        "forwards", "rows in 8 bits beside float32, weights the same",
    ]  # fmt: skip
    assert found["tables"][1]["rows"][0]["mean TV"] == "0.00100"
