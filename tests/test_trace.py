"""The trace of a decoding: the same text, and a page that holds what happened at each step."""

import json
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

import foretoken
import tiny
import tokenizers_zoo as zoo
from foretoken.trace import record as recording
from foretoken.trace.page import labels_of
from thinning import one_in

CASES = [("chain:4", 0.8), ("kary:2x3", 0.8), ("kary:2x3", 0.0), ("dynamic:6", 0.8), ("budget:8", 0.8)]
PROMPTS = ["def f(x):", "</script><script>alert(1)</script>", "é"]


@pytest.fixture(scope="module")
def folders(demo):
    return {name: str(demo / name) for name in ("target", "drafter")}


def load(folders, drafter="drafter", **options):
    return foretoken.load(folders["target"], drafter=folders.get(drafter, drafter), device="cpu", **options)


def traced(engine, prompt, **settings):
    trace = foretoken.Trace(engine)
    return trace, engine.generate(prompt, observer=trace, **settings)


def record_of(file):
    html = file.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', html, re.S)
    return json.loads(found), html


@pytest.mark.parametrize(
    ("drafter", "tree", "temperature"),
    one_in(3, [*(("drafter", *case) for case in CASES), ("ngram", "kary:2x3", 0.0), (None, None, 0.8)]),
)
def test_a_traced_text_is_the_same_text(folders, drafter, tree, temperature):
    engine = load(folders, drafter, **({"tree": tree} if tree else {}))
    for prompt in (PROMPTS[0], PROMPTS):
        settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 7}
        plain, (trace, seen) = engine.generate(prompt, **settings), traced(engine, prompt, **settings)
        pairs = [(plain, seen)] if isinstance(prompt, str) else list(zip(plain, seen, strict=True))
        assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]
        for (result, _), text in zip(pairs, trace.texts, strict=True):
            assert text.num_accepted == result.stats.num_accepted
            assert text.num_drafted == result.stats.num_drafted
            assert text.num_steps == result.stats.num_target_forwards == len(text.steps)


def test_what_comes_behind_the_end_of_a_text_is_not_counted(folders):
    """Draft tokens that were accepted behind a token that ends the text."""
    engine = replace(load(folders, tree="chain:6"), eos_ids=frozenset(range(0, 256, 3)))
    cut = 0
    for seed in range(12):
        trace, result = traced(engine, PROMPTS[0], max_new_tokens=24, seed=seed)
        (text,) = trace.texts
        assert text.num_accepted == result.stats.num_accepted
        cut += sum(len(step.path) - 1 for step in text.steps) - text.num_accepted
    assert cut > 0


def test_p_and_q_are_those_of_the_models(folders):
    engine = load(folders, tree="kary:2x2", quantise_drafter="none")
    trace, _ = traced(engine, PROMPTS[0], max_new_tokens=20, temperature=0.8, top_k=40, seed=1)
    sampling = foretoken.Sampling(temperature=0.8, top_k=40)
    models = [tiny.LlamaForCausalLM.from_pretrained(folders[name]).eval() for name in ("target", "drafter")]
    (text,) = trace.texts
    drafted = 0
    for step in text.steps:
        ids = text.sequence.ids[: step.length]
        for node in range(1, len(step.tree)):
            before = [step.tree.tokens[i] for i in step.tree.path_to(step.tree.parents[node])[1:]]
            with torch.no_grad():
                rows = [sampling(m(torch.tensor([ids + before])).logits[0, -1:])[0] for m in models]
            p, q = (float(row[step.tree.tokens[node]]) for row in rows)
            assert step.p[node] == pytest.approx(p, abs=1e-4)
            assert step.q[node] == pytest.approx(q, abs=1e-4)
            drafted += 1
        assert step.p_token > 0  # it was drawn
        assert (step.p[0], step.q[0]) == (None, None)
    assert drafted > 10


