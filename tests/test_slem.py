"""SLEM: strings as drafts. Whatever is drafted, the text is the target's; and what is drafted is the drafter's text."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import foretoken
import tiny
import tiny_tables as tables
import tokenizers_zoo as zoo
from benchmarks.overlap import longest_overlap
from foretoken.cli.options import demo_folder
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import opaque_tree
from foretoken.decode import Decoder
from foretoken.models.causal_lm import CausalLM
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.overlap import compare
from foretoken.vocab.slem import Inner, Row, SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.strings import Followed, continuation, incomplete
from foretoken.vocab.translation import FIRM, Translation
from foretoken.vocab.vocabulary import vocabulary

CASES = [
    (IID, static.chain(2), tables.DRAFTER),
    (WithoutReplacement, static.kary(2, 1), tables.DRAFTER),
    (Opaque, static.kary(2, 2), tables.DRAFTER),
    (Opaque, static.chain(3), tables.CONTAINED),
    (IID, static.chain(1), tables.WIDER),
    (Opaque, static.kary(2, 2), tables.APART),  # nothing it writes can be said in the target's vocabulary
    *((Opaque, static.kary(2, 2), tables.DRAFTER, longest_overlap, heals) for heals in (True, False)),
]


@pytest.mark.parametrize("case", CASES)
def test_decoding_with_two_tokenizers_is_the_targets_own(case):
    law, policy, drafter, *settings = case
    lm, small = tables.lms(drafter)
    drafting = SLEMDrafter(small, tables.translation(drafter), policy, law, lm.vocab_size, *settings)
    assert tables.deviates(lm, drafting, VERIFIERS["exact-match"]) < 1e-12


T, D = vocabulary(zoo.byte_level()), vocabulary(zoo.byte_level([("h", "e"), ("he", "l"), ("Ċ", "Ġ"), ("ĊĠ", "Ġ")]))
TEXT = " the hello\n\n  théllo 日本🙂\n   x  hello ther"


@pytest.mark.parametrize("dest", [D, vocabulary(zoo.byte_only()), vocabulary(zoo.unigram())])
@pytest.mark.parametrize("source", [T, vocabulary(zoo.sentencepiece_bpe())])
def test_the_drafters_context_is_the_text_token_by_token(source, dest):
    """Also where a target token ends inside a character, and where the drafter's tokens reach over the edge."""
    ids = source.longest_match(TEXT.encode())
    context = Followed(Translation(source, dest), heals=False)
    for n in range(1, len(ids) + 1):
        got = context.follow(ids[:n])
        assert dest.spell(got) == source.spell(ids[:n])
        if not incomplete(source.spell(ids[:n])):
            assert got == dest.encode(source.spell(ids[:n]))  # as if the whole text were encoded anew


def test_begin_of_text_comes_once_and_special_tokens_part_the_text():
    source, dest = zoo.byte_level(), vocabulary(zoo.sentencepiece_bpe())
    t = vocabulary(source)
    context = Followed(Translation(t, dest), heals=False)
    ids = [*t.encode(b"a the"), t.eos, *t.encode(b"hello")]
    for n in range(1, len(ids) + 1):
        got = context.follow(ids[:n])
        assert got.count(1) == 1
        assert got[0] == 1
    assert got == [1, *dest.encode(b"a the"), dest.eos, *dest.encode(b"hello")]


def spelled(align, before: str, more: bytes) -> list[bytes]:
    """The target's tokens of what is drafted after a text."""
    return [T.tokens[i] for i in align(T, T.encode(before.encode()), more)]


def test_a_draft_goes_on_where_the_target_stands():
    drafted = partial(spelled, continuation)
    assert drafted("a", b" the hello") == [b" the", b" ", b"hello"]
    assert drafted("he", b"llo") == [b"llo"]  # "hello" would reach over the edge
    assert drafted("a ", b"the") == [b"t", b"he"]  # as would " the"
    assert drafted("a", "é".encode()) == ["é".encode()]
    assert drafted("a", "aé".encode()[:2]) == [b"a"]  # half a character is cut
    half = [*T.encode(b"a"), T.ids[b"\xc3"]]  # the target itself stands inside a character
    assert [T.tokens[i] for i in continuation(T, half, b"\xa9 the")] == [b"\xa9", b" the"]
    assert drafted("a", b"<|end|>")[0] == b"<"  # never the special token
    assert continuation(T, [T.eos], b"hello") == T.encode(b"hello")


