"""Text of ids while they come: the same however they are cut, and that of the tokenizer's own decoder."""

import random

import pytest

import tokenizers_zoo as zoo
from foretoken.models.text import BROKEN, REPLACEMENT, TextStream
from foretoken.vocab.vocabulary import vocabulary
from watching import calls_of

FAMILIES = {**zoo.FAMILIES, "words": zoo.word_level}


def pieces(tokenizer, prompt, ids, size):
    stream = TextStream(tokenizer, (), prompt)
    return [*(stream.push(ids[at : at + size]) for at in range(0, len(ids), size)), stream.finish()]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_decoders_however_the_ids_are_cut(family):
    """Special tokens, tokens without text and broken characters are among them."""
    tokenizer, draw = FAMILIES[family](), random.Random(0)
    every = sorted(tokenizer.get_vocab().values())
    special = sorted(set(tokenizer.all_special_ids)) or every
    prompts = [tokenizer("the hello")["input_ids"], [*tokenizer("a the")["input_ids"], *special[:1] * 20]]
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in zoo.TEXTS]
    mixed = [[draw.choice([*draw.choices(every, k=3), special[0]]) for _ in range(30)] for _ in range(40)]
    for prompt in prompts:
        for ids in [*texts, *mixed]:
            (text,) = {"".join(pieces(tokenizer, prompt, ids, size)) for size in (1, 2, 5, 100)}
            whole = decoded(tokenizer, prompt) + text
            assert whole == decoded(tokenizer, [*prompt, *ids]) or REPLACEMENT in whole


def test_a_special_token_in_the_middle_takes_no_space_away():
    tokenizer = zoo.sentencepiece_bpe()
    the, hello, unknown = (tokenizer.convert_tokens_to_ids(token) for token in ("▁the", "hello", "<unk>"))
    assert pieces(tokenizer, [1, the], [hello, unknown, unknown, the], 1) == ["hello", "", "", " the", ""]
    assert pieces(tokenizer, [1, the, *[unknown] * 40], [the], 1) == [" the", ""]


@pytest.mark.parametrize("size", [1, 100])
def test_what_was_a_character_stays_one_before_broken_bytes(size):
    """The decoder makes signs of all bytes in a row where one is broken."""
    tokenizer = zoo.sentencepiece_bpe()
    of = vocabulary(tokenizer).ids
    ids = [of[b"a"], *(of[bytes([byte])] for byte in "ö日".encode()), of[b"\xff"], of[b" the"]]
    assert "".join(pieces(tokenizer, [1, of[b"x"]], ids, size)) == "aö日\ufffd the"


def test_characters_that_lie_across_tokens_come_out_as_they_become_whole():
    tokenizer = zoo.byte_level([("©", "Ã")])
    of = vocabulary(tokenizer).ids
    ids = [of[b"\xc3"], *[of[b"\xa9\xc3"]] * 3, of[b"\xa9"]]
    assert pieces(tokenizer, [of[b"a"]], ids, 1) == ["", "é", "é", "é", "é", ""]


@pytest.mark.parametrize("family", ["bytes", "sentencepiece", "unigram"])
def test_broken_bytes_without_an_end_come_out_and_cost_the_same_each(family, monkeypatch):
    tokenizer, number = zoo.BYTE_COMPLETE[family](), 400
    broken, a = (vocabulary(tokenizer).ids[byte] for byte in (b"\xff", b"a"))
    read = calls_of(monkeypatch, tokenizer, "decode")
    got = pieces(tokenizer, [a], [broken] * number, 1)
    assert "".join(got) == REPLACEMENT * number
    assert sum(map(len, got[: number // 2])) > number // 2 - 2 * BROKEN
    assert max(len(ids) for (ids,) in read) <= 4 * BROKEN


def test_tokens_without_text_cost_the_same_each(monkeypatch):
    tokenizer = zoo.sentencepiece_bpe()
    the, unknown = (tokenizer.convert_tokens_to_ids(token) for token in ("▁the", "<unk>"))
    read = calls_of(monkeypatch, tokenizer, "decode")
    assert "".join(pieces(tokenizer, [the], [unknown] * 400 + [the], 1)) == " the"
    assert max(len(ids) for (ids,) in read) <= 4 * BROKEN
