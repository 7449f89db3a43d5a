"""The engine on tiny random models: the same text as plain decoding, alone or in a batch, streamed or not."""

import math
import os
import pickle
import random
from dataclasses import replace

import pytest
import torch

import foretoken
import tiny
from engines import check_batch, check_greedy, ids_of
from foretoken.core.errors import ContextError
from foretoken.decode import DraftFailedWarning, NoDrafter
from foretoken.models.text import TextStream
from foretoken.vocab.vocabulary import vocabulary
from thinning import one_in

PROMPTS = ["def f(x):", "import os\n", "a", "class A:\n    def __init__(self"]


@pytest.fixture(scope="module")
def folders(demo, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "target": str(demo / "target"),
        "drafter": str(demo / "drafter"),
        "padded": tiny.save(tiny.llama(2, vocab=272), root / "padded"),
    }


def load(folders, drafter="drafter", **options):
    return foretoken.load(folders["target"], drafter=folders.get(drafter, drafter), device="cpu", **options)


COMBINATIONS = [
    ("drafter", "chain:4", "rrsw"),
    ("drafter", "chain:4", "standard"),
    ("drafter", "chain:3", "exact-match"),
    ("drafter", "kary:2x3", "rrsw"),
    ("drafter", "kary:3x2", "rrs"),
    ("drafter", "kary:2x3", "exact-match"),
    ("drafter", "chain:4", "block"),
    ("drafter", "budget:8", "block-transport"),
    ("drafter", "delayed:1+3x2", "transport"),
    ("drafter", "dynamic:12", None),
    ("drafter", "opt-tree:5", None),
    ("ngram", "chain:4", "exact-match"),
    ("ngram", "kary:2x3", "exact-match"),
]


@pytest.mark.parametrize(("drafter", "tree", "verifier"), one_in(2, COMBINATIONS))
def test_greedy_text_is_the_plain_text(folders, drafter, tree, verifier):
    results = check_greedy(load(folders, drafter, tree=tree, verifier=verifier), PROMPTS, 40)
    assert drafter == "ngram" or sum(r.stats.num_accepted for r in results) > 0


def test_greedy_text_is_that_of_transformers(folders):
    engine = load(folders, tree="kary:2x3")
    model = tiny.LlamaForCausalLM.from_pretrained(folders["target"])
    for prompt in PROMPTS:
        ids = engine.tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert engine.generate(prompt, max_new_tokens=40, temperature=0.0).token_ids == expected.tolist()


SEEDED = [
    *({"tree": tree} for tree in ("chain:3", "chain:5@0.02", "kary:2x3")),
    *({"tree": "budget:6", "verifier": "transport"}, {"drafter": None}),
]


@pytest.mark.parametrize("options", one_in(2, SEEDED))
def test_the_text_depends_on_the_seed_alone_not_on_the_batch(folders, options):
    engine = load(folders, **options)
    together = check_batch(engine, PROMPTS * 2, 12)
    narrow = replace(engine, max_batch=2).generate(PROMPTS * 2, max_new_tokens=12, temperature=0.7, seed=5)
    assert ids_of(together) == ids_of(narrow)
    assert together[0].token_ids != together[4].token_ids  # the same prompt, another seed


def test_streamed_text_is_the_generated_text(folders):
    engine = load(folders, tree="kary:2x2")
    for seed in range(5):  # random bytes: many broken characters
        result = engine.generate("é", max_new_tokens=48, temperature=1.0, seed=seed)
        chunks = list(engine.stream("é", max_new_tokens=48, temperature=1.0, seed=seed))
        assert "".join(c.text for c in chunks) == result.text
        assert [t for c in chunks for t in c.token_ids] == result.token_ids
        assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].stats.num_tokens == len(result.token_ids)


