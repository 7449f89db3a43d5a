"""Every family of tokenizers as target and as drafter, in the engine, by every method; and `foretoken vocab`."""

import copy

import pytest
import torch

import foretoken
import tiny
import tokenizers_zoo as zoo
from engines import check_batch, check_greedy
from thinning import one_in

PAIRS = [
    *(("byte-level", "wordpiece"), ("sentencepiece", "byt5"), ("wordpiece", "unigram"), ("unigram", "shuffled")),
    ("bytes", "byte-level"),  # the drafter's vocabulary contains the target's
]
PROMPTS = ["the hello, é", "日本 \n\n x", [0], [5], list(range(14))]  # special tokens and broken characters among them


def model(seed, tokenizer):
    return tiny.llama(seed, vocab=max(tokenizer.get_vocab().values()) + 4)  # a padded head


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("source", "dest"), one_in(2, PAIRS))
def test_every_method_writes_the_plain_text_at_temperature_0(source, dest):
    tokenizer, other = zoo.FAMILIES[source](), zoo.FAMILIES[dest]()
    target, drafter = model(0, tokenizer), model(1, other)
    options = {"tokenizer": tokenizer, "device": "cpu", "compile": "off"}
    for vocab, tree in (("tli", "kary:2x2"), ("slem", "kary:2x2"), ("slrs", "chain:2"), ("union", "chain:2")):
        engine = foretoken.load(target, drafter=drafter, drafter_tokenizer=other, vocab=vocab, tree=tree, **options)
        results = check_greedy(engine, PROMPTS, 6)
        sampled = engine.generate(PROMPTS, max_new_tokens=6, temperature=1.0, seed=1)
        assert sum(r.stats.num_drafted for r in (*results, *sampled)) > 0, vocab


# Many bytes a character, runs of spaces, special tokens, and an id that ends inside a character.
AWKWARD = ["the hello", "  two\n\n \t lines   ", "é 日本 🙂🙂 \u200d x =", "<|end|>", [0], [1], [5, 200]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("vocab", "drafter", "options"),
    one_in(
        2,
        [
            ("tli", "bytes", {"tree": "kary:2x2"}),
            ("tli", "bytes", {"tree": "chain:3"}),
            ("slem", "bytes", {"tree": "kary:2x3", "law": "iid"}),
            ("slem", "bytes", {"tree": "kary:2x3"}),
            *(("slrs", drafter, {"tree": "chain:3"}) for drafter in zoo.DRAFTERS),
        ],
    ),
)
def test_text_is_the_plain_text_alone_and_in_a_batch(vocab, drafter, options):
    target, other = model(0, zoo.byte_level()), zoo.DRAFTERS[drafter]()
    small = model(1, other)
    before = copy.deepcopy(small.state_dict())
    both = {"tokenizer": zoo.byte_level(), "drafter_tokenizer": other, "device": "cpu"}
    engine = foretoken.load(target, drafter=small, vocab=vocab, **both, **options)
    check_greedy(engine, AWKWARD, 10)
    check_batch(engine, AWKWARD, 10, 0.8)
    assert all(torch.equal(before[name], now) for name, now in small.state_dict().items())  # never modified


@pytest.fixture
def folders(tmp_path):
    for name, make in (("target", zoo.byte_level), ("drafter", zoo.sentencepiece_bpe)):
        tokenizer = make()
        tiny.save(model(0, tokenizer), tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text("the hello, and the hello again")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\xff")
    return tmp_path


def test_the_command_compares_two_vocabularies(folders, cli):
    both = ("vocab", folders / "target", folders / "drafter")
    found = cli.json(*both)
    assert found["method"] in ("tli", "slem")
    code, out, err = cli(*both, "--text", folders / "text.txt")
    assert code == 0, err
    for word in ("tokens", "common", found["method"]):
        assert word in out
    for text in ("nowhere.txt", "broken.txt"):
        cli.refused(text, *both, "--text", folders / text)
