"""Conversations by the tokenizer's chat template: in the API, in `generate`, and in `foretoken chat`."""

import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

import command
import foretoken
import tiny
import tokenizers_zoo
from foretoken import build
from foretoken.cli import tints
from foretoken.cli.measuring import chosen_prompts, encoded
from foretoken.draft.store_file import read
from foretoken.models.text import chat_prompt, turn_end
from serving import TEMPLATE, USER, load_pair, save_pair, toy_tokenizer

END = 257  # the id of <|end|>, which the model's own configuration does not know


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_pair(root)
    endless = tiny.llama(0, vocab=258, context=16384)  # an answer of it only ends where the context does
    endless.generation_config.eos_token_id = 10_000
    endless.save_pretrained(root / "long")
    toy_tokenizer(TEMPLATE.replace("<|end|>", "")).save_pretrained(root / "long")
    return root


@pytest.fixture(scope="module")
def engine(models):
    return load_pair(models)


@pytest.fixture
def run(models, monkeypatch, capsys):
    """Run a command with the chat model; stdin: its input. (exit code, stdout, stderr)."""

    def call(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        options = ["--target", models / "target", "--drafter", models / "drafter", "--tree", "chain:3"]
        return command.run(monkeypatch, capsys, *arguments, *options)

    return command.Command(call)


def test_a_conversation_is_written_by_the_template_up_to_the_answer():
    tokenizer = toy_tokenizer()
    messages = [{"role": "system", "content": "S"}, *USER]
    assert tokenizer.decode(chat_prompt(tokenizer, messages)) == "s:S<|end|>\nu:hi<|end|>\na:"
    assert turn_end(tokenizer) == END
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert turn_end(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end(tokenizer) is None


def test_of_several_templates_the_one_that_writes_decides_on_roles():
    """A developer's message is the system's where this template does not know the role, whatever others know."""
    tokenizer = toy_tokenizer()
    roles = "{% for m in messages %}{{ m.role[0] }}{% endfor %}"
    tokenizer.chat_template = {"default": roles, "tool_use": roles + "{# developer #}"}
    messages = [{"role": "developer", "content": "D"}, *USER]
    assert tokenizer.decode(chat_prompt(tokenizer, messages)) == "su"
    assert tokenizer.decode(chat_prompt(tokenizer, messages, tools=[{"type": "function"}])) == "du"


def test_what_a_template_writes_may_have_no_half_characters():
    tokenizer = toy_tokenizer("{{ tools[0].function.description }}")
    with pytest.raises(
        foretoken.ForetokenError,
        match="The conversation, as the chat template writes it, is not valid Unicode: character 2",
    ):
        chat_prompt(tokenizer, USER, tools=[{"function": {"description": "a\ud800"}}])


def test_begin_of_text_is_there_once():
    tokenizer = tokenizers_zoo.sentencepiece_bpe()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ids = chat_prompt(tokenizer, USER)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert turn_end(tokenizer) == tokenizer.eos_token_id


def test_an_answer_is_the_continuation_of_the_written_conversation(engine):
    settings = {"max_new_tokens": 12, "seed": 3, "logit_bias": {END: -1e9}}
    ids = chat_prompt(engine.tokenizer, USER)
    assert engine.encode(USER) == ids
    want = engine.generate(ids, **settings)
    assert engine.chat(USER, **settings).token_ids == want.token_ids
    assert engine.generate(USER, **settings).token_ids == want.token_ids
    assert "".join(chunk.text for chunk in engine.stream(USER, **settings)) == want.text
    both = engine.chat([USER, [{"role": "user", "content": "you"}]], **settings)
    assert [r.seed for r in both] == [3, 4]
    assert both[0].token_ids == want.token_ids
    mixed = engine.generate([ids, USER, "hi"], **settings)
    assert mixed[0].token_ids == want.token_ids
    assert len(mixed) == 3


def test_an_answer_ends_with_its_turn_and_another_text_does_not(engine):
    settings = {"max_new_tokens": 9, "seed": 0, "logit_bias": {END: 60.0}}
    answer = engine.chat(USER, **settings)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([END], "", "stop")
    text = engine.generate(engine.encode(USER), **settings)
    assert (text.token_ids, text.finish_reason) == ([END] * 9, "length")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "^The conversation is a str: give a list of messages"),
        (5, "^The conversation is a int"),
        ([], "^The conversation is empty"),
        (USER[0], "^The conversation is a dict"),
        ([USER, []], "^Conversation 2 is empty"),
        ([USER, "x"], "^Conversation 2 is a str"),
        ([USER[0], "x"], "^Message 2 of the conversation is a str"),
        ([{"role": "user"}], "^Message 1 of the conversation has no content"),
        ([{"content": "x"}], "^Message 1 of the conversation has no role"),
        ([{"role": "user", "content": ["x"]}], "^The content of message 1 of the conversation is no text"),
        ([{"role": "user", "content": "a\ud800"}], r"^The content of message 1 .* U\+D800"),
        ([{"role": "clown", "content": "x"}], "refused by the model's chat template: Only system, user and"),
    ],
)
def test_bad_conversations_are_refused_in_a_sentence(engine, unchecked, messages, says):
    with pytest.raises(foretoken.ForetokenError, match=says) as caught:
        engine.chat(messages)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_template_is_told(models, engine):
    bare = replace(engine, tokenizer=tiny.tokenizer())
    with pytest.raises(foretoken.ForetokenError, match="needs a chat template, and the tokenizer"):
        bare.chat(USER)
    with pytest.raises(foretoken.ForetokenError, match="needs a tokenizer"):
        replace(engine, tokenizer=None).chat(USER)