def test_stop_string_ends_the_text_before_it(folders):
    engine = load(folders, tree="chain:4")
    full = engine.generate("def", max_new_tokens=60, temperature=0.9, seed=3)
    # Bytes of a random model are rarely whole characters, and a stop cannot be the sign that stands for a part of one.
    stop = next(full.text[i : i + 3] for i in range(20, len(full.text)) if "\ufffd" not in full.text[i : i + 3])
    cut = full.text.index(stop)
    result = engine.generate("def", max_new_tokens=60, temperature=0.9, seed=3, stop=stop)
    assert result.text == full.text[:cut]
    assert result.token_ids == full.token_ids[: len(result.token_ids)]
    assert stop in engine.tokenizer.decode(result.token_ids)
    assert stop not in engine.tokenizer.decode(result.token_ids[:-1])
    streamed = "".join(c.text for c in engine.stream("def", max_new_tokens=60, temperature=0.9, seed=3, stop=stop))
    assert streamed == result.text


def test_end_of_text_ends_the_sequence_and_others_go_on(folders):
    engine = load(folders, tree="kary:2x3")
    endless = engine.generate(PROMPTS, max_new_tokens=40, temperature=1.0, seed=1)
    ends = frozenset({endless[0].token_ids[10]})
    results = replace(engine, eos_ids=ends).generate(PROMPTS, max_new_tokens=40, temperature=1.0, seed=1)
    for full, result in zip(endless, results, strict=True):
        first = next((i for i, t in enumerate(full.token_ids) if t in ends), len(full.token_ids) - 1)
        assert result.token_ids == full.token_ids[: first + 1]
    assert len(results[0].token_ids) <= 11


def test_a_text_tells_why_it_ended(folders):
    engine = replace(load(folders, tree="chain:4"), eos_ids=frozenset())
    settings = {"max_new_tokens": 30, "temperature": 0.9, "seed": 3}
    full = engine.generate("def", **settings)
    assert full.finish_reason == "length"
    assert engine.generate("def", **settings, stop=full.text[10:12]).finish_reason == "stop"
    ending = replace(engine, eos_ids=frozenset({full.token_ids[7]}))
    assert ending.generate("def", **settings).finish_reason == "stop"
    last = replace(engine, eos_ids=frozenset({full.token_ids[-1]}))  # the end of the text, where the length ends too
    assert full.token_ids.index(full.token_ids[-1]) == 29
    assert last.generate("def", **settings).finish_reason == "stop"
    chunks = list(ending.stream("def", **settings))
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_several_prompts_may_be_none(folders):
    engine = load(folders)
    assert engine.generate([]) == []
    assert engine.generate([[1, 2], [3]], max_new_tokens=2)[1].token_ids


def test_max_new_tokens_is_exact_and_clipped_to_the_context(folders):
    engine = load(folders, tree="kary:2x3")
    for n in (1, 2, 3, 7):
        assert len(engine.generate("abc", max_new_tokens=n, seed=0).token_ids) == n
    clipped = replace(engine, eos_ids=frozenset()).generate([*range(1, 251)], max_new_tokens=500, seed=0)
    assert (len(clipped.token_ids), clipped.finish_reason) == (6, "length")


def test_sampling_options_reach_every_node(folders):
    """With a bias of -inf on every token but three, only those three can come out, drafted or not."""
    engine = replace(load(folders, tree="kary:2x3"), eos_ids=frozenset())
    bias = {t: -math.inf for t in range(257) if t not in (70, 71, 72)}
    result = engine.generate("x", max_new_tokens=40, logit_bias=bias, seed=0)
    assert set(result.token_ids) == {70, 71, 72}
    once = engine.generate("x", max_new_tokens=40, temperature=0.0, presence_penalty=1e6, seed=0)
    assert len(set(once.token_ids)) == 40  # every token is new


class Failing(NoDrafter):
    def __init__(self, inner, after):
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "after", after)

    def open(self, batch, slots):
        session, calls = self.inner.open(batch, slots), []
        propose = session.propose

        def failing(sequences):
            calls.append(1)
            if len(calls) > self.after:
                raise RuntimeError("out of luck")
            return propose(sequences)

        session.propose = failing
        return session