def test_the_page_holds_every_step_and_no_markup_of_the_text(folders, tmp_path):
    engine = load(folders, tree="kary:2x3")
    trace, results = traced(engine, PROMPTS, max_new_tokens=30, temperature=0.9, top_p=0.95, seed=2)
    trace.save(tmp_path / "t.html")
    shown, html = record_of(tmp_path / "t.html")
    assert html.count("<script") == 2  # the record, and the page's own: none of the prompt's
    assert "alert(1)<" not in html
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|fetch\(", html)
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "default-src 'none'" in html
    assert shown["settings"]["tree"] == "kary:2x3"
    assert len(shown["texts"]) == 3
    for text, result, prompt in zip(shown["texts"], results, PROMPTS, strict=True):
        assert text["prompt"] == prompt
        assert text["sampling"] == {"temperature": 0.9, "top_p": 0.95}
        assert "".join(text["pieces"]) == result.text
        assert text["tokens"] == len(result.token_ids) == text["ends"][-1]
        assert text["steps"] == len(text["shown"]) == result.stats.num_target_forwards
        assert text["accepted"] == result.stats.num_accepted
        first = 0
        for step, end in zip(text["shown"], text["ends"], strict=True):
            path = [step["n"][i][1] for i in step["a"]]
            assert [*path, step["e"][1]][: end - first] == result.token_ids[first:end]
            assert all(step["n"][i][2] in [0, *step["a"]] for i in step["a"])
            assert all(0 <= node[3] <= 1 and 0 < node[4] <= 1 for node in step["n"][1:])
            assert step["e"][3] in ("corrected", "bonus", "plain")
            first = end


def test_prompt_lookup_has_no_q_and_greedy_p_is_certain(folders, tmp_path):
    engine = load(folders, "ngram", tree="chain:4")
    trace, _ = traced(engine, "abcabcabc", max_new_tokens=30, temperature=0.0)
    trace.save(tmp_path / "t.html")
    steps = record_of(tmp_path / "t.html")[0]["texts"][0]["shown"]
    drafted = [node for step in steps for node in step["n"][1:]]
    assert drafted
    assert {node[4] for node in drafted} == {None}
    assert {node[3] for node in drafted} <= {0.0, 1.0}
    for step in steps:
        assert all(step["n"][i][3] == 1.0 for i in step["a"])
        assert step["e"][2] == 1.0


def test_a_long_text_is_recorded_in_part_and_says_so(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_STEPS", 3)
    trace, result = traced(load(folders, tree="chain:2"), "x", max_new_tokens=30, seed=1)
    trace.save(tmp_path / "t.html")
    (text,) = record_of(tmp_path / "t.html")[0]["texts"]
    assert len(text["shown"]) == len(text["ends"]) == 3
    assert text["steps"] == result.stats.num_target_forwards > 3
    first = text["shown"][-1]
    assert text["ends"][-1] - text["ends"][-2] == len(first["a"]) + 1
    assert "".join(text["pieces"]) == result.text


def test_the_recorded_steps_of_a_text_are_the_first_ones(folders, monkeypatch):
    """A step that is too large is left out, and so are smaller ones behind it, whatever room there is."""
    engine, rooms = load(folders, "ngram", tree="chain:8"), range(9, 30, 3)
    for room in rooms:
        monkeypatch.setattr(recording, "MOST_NODES", room)
        trace, _ = traced(engine, "abcabcabc", max_new_tokens=40, temperature=0.0)
        (text,) = trace.texts
        assert 0 < len(text.steps) < text.num_steps
        ends = [step.length + len(step.path) for step in text.steps]
        assert [step.length for step in text.steps[1:]] == ends[:-1]


def test_the_command_writes_the_page(folders, tmp_path, run):
    models = ["--target", folders["target"], "--drafter", folders["drafter"], "--tree", "chain:3"]
    line, file = ["generate", "x", "--max-new-tokens", 12, "--seed", 1, *models], tmp_path / "t.html"
    _, without, _ = run(*line)
    code, out, _ = run(*line, "--trace", file)
    assert (code, out) == (0, without)
    (text,) = record_of(file)[0]["texts"]
    assert "x" + "".join(text["pieces"]) + "\n" == out
    run.refused("it is a folder", *line, "--trace", tmp_path)


def test_the_label_of_a_token_is_its_text_inside_a_text():
    for make, labels in (
        (zoo.wordpiece, {"the": " the", "##llo": "llo", "[SEP]": "[SEP]"}),
        (zoo.sentencepiece_bpe, {"▁the": " the", "▁▁": "  ", "he": "he", "<0xC3>": "\ufffd", "</s>": "</s>"}),
        (zoo.byte_level, {"Ġthe": " the", "Ã": "\ufffd", "Ã©": "é"}),
    ):
        tokenizer = make()
        label = labels_of(tokenizer)
        assert {token: label(tokenizer.convert_tokens_to_ids(token)) for token in labels} == labels
        assert label(len(tokenizer)) == str(len(tokenizer))


def test_a_vocabulary_with_gaps_has_labels_up_to_its_last_token():
    tokenizer = zoo.letters(["a", "b"])
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["vocab"]["b"] = 7
    label = labels_of(zoo.wrap(Tokenizer.from_str(json.dumps(spec))))
    assert [label(token) for token in (0, 1, 7, 8)] == ["a", "1", "b", "8"]
