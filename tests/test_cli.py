"""The command line: results on stdout, all else on stderr, one sentence and exit code 2 for bad input."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import typer

import foretoken
import tiny
from foretoken.cli import comparison, options
from foretoken.core.sequence import Step
from foretoken.decode import NoDrafter
from foretoken.draft.auto import AutoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.stats import Stats
from raising import raising

KEYS = {
    "text", "token_ids", "finish_reason", "tokens_per_s", "decoding_tokens_per_s", "block_efficiency",
    "acceptance_rate", "num_target_forwards", "num_plain", "num_drafted", "num_accepted", "ttft_s", "seed",
    "temperature", "target", "drafter", "vocab", "tree", "verifier",
}  # fmt: skip


def test_generate_streams_text_to_stdout_and_statistics_to_stderr(run, monkeypatch):
    monkeypatch.setattr(comparison, "COMPARED", 1)
    out, err = run.good("generate", "def f(", "--max-new-tokens", 8, "--seed", 1, "--compare")
    assert out.startswith("def f(")
    for word in ("tokens/s", "speed-up", "tokens per step", "acceptance rate", "finish reason      length"):
        assert word in err
        assert word not in out
    assert "decoded plainly" not in err


def test_the_demo_model_is_named_where_no_target_was(run):
    line = "generate", "def f(", "--max-new-tokens", 4, "--seed", 1, "--drafter", "none"
    assert "no --target: this is the small demo model" in run.good(*line)[1]
    assert "no --target" not in run.good(*line, "--target", options.demo_folder() / "target")[1]


def test_without_a_drafter_nothing_is_said_of_drafts(run):
    line = "generate", "def f(", "--max-new-tokens", 4, "--seed", 1, "--drafter", "none"
    _, err = run.good(*line)
    assert "plain decoding: no drafter" in err
    for word in ("acceptance", "chain", "block"):
        assert word not in err
    record = run.json(*line)
    assert (record["drafter"], record["tree"], record["verifier"]) == ("none", "plain", None)


def test_json_is_one_object_with_the_promised_fields(run, monkeypatch):
    monkeypatch.setattr(comparison, "COMPARED", 1)
    record = run.json("generate", "def f(", "--max-new-tokens", 20, "--seed", 1, "--tree", "kary:2x2")
    assert set(record) == KEYS
    assert (record["seed"], record["tree"], record["verifier"]) == (1, "kary:2x2", "traversal")
    assert 0 < len(record["token_ids"]) <= 20
    assert record["finish_reason"] == ("length" if len(record["token_ids"]) == 20 else "stop")
    compared = run.json("generate", "def f(", "--max-new-tokens", 8, "--seed", 1, "--compare")
    assert set(compared) == KEYS | {"plain_tokens_per_s", "speedup", "decoding_speedup"}
    assert compared["speedup"] == pytest.approx(compared["tokens_per_s"] / compared["plain_tokens_per_s"])


def test_the_rate_of_decoding_leaves_the_first_step_out(monkeypatch):
    now = iter([12.0, 12.5, 13.0])  # a prompt of two seconds, two steps of half a second
    monkeypatch.setattr("foretoken.stats.time.perf_counter", lambda: next(now))
    stats = Stats(_start=10.0)
    assert stats.decoding_tokens_per_s == 0
    for tokens in (3, 4, 2):
        stats.record(Step(tuple(range(tokens)), 5, tokens - 1), tokens)
    assert (stats.num_tokens, stats.num_first, stats.ttft_s, stats.wall_s) == (9, 3, 2.0, 3.0)
    assert stats.tokens_per_s == 3
    assert stats.decoding_tokens_per_s == 6


def test_method_auto_tells_where_it_decoded_plainly(run):
    # At temperature 0 the text does not end in its first step, as one of a seed that the clock has a say in may.
    _, err = run.good("generate", "def f(", "--max-new-tokens", 20, "--method", "auto", "--temperature", 0)
    line = r"decoded plainly    at (\d+) of (\d+) steps?\. A step with one draft token takes \d\.\d\d times as long"
    found = re.search(line, err)
    assert found is not None, err
    assert 1 <= int(found[1]) <= int(found[2])  # the first is always plain, to see what that costs


def test_of_a_lookup_and_a_model_the_line_on_plain_steps_is_on_the_model(run, demo):
    settings = ("--method", "auto", "--temperature", 0, "--drafter", f"ngram+{demo / 'drafter'}")
    _, err = run.good("generate", "def f(", "--max-new-tokens", 20, *settings)
    assert re.search(
        r"decoded plainly    at \d+ of \d+ steps?\. A step with one draft token of the model takes", err
    ), err


@pytest.mark.parametrize("made", [0, 3])
def test_a_speed_that_has_compiling_in_it_is_said_to(run, monkeypatch, made):
    counts = iter([7, 7 + made])
    monkeypatch.setattr("foretoken.kernel.compile.compilations", lambda: [next(counts)])
    _, err = run.good("generate", "def f(", "--max-new-tokens", 4, "--drafter", "none")
    assert ("machine code was compiled meanwhile" in err) == (made > 0)


@pytest.mark.parametrize("method", ["fixed", "auto"])
def test_both_engines_are_warm_before_they_are_compared(demo, monkeypatch, method):
    """Also what a controller does not try at first, and what an early end would leave out."""
    engine = foretoken.load(demo / "target", drafter=demo / "drafter", method=method)
    seen = []
    monkeypatch.setattr(Engine, "generate", lambda self, prompt, **settings: seen.append((self, settings)))
    comparison.warm(engine, "x", {"stop": ("a",), "temperature": 0.5, "max_new_tokens": 99, "seed": 3})
    drafters = [type(used.drafter) for used, _ in seen]
    assert drafters == [LMDrafter, *([AutoDrafter] if method == "auto" else []), NoDrafter]
    for used, settings in seen:
        assert used.eos_ids == frozenset()
        assert settings == {"stop": (), "temperature": 0.5, "max_new_tokens": comparison.WARM_TOKENS, "seed": 3}


def test_an_interrupted_comparison_loses_neither_text_nor_statistics(run, monkeypatch):
    monkeypatch.setattr("foretoken.cli.generate.compared", raising(KeyboardInterrupt))
    code, out, err = run("generate", "def f(", "--max-new-tokens", 5, "--seed", 1, "--compare")
    assert code == 130
    assert out.startswith("def f(")
    assert "interrupted while comparing" in err
    assert "tokens/s" in err
    assert "speed-up" not in err


def test_a_slow_model_is_compared_by_one_run_of_each_engine(demo, monkeypatch):
    engine, runs = foretoken.load(demo / "target", drafter=demo / "drafter", tree="chain:2"), []

    def generate(self, prompt, **settings):
        runs.append(type(self.drafter))
        return SimpleNamespace(
            stats=SimpleNamespace(tokens_per_s=3.0 if len(runs) == 1 else 6.0, decoding_tokens_per_s=0.0)
        )

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(comparison, "COMPARING_S", 0.0)
    found = comparison.compared(engine, "x", {"max_new_tokens": 9, "seed": 3})
    assert runs == [NoDrafter, LMDrafter]
    assert found == {"tokens_per_s": 6.0, "plain_tokens_per_s": 3.0, "speedup": 2.0, "decoding_speedup": None}
    monkeypatch.setattr(comparison, "COMPARING_S", 60.0)
    comparison.compared(engine, "x", {"max_new_tokens": 9, "seed": 3})
    assert runs[2:] == [NoDrafter, LMDrafter, LMDrafter, NoDrafter, NoDrafter, LMDrafter]  # in turn


def test_batch_file_gives_each_prompt_its_own_seed(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n"b"\n{"prompt": "c"}\n')
    out, _ = run.good("generate", "--batch-file", file, "--max-new-tokens", 8, "--seed", 7, "--json")
    records = sorted((json.loads(line) for line in out.splitlines()), key=lambda r: r["index"])
    assert [r["seed"] for r in records] == [7, 8, 9]
    assert [r["prompt"] for r in records] == ["a", "b", "c"]  # so that the lines are data for `foretoken train`
    alone = run.json("generate", "b", "--max-new-tokens", 8, "--seed", 8)
    assert alone["token_ids"] == records[1]["token_ids"]


def test_a_batch_is_read_from_stdin(run, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n"b"\n')
    line = "--max-new-tokens", 8, "--temperature", 0, "--max-batch", 1
    wanted = run("generate", "--batch-file", tmp_path / "prompts.jsonl", *line)[1]
    monkeypatch.setattr("sys.stdin", io.StringIO('\ufeff{"prompt": "a"}\n"b"\n'))
    assert run("generate", "--batch-file", "-", *line)[:2] == (0, wanted)
    monkeypatch.setattr("sys.stdin", io.StringIO('"a"\n{}\n'))
    run.refused("foretoken: Line 2 of stdin is not a prompt: ", "generate", "--batch-file", "-")


def test_texts_of_a_batch_are_parted_by_their_numbers(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    line = "generate", "--batch-file", file, "--max-new-tokens", 8, "--temperature", 0, "--max-batch", 1
    alone = {prompt: run("generate", prompt, *line[3:])[1] for prompt in ("a", "b")}
    file.write_text('"a"\n"b"\n')
    assert run(*line)[1] == f"==> 1 <==\n{alone['a']}\n==> 2 <==\n{alone['b']}"
    file.write_text('"b"\n')
    assert run(*line)[1] == alone["b"]


# What is said of it depends on which torch there is.
NO_DEVICE = "this torch was built for CPUs alone" if version("torch").endswith("+cpu") else "torch finds"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["x", "--verifier", "standard", "--tree", "kary:2x2"], "standard"),
        (["x" * 3000], "context"),
        (["x", "--device", "cuda:99"], f"Device cuda:99 cannot be used: {NO_DEVICE}"),
    ],
)
def test_what_only_the_models_can_refuse_is_one_sentence_too(run, arguments, word):
    run.refused(word, "generate", *arguments)


def test_missing_folders_are_named(run, tmp_path):
    (tmp_path / "empty").mkdir()
    no_tokenizer = tmp_path / "bare"
    tiny.llama(0).save_pretrained(no_tokenizer)
    broken = tmp_path / "broken"
    tiny.save(tiny.llama(0), broken)
    (broken / "model.safetensors").write_bytes(b"not a tensor file")
    for folder in (tmp_path / "none", tmp_path / "empty", no_tokenizer, broken):
        run.refused(str(folder), "generate", "x", "--target", folder)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_prints_what_was_generated(run, monkeypatch):
    """A real signal in mid-text; in a process of its own, test_chat has one."""
    stream = foretoken.Engine.stream

    def interrupted(self, *arguments, **options):
        for i, chunk in enumerate(stream(self, *arguments, **options)):
            yield chunk
            if i == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(foretoken.Engine, "stream", interrupted)
    code, out, err = run("generate", "def f(", "--max-new-tokens", 200, "--temperature", 0)
    assert code == 130
    assert out.startswith("def f(")
    assert "interrupted" in err
    assert "tokens/s" in err


def test_only_own_files_are_replaced(run, tmp_path, monkeypatch):
    """What `bench` and `tune` write over is what they wrote, or empty; a model's config.json is neither."""
    monkeypatch.setattr(options, "quiet", raising(typer.Exit))
    own = {
        "bench": '{"system": "foretoken", "method": "plain", "tokens_per_s": 1.0}\n{}\n',
        "tune": '{\n "format": 3,\n "configurations": []\n}\n',
    }
    for command, text in own.items():
        for name, content in (("own", text), ("empty", ""), ("config.json", '{"model_type": "llama"}'), ("bad", "x")):
            file = tmp_path / name
            file.write_text(content)
            code, out, err = run(command, "--out", file, "--prompts", 1)
            assert (code, out) == (0 if name in ("own", "empty") else 2, ""), (command, name, err)
            assert code == 0 or "would be replaced: name another --out" in err
            assert file.read_text() == content
        assert run(command, "--out", "/dev/null")[0] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generate", "--bogus"), "No such option: --bogus (Possible options: --out). See foretoken generate --help."),
        (("serve", "m", "--port", "x"), "Invalid value for '--port'"),
        (("fetch", "a", "b"), "unexpected extra argument"),
        (("nothing",), "No such command 'nothing'. See foretoken --help."),
        (("benchmarks", "rules", "--bogus"), "No such option: --bogus. See python -m benchmarks rules --help."),
    ],
)
def test_a_wrong_command_line_is_one_sentence(run, words, says):
    run.refused(says, *words)


def test_what_is_logged_after_a_command_of_a_test_is_not_printed(run, capsys, monkeypatch):
    """As by a server of the test's own process, whose last line may come when the output is not captured any more."""
    monkeypatch.setattr(logging.getLogger("foretoken"), "handlers", [])  # nothing of a test before
    run.good("--version")
    logging.getLogger("foretoken.after").info("request")
    assert capsys.readouterr().err == ""


NOTICED = """
import sys
from foretoken.cli.main import run

def command():
    print("notice", file=sys.stderr)
    print("result")
    return CODE

run(command)
"""


@pytest.mark.parametrize("code", [0, 7])
def test_notices_that_cannot_be_written_do_not_end_the_work(code):
    """As where the log of a long training is on a full disk."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", NOTICED.replace("CODE", str(code))]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert (ended.returncode, ended.stdout) == (code, "result\n")