def test_a_drafter_that_raises_costs_speed_and_one_warning_never_text(folders):
    engine = load(folders, tree="kary:2x2")
    expected = engine.generate(PROMPTS, max_new_tokens=30, temperature=0.0)
    failing = replace(engine, drafter=Failing(engine.drafter, 3))
    with pytest.warns(DraftFailedWarning, match="out of luck") as caught:
        results = failing.generate(PROMPTS, max_new_tokens=30, temperature=0.0)
    assert ids_of(results) == ids_of(expected)
    assert len(caught) == 1


def test_a_drafter_with_nan_logits_fails_like_any_other(folders):
    drafter = tiny.llama(9)
    engine = foretoken.load(folders["target"], drafter=drafter, device="cpu")
    with torch.no_grad():
        drafter.lm_head.weight.fill_(math.nan)
    with pytest.warns(DraftFailedWarning, match="NaN"):
        result = engine.generate("ab", max_new_tokens=10, temperature=1.0, seed=0)
    assert len(result.token_ids) == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_of_the_target_name_the_model(folders, temperature):
    target = tiny.llama(9)
    target.config._name_or_path = "broken-model"
    engine = foretoken.load(target, drafter=folders["drafter"], device="cpu")
    with torch.no_grad():
        target.lm_head.weight.fill_(math.nan)
    with pytest.raises(foretoken.ForetokenError, match="broken-model"):
        foretoken.load(target, device="cpu")
    with pytest.raises(foretoken.ForetokenError, match="broken-model"):
        engine.generate([1, 2, 3], max_new_tokens=4, temperature=temperature)


def test_any_parent_list_is_a_tree(folders, tmp_path):
    (tmp_path / "shape.json").write_text("[-1, 0, 0, 1, 1, 3, 2]")
    check_greedy(load(folders, tree=f"list:{tmp_path}/shape.json"), PROMPTS)
    for text, says in (
        ("[0, 0]", "must start with -1"),
        ("[-1, 2, 0]", "node 1 has parent 2"),
        ("{}", "a list of integers"),
        ("[-1, 0.5]", "a list of integers"),
        ("nonsense", "is not JSON"),
    ):
        (tmp_path / "shape.json").write_text(text)
        with pytest.raises(foretoken.ForetokenError, match=says):
            load(folders, tree=f"list:{tmp_path}/shape.json")
    for tree in ("list:", "sequoia:8@"):
        with pytest.raises(foretoken.ForetokenError, match=r"^Cannot read .* file .*: File name too long"):
            load(folders, tree=tree + "a" * 300)
    os.mkfifo(tmp_path / "pipe")
    for tree in (f"list:{tmp_path}/pipe", f"sequoia:4@{tmp_path}/pipe"):
        with pytest.raises(foretoken.ForetokenError, match="pipe is a pipe, which can be read only once"):
            load(folders, tree=tree)


def test_padded_heads_of_one_tokenizer_draft_for_each_other(folders):
    """Target with more columns than the drafter, and the other way round."""
    for target, drafter in (("padded", "target"), ("target", "padded")):
        engine = foretoken.load(folders[target], drafter=folders[drafter], tree="kary:2x3", device="cpu")
        check_greedy(engine, PROMPTS)
        assert engine.generate("abc", max_new_tokens=30, temperature=1.0, seed=0).token_ids


def test_text_stream_holds_back_half_characters_and_half_stops():
    tok = tiny.tokenizer()
    stream = TextStream(tok, ("END",))
    ids = tok("aé EN END b")["input_ids"]
    pieces = [stream.push([i]) for i in ids]
    assert "".join(pieces) == "aé EN "
    assert pieces[:3] == ["a", "", "é"]  # the first byte of é waits for the second
    assert stream.stopped
    other = TextStream(tok, ("END",))
    assert other.push(tok("x EN")["input_ids"]) + other.finish() == "x EN"
    first, second = tok("é")["input_ids"]
    assert TextStream(tok, (), [first]).push([second]) == "é", "a character begun in the prompt"