def test_no_stop_strings_may_be_none(engine):
    settings = {"max_new_tokens": 6, "seed": 1}
    assert engine.generate("x", stop=None, **settings).token_ids == engine.generate("x", **settings).token_ids


def test_generate_answers_a_user(run, engine):
    settings = ["--max-new-tokens", 12, "--seed", 3]
    want = engine.chat(USER, max_new_tokens=12, seed=3)
    code, out, _ = run("generate", "hi", "--chat", *settings)
    assert (code, out) == (0, want.text + "\n")  # without the prompt
    want = engine.chat([{"role": "system", "content": "S"}, *USER], max_new_tokens=12, seed=3)
    out, _ = run.good("generate", "-", "--system", "S", *settings, "--json", stdin="hi")
    assert json.loads(out)["token_ids"] == want.token_ids


def test_a_batch_file_mixes_conversations_and_texts(run, engine, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"messages": USER}), '{"prompt": "hi"}', '"x"']
    file.write_text("\n".join(lines), encoding="utf-8-sig")  # as editors on Windows write it
    out, _ = run.good("generate", "--batch-file", file, "--max-new-tokens", 8, "--seed", 3, "--json")
    records = sorted((json.loads(line) for line in out.splitlines()), key=lambda r: r["index"])
    assert records[0]["messages"] == USER
    assert [r.get("prompt") for r in records] == [None, "hi", "x"]
    want = engine.generate([USER, "hi", "x"], max_new_tokens=8, seed=3)
    assert [r["token_ids"] for r in records] == [r.token_ids for r in want]
    _, out, _ = run("generate", "--batch-file", file, "--max-new-tokens", 8, "--seed", 3, "--json", "--system", "S")
    records = sorted((json.loads(line) for line in out.splitlines()), key=lambda r: r["index"])
    system = {"role": "system", "content": "S"}
    assert [r["messages"][:2] for r in records[:2]] == [[system, USER[0]], [system, USER[0]]]


def test_a_workload_may_hold_conversations(engine, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + json.dumps({"messages": USER}))
    prompts = chosen_prompts(str(file), 2)
    assert prompts == ["a", USER]
    assert encoded(engine, prompts, 8) == [engine.encode("a"), engine.encode(USER)]
    with pytest.raises(foretoken.ForetokenError, match="Cannot take 3 prompts of the workload: it has 2"):
        chosen_prompts(str(file), 3)


def test_bytes_on_stdin_that_are_no_text_are_told(run, monkeypatch):
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
        code, _, err = run("generate", "-")
        assert code == 2
        assert "UTF-8" in err
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run("generate", "-")
    assert (code, "stdin is closed" in err) == (2, True)


