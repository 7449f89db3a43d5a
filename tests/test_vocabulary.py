"""Bytes of tokens in every family, and the map between two vocabularies."""

from functools import cache

import pytest
from tokenizers import AddedToken, decoders

import tokenizers_zoo as zoo
from foretoken.core.errors import ForetokenError
from foretoken.vocab.overlap import compare, injective
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import utf8_pieces, vocabulary


@pytest.mark.parametrize("family", zoo.BYTE_COMPLETE)
def test_any_bytes_are_spelled_and_encoded_back(family):
    vocab = vocabulary(zoo.BYTE_COMPLETE[family]())
    for text in zoo.TEXTS:
        data = text.encode()
        for start in range(len(data) + 1):  # also from inside a character
            ids = vocab.encode(data[start:])
            assert vocab.spell(ids) == data[start:]
            assert not set(ids) & set(vocab.special.values())
            assert vocab.spell(vocab.longest_match(data[start:])) == data[start:]
    every = bytes(range(256))
    assert vocab.spell(vocab.encode(every)) == every


@pytest.mark.parametrize("family", zoo.BYTE_COMPLETE)
def test_the_bytes_are_those_that_the_tokenizer_decodes_to(family):
    tokenizer = zoo.BYTE_COMPLETE[family]()
    vocab = vocabulary(tokenizer)
    for text in zoo.TEXTS[:4]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert vocab.spell(ids).decode() in (text, " " + text)  # some put a space before every text


@pytest.mark.parametrize("family", ["byte-level", "shuffled", "sentencepiece", "unigram"])
def test_the_tokenizers_own_ids_come_first(family):
    tokenizer = zoo.BYTE_COMPLETE[family]()
    vocab = vocabulary(tokenizer)
    for text in ("the hello", "hello ther"):
        want = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer("a", add_special_tokens=False)["input_ids"] == vocab.encode(b"a"):  # no space before a text
            assert vocab.encode(text.encode()) == want
        else:
            assert vocab.encode(b" " + text.encode())[-3:] == want[-3:]
    assert vocab.encode(b"hello") == vocab.encode(b"ahello")[len(vocab.encode(b"a")) :]  # no space inside a text


def test_a_model_that_embeds_fewer_tokens_than_its_tokenizer_knows():
    """Added tokens, and an end of text among them: they are spelled with what the model has."""
    tokenizer = zoo.byte_only()
    width = len(tokenizer)
    tokenizer.add_tokens(["hello"])
    tokenizer.add_special_tokens({"eos_token": "<|late|>"})
    whole = vocabulary(tokenizer)
    cut = whole.within(width)
    assert width in whole.encode(b"a hello")
    assert cut.spell(cut.encode(b"a hello")) == b"a hello"
    assert max(cut.encode(b"a hello")) < width
    assert whole.eos == width + 1
    assert cut.eos is None
    assert max(cut.special.values(), default=0) < width
    assert whole.within(len(tokenizer)).tokens == whole.tokens


def test_known_tokens():
    llama = vocabulary(zoo.sentencepiece_bpe())
    assert llama.prefix == (1,)
    assert llama.tokens[:3] == (None, None, None)
    assert llama.tokens[llama.ids[b" the"]] == b" the"
    assert llama.ids[b"a"] not in llama.fallback  # <0x61> spells it too, but is not how an encoder spells it
    assert llama.spell([llama.ids[b"a"], 3 + 0xC3, 3 + 0xA9]) == "aé".encode()
    bert = vocabulary(zoo.wordpiece())
    assert bert.prefix == (2,)
    assert bert.spell(bert.encode(b" the hello")) == b" the hello"
    assert bert.spell(bert.encode(b"ing")) == b"ing"
    assert bert.spell(bert.encode("a\nb☃".encode())) == b"ab"  # what has no token is left out
    assert vocabulary(zoo.byt5()).ids[b"a"] == 3 + ord("a")


def test_duplicate_bytes_and_added_tokens():
    tokenizer = zoo.byte_level()
    tokenizer.add_tokens(["\n\n\n", "日本"])
    vocab = vocabulary(tokenizer)
    assert vocab.spell(tokenizer("日本\n\n\n")["input_ids"]) == "日本\n\n\n".encode()
    assert vocab.ids["日本".encode()] == tokenizer.convert_tokens_to_ids("日本")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", [*zoo.FAMILIES, "wordpiece that takes spaces away"])