def streamed(prompt: bytes, pieces: list[bytes]) -> str:
    tok = tiny.tokenizer()
    of_byte = {byte: i for i, byte in enumerate(vocabulary(tok).tokens) if byte is not None}
    stream = TextStream(tok, (), [of_byte[bytes([b])] for b in prompt])
    text = "".join(stream.push([of_byte[bytes([b])] for b in piece]) for piece in pieces) + stream.finish()
    assert stream.finish() == ""
    return text


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ("a\ufffd".encode(), b"bc", "bc"),  # a sign that is the prompt's own
        (b"a\xc3", b"bc", "bc"),  # half a character that is never completed
        (b"a\xc3", b"\xa9bc", "ébc"),
        (b"a\xc3", b"\xa9\xc3", "é\ufffd"),
        (b"\xf0\x9f", b"\x98\x80!", "\U0001f600!"),
        (b"\x80", "\ufffd?".encode(), "\ufffd?"),
        # The last ids of these prompts that are looked at begin with a whole character.
        *(
            (prompt.encode(), "鬱鬱 b".encode(), "鬱鬱 b")
            for prompt in ("a鬱鬱鬱", "鬱" * 9, "\U0001f600" * 5, "é" * 7)
        ),
    ],
)
def test_text_behind_a_prompt_of_bytes(prompt, output, text):
    assert streamed(prompt, [output]) == text
    assert streamed(prompt, [output[i : i + 1] for i in range(len(output))]) == text


def test_a_prompt_that_is_too_long_says_so_in_another_process_too(folders):
    with pytest.raises(ContextError) as refused:
        load(folders).generate([1] * 256)
    sent = pickle.loads(pickle.dumps(refused.value))
    assert (str(sent), sent.num_tokens) == (str(refused.value), 256)


def test_text_is_the_same_byte_by_byte_and_all_at_once():
    rng = random.Random(0)
    for _ in range(300):
        prompt, output = (
            bytes(rng.choice(b"ab\xc3\xa9\xf0\x9f\x98\x80\xef\xbf\xbd") for _ in range(6)) for _ in range(2)
        )
        text = streamed(prompt, [output])
        assert streamed(prompt, [output[i : i + 1] for i in range(6)]) == text
        assert (prompt + output).decode(errors="replace").endswith(text)


def test_a_pair_that_is_changed_later_is_checked_again(folders):
    with pytest.raises(foretoken.ForetokenError, match="rrs is not lossless"):
        replace(load(folders, tree="kary:2x2"), verifier=foretoken.verifier("rrs"))


def test_ids_may_be_tensors(folders):
    engine = load(folders)
    want = engine.generate([5, 6, 7], max_new_tokens=5, seed=0).token_ids
    assert engine.generate(torch.tensor([5, 6, 7]), max_new_tokens=5, seed=0).token_ids == want
    assert engine.generate([torch.tensor([5, 6, 7])], max_new_tokens=5, seed=0)[0].token_ids == want


def test_a_bias_that_leaves_nothing_blames_the_bias(folders):
    engine = load(folders)
    with (
        pytest.raises(foretoken.ForetokenError, match="logit bias or a logits processor"),
        pytest.warns(DraftFailedWarning),
    ):
        engine.generate("x", logit_bias=dict.fromkeys(range(257), -math.inf))
    with pytest.raises(foretoken.ForetokenError, match="logit_bias"):
        engine.generate("x", logit_bias={5: math.inf})


@pytest.mark.parametrize("prompt", ["\xff", [{"role": "user", "content": "\xff"}]])
def test_a_tokenizer_with_more_tokens_than_the_model_is_told(prompt):
    """As where tokens were added to a tokenizer, and the model was not resized."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine = foretoken.load(tiny.llama(0, vocab=100), tokenizer=tokenizer)
    with pytest.raises(foretoken.ForetokenError, match="ids go from 0 to 99 in the model, which has fewer tokens than"):
        engine.generate([prompt])
    assert engine.generate("a", max_new_tokens=2).token_ids