def talk(run, lines, *options):
    """(stdout, stderr) of a conversation."""
    return run.good("chat", "--max-new-tokens", 8, "--seed", 3, *options, stdin="\n".join(lines) + "\n")


def test_answers_know_what_was_said_before(run, engine, tmp_path):
    file = tmp_path / "said.json"
    out, err = talk(run, ["hi", "", "and?", f"/save {file}"], "--temperature", "0.9")
    first = engine.chat(USER, max_new_tokens=8, seed=3, temperature=0.9)
    messages = [*USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and?"}]
    second = engine.chat(messages, max_new_tokens=8, seed=4, temperature=0.9)
    assert out == f"{first.text}\n{second.text}\n"
    assert json.loads(file.read_text()) == [*messages, {"role": "assistant", "content": second.text}]
    assert "written to" in err


def test_the_model_may_be_named_by_a_word(models, monkeypatch, capsys):
    said = []
    for named in (models / "target",), ("--target", models / "target"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        options = ("--drafter", "none", "--max-new-tokens", 8, "--temperature", 0)
        said.append(command.run(monkeypatch, capsys, "chat", *named, *options)[:2])
    assert said[0] == said[1]
    assert said[0][0] == 0


def test_the_commands_of_a_conversation(run, tmp_path):
    file, bad = tmp_path / "said.json", tmp_path / "bad.json"
    bad.write_text('[{"role": "user"}]')
    lines = [
        "/stats", "/system Be kind.", "hi", "/stats", "/reset", f"/save {file}", "/help", "/nope", "/save",
        f"/load {bad}", f"/load {tmp_path / 'none'}", f"/save {tmp_path}/no/where", "/system", f"/load {file}",
        " /said as it is", "/exit", "/unseen",
    ]  # fmt: skip
    out, err = talk(run, lines)
    assert "/unseen" not in err
    assert json.loads(file.read_text()) == [{"role": "system", "content": "Be kind."}]
    for says in (
        "There is no answer yet", "last answer:", "tokens per step", "acceptance length", "first token", "/save FILE",
        "There is no command /nope", "/save needs the name", "has no content", "Cannot read the conversation",
        "no/where", "messages: 1",
    ):  # fmt: skip
        assert says in err, says
    assert len(out) > 2  # two answers


def test_a_full_context_is_told_and_the_conversation_can_begin_anew(run):
    long = "x" * 2100
    out, err = talk(run, [long, "/reset", "hi"])
    assert "tokens with this message, and the context of" in err
    assert "is 2048: begin anew with /reset" in err
    assert out.strip()


def test_it_is_said_where_an_answer_was_cut_off(run, monkeypatch):
    monkeypatch.setattr(build, "eos_ids", lambda *_: frozenset())  # no token ends an answer
    monkeypatch.setattr(foretoken.engine, "turn_end", lambda _: None)
    _, err = talk(run, ["x" * 2030], "--max-new-tokens", "100")
    assert "the answer ended where the model's context is full: begin anew with /reset." in err
    _, err = talk(run, ["hi"], "--max-new-tokens", "4")
    assert "the answer ended after 4 tokens: --max-new-tokens allows more." in err


@pytest.mark.usefixtures("interruptible")
def test_after_an_interrupted_answer_the_next_message_is_answered(run, engine, monkeypatch, tmp_path):
    file, whole = tmp_path / "said.json", foretoken.Engine.stream

    def interrupted(self, *arguments, **options):
        for chunk in whole(self, *arguments, **options):
            yield chunk
            if chunk.text:
                monkeypatch.setattr(foretoken.Engine, "stream", whole)
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(foretoken.Engine, "stream", interrupted)
    out, err = talk(run, ["hi", "go on", f"/save {file}"])
    assert err.count("the answer was ended") == 1
    said = json.loads(file.read_text())
    assert [message["role"] for message in said] == ["user", "assistant"] * 2
    first, second = said[1]["content"], said[3]["content"]
    assert engine.chat(USER, max_new_tokens=8, seed=3, temperature=0.7).text.startswith(first)
    assert second == engine.chat(said[:3], max_new_tokens=8, seed=4, temperature=0.7).text
    assert out == f"{first}\n{second}\n"


@pytest.mark.usefixtures("interruptible")
def test_an_answer_that_is_interrupted_before_it_begins_leaves_the_message_out(run, monkeypatch, tmp_path):
    def interrupted(self, *arguments, **options):
        signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr(foretoken.Engine, "stream", interrupted)
    _, err = talk(run, ["hi", f"/save {tmp_path / 'said.json'}"])
    assert "the conversation goes on without this message" in err
    assert "There is no message yet that could be saved" in err
    assert not list(tmp_path.iterdir())


def asked(models, number: signal.Signals, handler, *options: object) -> subprocess.Popen:
    """A program of its own, which has such a handler of a signal whatever the tests have, and is told "hi"."""
    argv = [sys.executable, "-m", "foretoken", "chat", "--target", models / "long", "--temperature", "0", *options]
    pipe, usual = subprocess.PIPE, partial(signal.signal, number, handler)
    process = subprocess.Popen([*map(str, argv)], stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=usual)
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    return process


@pytest.mark.long
def test_an_interrupted_program_goes_on(models, tmp_path):
    file, options = tmp_path / "said.json", ("--drafter", "none", "--max-new-tokens", 16000)
    process = asked(models, signal.SIGINT, signal.default_int_handler, *options)
    first = process.stdout.read(8)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(f"/save {file}\n".encode(), timeout=60)
    assert process.returncode == 0, err
    assert b"the answer was ended" in err
    assert b"Traceback" not in err
    said = json.loads(file.read_text())
    assert [m["role"] for m in said] == ["user", "assistant"]
    assert said[1]["content"].encode().startswith(first[:4])


def test_tints_tell_where_tokens_come_from(run, monkeypatch, engine):
    settings = ["hi", "--chat", "--max-new-tokens", 24, "--seed", 3, "--show-drafts"]
    _, plain, err = run("generate", *settings)
    assert "\x1b" not in plain + err  # no terminal
    assert "FORCE_COLOR" in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, tinted, err = run("generate", *settings)
    chunks = list(engine.stream(USER, max_new_tokens=24, seed=3))
    assert {origin for chunk in chunks for origin in chunk.origins} >= {"accepted", "corrected"}
    tokens = tints.Tints(engine, USER, ())
    assert tinted == "".join(map(tokens.push, chunks)) + "\n"
    assert "\x1b[32m" in tinted
    assert "\x1b[1;31m" in tinted
    untinted = tinted
    for code in ("\x1b[32m", "\x1b[1;31m", "\x1b[1;34m", "\x1b[0m"):
        untinted = untinted.replace(code, "")
    assert untinted == plain
    assert "corrected" in err
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("generate", *settings)[1] == plain


def test_origins_say_what_was_drafted(engine):
    chunks = list(engine.stream(USER, max_new_tokens=40, seed=3, logit_bias={END: -1e9}))
    assert sum(chunk.origins.count("accepted") for chunk in chunks) == chunks[-1].stats.num_accepted
    for chunk in chunks[:-1]:
        assert len(chunk.origins) == len(chunk.token_ids)
        assert chunk.origins[:-1] == ("accepted",) * (len(chunk.token_ids) - 1)
        assert chunk.origins[-1] == ("bonus" if len(chunk.token_ids) == 4 else "corrected")  # chains of 3
    alone = replace(engine, drafter=foretoken.decode.NoDrafter())
    assert {o for chunk in alone.stream("x", max_new_tokens=5, seed=1) for o in chunk.origins} == {"plain"}


@pytest.mark.long
@pytest.mark.parametrize("tokens", ["16", "16000"])
def test_a_closed_terminal_ends_it_and_finished_texts_are_stored(models, tmp_path, tokens):
    """At the prompt, and within an answer."""
    options = ("--drafter", "suffix", "--suffix-store", tmp_path / "store", "--max-new-tokens", tokens)
    process = asked(models, signal.SIGHUP, signal.SIG_DFL, *options)  # the tests may run under nohup
    if tokens == "16":
        while b"the answer ended after" not in process.stderr.readline():
            pass
    else:
        process.stdout.read(8)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 129, err
    assert b"Traceback" not in err
    assert (len(read(str(tmp_path / "store"), 258)) > 16) == (tokens == "16")