def test_every_token_spells_what_the_decoder_makes_of_it_inside_a_text(family):
    """Added tokens too: decoders read them as all others, whatever they look like in the vocabulary."""
    tokenizer = zoo.FAMILIES[family.split()[0]]()
    if family not in zoo.FAMILIES:
        tokenizer.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_tokens(["é", "▁▁▁", "Ġx", "wordy", AddedToken("<plain>", normalized=False), "日本", "\n\n"])
    tokens, special = vocabulary(tokenizer).tokens, set(tokenizer.all_special_ids)
    for i in set(tokenizer.get_vocab().values()) - special:
        once, twice = (tokenizer.decode([i] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
        spelled = tokens[i] or b""
        assert spelled.decode(errors="ignore" if family == "byt5" else "replace") == twice[len(once) :]


def test_a_caller_may_have_the_same_tokenizer_truncate():
    """The ids are those of before, which are not the longest matches here, and the caller's settings stay."""
    tokenizer, data = zoo.BYTE_COMPLETE["byte-level"](), zoo.TEXTS[1].encode()
    vocab, backend = vocabulary(tokenizer), tokenizer.backend_tokenizer
    want = vocab.encode(data)
    assert want != vocab.longest_match(data)
    backend.enable_truncation(2)
    assert vocab.encode(data) == want
    assert backend.truncation["max_length"] == 2
    backend.no_truncation()
    backend.enable_padding(length=99)
    assert vocab.encode(data) == want


def test_a_caller_may_add_tokens_to_the_same_tokenizer():
    """Here one that a text has and that takes up spaces before it, and one that pads."""
    tokenizer, data = zoo.BYTE_COMPLETE["byte-level"](), b"the  Zebra hello"
    vocab, backend = vocabulary(tokenizer), tokenizer.backend_tokenizer
    tokenizer.add_tokens([AddedToken("the", lstrip=True), AddedToken("Zebra", lstrip=True)])
    assert vocab.spell(vocab.encode(data)) == data
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    backend.enable_padding(length=99, pad_id=tokenizer.pad_token_id)
    assert vocab.spell(vocab.encode(b"hello")) == b"hello"


def test_a_tokenizer_without_bytes_is_named_with_the_families_that_work():
    with pytest.raises(ForetokenError, match=r"my-words.*byte-level BPE.*WordPiece"):
        vocabulary(zoo.word_level(), "my-words")


def test_pieces_of_broken_text():
    assert list(utf8_pieces("aé".encode() + b"\xc3" + b"b")) == ["aé", b"\xc3", "b"]
    assert list(utf8_pieces("é".encode()[1:])) == [b"\xa9"]
    assert list(utf8_pieces(b"")) == []


known = cache(lambda family: vocabulary(zoo.FAMILIES[family]()))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("source", zoo.FAMILIES)
@pytest.mark.parametrize("dest", zoo.FAMILIES)
def test_the_intersection_is_by_bytes_and_one_to_one(source, dest):
    s, d = known(source), known(dest)
    translation = Translation(s, d)
    pairs = translation.pairs
    assert len(set(pairs.values())) == len(pairs)
    ends = (s.eos, d.eos)
    for i, j in pairs.items():
        assert (i, j) == ends or s.tokens[i] == d.tokens[j]
        assert (i in s.special.values()) == (j in d.special.values())
    common = {t for t in s.tokens if t} & {t for t in d.tokens if t}
    assert len(pairs) == len(common) + len({*translation.special.values()})
    for i in range(len(s.tokens)):
        spelled = translation.token(i)
        assert spelled
        if dest != "wordpiece" and s.tokens[i]:
            assert d.spell(spelled) == s.tokens[i]


def test_special_tokens_map_by_role_and_name_and_never_by_accident():
    source, dest = zoo.sentencepiece_bpe(), zoo.byte_level()
    source.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|both|>"]})
    dest.add_special_tokens({"additional_special_tokens": ["<|both|>"]})
    dest.add_tokens(["<|user|>"])  # the same name, and only text
    s, d = vocabulary(source), vocabulary(dest)
    translation = Translation(s, d)
    user, both = (source.convert_tokens_to_ids(t) for t in ("<|user|>", "<|both|>"))
    assert translation.token(s.eos) == (d.eos,)
    assert translation.token(both) == (dest.convert_tokens_to_ids("<|both|>"),)
    assert d.spell(translation.token(user)) == b"\n"  # a turn's marker becomes a line break
    text = [user, *s.encode(b"hello"), both, *s.encode(b"the")]
    assert d.spell(translation.text(text)) == b"\nhellothe"
    assert both not in translation.text(text)
    assert dest.convert_tokens_to_ids("<|both|>") in translation.text(text)


def test_the_drafters_begin_of_text_comes_once_and_first():
    byte, llama = vocabulary(zoo.byte_level()), vocabulary(zoo.sentencepiece_bpe())
    into = Translation(byte, llama)
    assert into.opening(byte.ids[b"a"]) == (1, llama.ids[b"a"])
    assert 1 not in into.text(byte.encode(b"hello the"))
    back = Translation(llama, byte)
    assert byte.spell(back.opening(1)) == b"\n"
    same = Translation(llama, vocabulary(zoo.sentencepiece_bpe()))
    assert same.opening(1) == (1,)


def test_compare():
    same = compare(zoo.byte_level(), zoo.byte_level())
    assert (same.method, same.of_target) == ("same", 1.0)
    contained = compare(zoo.byte_only(), zoo.byte_level(), "the hello\n" * 40)
    assert contained.method == "tli"
    assert contained.of_target == contained.in_text == contained.in_text_types == 1.0
    apart = compare(zoo.byte_level(), zoo.byte_only(), " the hello" * 40)
    assert apart.method == "slem"
    assert apart.in_text == pytest.approx(1 / 3, abs=0.01)  # of " the", " ", "hello" one is common
    assert apart.num_common == 257
    assert apart.target_injective == apart.drafter_injective == 1.0
    assert "slem" in apart.text()
    with pytest.raises(ForetokenError, match="empty"):
        compare(zoo.byte_level(), zoo.byte_only(), " \n")


def test_injectivity_sees_lower_case_and_lost_spaces():
    text = "Hello  world " * 30
    assert injective(zoo.byte_level(), text) == 1.0
    assert injective(zoo.wordpiece(), text) == 0.0