@pytest.mark.parametrize(
    ("before", "target_tokens", "sure"),
    [
        ("a", [b"hello", b" "], [0.2, 0.1]),
        ("a", [b"he", b"llo"], [0.9, 0.2]),
        ("a he", [b"l", b"l", b"o"], [0.9, 0.5, 0.2]),  # the drafter writes "he" again
    ],
)
def test_the_drafter_is_as_sure_of_a_target_token_as_of_its_own_that_ends_it(before, target_tokens, sure):
    translation = Translation(T, D)
    row = Row(translation, True)
    row.follow(T.encode(before.encode()))
    written = [D.ids[spelled] for spelled in (b"hel", b"l", b"o", b" ")]
    drafted = replace(opaque_tree([0, *written], range(-1, 4)), sure=(1.0, 0.9, 0.5, 0.2, 0.1))
    drafter = SLEMDrafter(CausalLM(tiny.llama(0)), translation, static.chain(4), Opaque, 257)
    found = drafter.open(1, 9)._sure(row, drafted, [T.ids[spelled] for spelled in target_tokens])
    assert found == (1.0, *sure)


@pytest.mark.parametrize("drafter", [partial(SLEMDrafter, law=Opaque), SLRSDrafter])
def test_a_drafter_of_strings_must_know_the_targets_ids(drafter):
    """Without their number one would draft nothing, the other ids that the target lacks."""
    with pytest.raises(TypeError, match="vocab_size"):
        drafter(CausalLM(tiny.llama(0)), Translation(T, D), static.chain(4))


def test_the_longest_overlap_goes_on_behind_what_is_unchanged():
    drafted = partial(spelled, longest_overlap)
    assert drafted("a", b" the hello") == [b" the", b" ", b"hello"]  # nothing before the edge is split otherwise
    assert drafted("a ", b"the") == [b" the"]  # the text's last token is gone: its space is drafted once more
    assert drafted("he", b"llo") == [b"llo"]  # nothing overlaps: encoded alone
    assert drafted("a", "aé".encode()[:2]) == [b"a"]
    assert longest_overlap(T, [T.eos], b"hello") == T.encode(b"hello")


def test_the_drafters_last_token_may_grow():
    text, newline = Followed(Translation(T, D), heals=True), T.ids[b"\n"]
    sequence = Inner([0], Sampling(), seeded(0), 1, text=text)
    assert text.follow([*T.encode(b"hel"), newline]) == D.encode(b"hel\n")[:-1]
    assert text.edge.taken == b"\n"
    scores = sequence.scores(torch.zeros(1, 300), [[]])
    left = {D.tokens[i] for i in torch.nonzero(scores[0] == 0)[:, 0].tolist()}
    assert left == {b"\n", b"\n ", b"\n  "}
    assert torch.equal(sequence.scores(torch.zeros(1, 300), [[1]]), torch.zeros(1, 300))  # a draft's second token
    text._settled = 2  # a settled one may not
    assert text.follow([*T.encode(b"hel"), newline]) == D.encode(b"hel\n")
    assert torch.equal(sequence.scores(torch.zeros(1, 300), [[]]), torch.zeros(1, 300))
    firm = Followed(Translation(T, D), heals=False)
    assert firm.follow([*T.encode(b"hel"), newline]) == D.encode(b"hel\n")
    assert not firm.edge.taken
    assert Followed(Translation(T, D), heals=True).follow([T.ids[b"he"]]) == [D.ids[b"he"]]
    bytes_ = vocabulary(zoo.byte_only())
    assert Followed(Translation(T, bytes_), heals=True).follow(T.encode(b"ab")) == bytes_.encode(b"ab")


def test_it_does_not_grow_into_what_the_target_would_have_written_in_one():
    """The target has "he" and stands after "h", so that "he" and "hel" do not come; after "he" its own "l" may."""
    translation = Translation(T, D)
    assert translation.edge(T.ids[b"h"], D.ids[b"h"]) == FIRM
    grown = translation.edge(T.ids[b"he"], D.ids[b"he"])
    assert (grown.taken, grown.firsts) == (b"he", {D.ids[b"he"], D.ids[b"hel"]})
    assert translation.edge(T.eos, D.ids[b"he"]) == FIRM  # a special token's edge
    over = translation.edge(T.ids[b"e"], D.ids[b"he"])  # the target wrote "h" and "e", the drafter reads "he"
    assert over.firsts == grown.firsts


load = partial(zoo.load_bytes, vocab="slem", tree="kary:2x3")


@pytest.mark.parametrize("merges", [[], zoo.MERGES[:5]])
def test_the_drafters_cache_holds_its_context_at_every_step(merges):
    """Its scores after many steps are those of a fresh read of the same ids."""
    drafter = zoo.byte_level(merges)
    model = tiny.llama(1, vocab=len(drafter))
    engine = load(drafter=model, drafter_tokenizer=drafter, tree="chain:3", law="opaque")
    sequence = Sequence([5, 6, 7], Sampling(), seeded(0), 30)
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, 1, 40)
    decoder.join(sequence)
    lm = CausalLM(model)
    for _ in range(12):
        decoder.step()
        session = decoder.drafter
        inner, rows = session._rows[0].inner, session._session.rows
        assert rows.lengths[0] < len(inner.ids)
        if rows.lengths[0] == 0:
            continue  # cut wholly, or started anew
        # one more token after what is cached, against a fresh cache of the same ids
        cached = inner.ids[: rows.lengths[0]]
        fresh = lm.open(1, 200)
        fresh.join()
        fresh.extend(0, cached)
        nxt = inner.ids[rows.lengths[0]]
        got, want = rows.score([[nxt]], [[-1]]), fresh.score([[nxt]], [[-1]])
        torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=1e-4)
        rows.keep([[]])
    assert sequence.num_new >= 12


def test_a_target_drafting_for_itself_by_strings_is_mostly_accepted():
    """The same tokenizer and model on both sides: at temperature 0 what it writes is what it would have written."""
    model = tiny.llama(0, vocab=257)
    engine = load(target=model, drafter=tiny.llama(0, vocab=257), tokenizer=zoo.byte_only(), tree="chain:4")
    ascii_only = {i: -1e9 for i in range(257) if not 32 <= (vocabulary(zoo.byte_only()).tokens[i] or b"\0")[0] < 127}
    with torch.no_grad():
        for m in (model, engine.drafter.lm.model):
            m.lm_head.weight[list(ascii_only)] = 0
    result = engine.generate("the hello", max_new_tokens=40, temperature=0.0, logit_bias=ascii_only)
    plain = foretoken.load(model, tokenizer=zoo.byte_only(), device="cpu")
    want = plain.generate("the hello", max_new_tokens=40, temperature=0.0, logit_bias=ascii_only)
    assert result.token_ids == want.token_ids
    assert result.stats.block_efficiency > 3


def test_auto_takes_what_is_advised():
    for named in ({"vocab": "auto"}, {"vocab": None}):
        assert load(**named).kind == "tli"  # 257 of 266 tokens are common
    assert compare(tables.TARGET, tables.CONTAINED).method == "slem"  # 3 of 4
    with pytest.raises(foretoken.ForetokenError, match="exact-match"):
        load(verifier="rrsw")
    assert isinstance(load().verifier, type(VERIFIERS["exact-match"]))
    assert isinstance(load().drafter, SLEMDrafter)


def test_rows_can_be_cut():
    lm = CausalLM(tiny.llama(0))
    rows = lm.open(1, 20)
    rows.join()
    rows.extend(0, [1, 2, 3, 4])
    rows.cut(0, 2)
    (got,) = rows.score([[9]], [[-1]])
    other = lm.open(1, 20)
    other.join()
    other.extend(0, [1, 2])
    torch.testing.assert_close(got, other.score([[9]], [[-1]])[0])
    with pytest.raises(foretoken.ForetokenError, match="keep a path"):
        rows.cut(0, 1)
    rows.keep([[]])
    with pytest.raises(foretoken.ForetokenError, match="cut at most"):
        rows.cut(0, 3)


def test_texts_of_more_drafter_tokens_than_were_foreseen():
    """The drafter opens a larger cache, which is empty: it reads the texts again, and drafts as with enough room."""
    models = demo_folder()
    engine = foretoken.load(
        models / "target", drafter=models / "drafter-bytes", vocab="slem", tree="chain:3", dtype="float32"
    )
    texts = ["def main(argument):\n    return", "import os\n" * 12]
    sequences = [Sequence(engine.encode(text), Sampling(temperature=0.0), seeded(0), 40) for text in texts]
    trees = []
    for slots in (max(len(seq.ids) for seq in sequences), 4096):
        session = engine.drafter.open(2, slots)
        for _ in sequences:
            session.join()
        trees.append([tree.tokens for tree in session.propose(sequences)])
        assert (session._room > 2 * slots) == (slots < 4096)
    assert trees[0] == trees[1]
    assert all(len(tokens) > 1 for tokens in trees[0])
