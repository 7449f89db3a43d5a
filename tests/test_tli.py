"""TLI: q' is q on the intersection, and decoding with it is the target's own, by enumeration and on real models."""

import pytest
import torch

import tiny
import tiny_tables as tables
import tokenizers_zoo as zoo
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.models.causal_lm import CausalLM
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.tli import IntersectionLM, tli
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

CASES = [
    ("standard", IID, static.chain(2), tables.DRAFTER),
    ("rrs", IID, static.kary(2, 1), tables.DRAFTER),
    ("rrsw", WithoutReplacement, static.kary(2, 1), tables.DRAFTER),
    ("exact-match", Opaque, static.kary(2, 2), tables.DRAFTER),
    ("standard", IID, static.chain(2), tables.CONTAINED),
    ("standard", IID, static.chain(2), tables.WIDER),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("verifier", "law", "policy", "drafter"), CASES)
def test_decoding_with_two_tokenizers_is_the_targets_own(verifier, law, policy, drafter):
    lm, small = tables.lms(drafter)
    drafting = tli(TranslatedSource("tli", lm.vocab_size, small, tables.translation(drafter)), policy, law)
    assert tables.deviates(lm, drafting, VERIFIERS[verifier]) < 1e-12


def test_q_is_the_drafters_on_the_intersection_whatever_the_order_of_ids():
    """transformers 5.23 prunes in the order of get_vocab() and scatters in the order of ids."""
    torch.manual_seed(0)
    target, drafter = zoo.byte_level(), zoo.byte_level(zoo.MERGES[:4], shuffled=True)
    t, d = vocabulary(target), vocabulary(drafter)
    lm = CausalLM(tiny.llama(0, vocab=len(drafter) + 3))  # a head padded beyond the tokenizer
    rows = IntersectionLM(lm, Translation(t, d)).open(1, 16)
    plain = lm.open(1, 16)
    rows.join(), plain.join()
    text = t.encode(b"a the")
    (got,) = rows.score([text], [range(-1, len(text) - 1)])
    ids = d.encode(b"a the")
    (logits,) = plain.score([ids], [range(-1, len(ids) - 1)])
    q, own = got[-1].softmax(-1), logits[-1].softmax(-1)
    common = {i: d.ids[token] for token, i in t.ids.items() if token in d.ids} | {t.eos: d.eos}
    mass = sum(float(own[j]) for j in common.values())
    for i in range(len(t.tokens)):
        assert float(q[i]) == pytest.approx(float(own[common[i]]) / mass if i in common else 0.0, abs=1e-6)


def test_a_token_that_the_drafter_spells_with_several_is_a_chain_in_its_context():
    t, d = vocabulary(zoo.byte_level()), vocabulary(zoo.byte_only())
    lm = CausalLM(tiny.llama(1, vocab=257))
    rows = IntersectionLM(lm, Translation(t, d)).open(2, 4)  # far too little room, so that it must grow
    texts = [t.encode(b" the hello ther" * 2), t.encode(b"x")]
    rows.join(), rows.join()
    rows.extend(0, texts[0][:2])
    rows.score([texts[0][2:], texts[1]], [range(-1, len(texts[0]) - 3), [-1]])
    rows.keep([range(len(texts[0]) - 2), [0]])
    a, the, hello, e = (t.encode(x)[0] for x in (b"a", b" the", b"hello", b"e"))
    got = rows.score([[the, hello, a, e], [a]], [[-1, 0, 0, 2], [-1]])
    assert rows.lengths == [len(texts[0]), 1]
    plain = lm.open(1, 64)
    plain.join()
    for row, text, paths in (
        (0, b" the hello ther" * 2, [b" the", b" thehello", b" thea", b" theae"]),
        (1, b"x", [b"a"]),
    ):
        for node, path in enumerate(paths):
            ids = d.encode(text + path)
            (want,) = plain.score([ids], [range(-1, len(ids) - 1)])
            plain.keep([[]])
            shared = {i: j for token, i in t.ids.items() if (j := d.ids.get(token)) is not None}
            torch.testing.assert_close(
                got[row][node][list(shared)], want[-1][list(shared.values())], atol=1e-4, rtol=1e-4
            )
    rows.leave(0)
    assert rows.lengths == [1]
    rows.keep([[0]])
    assert rows._ids == [[*d.encode(b"xa")]]


def test_what_does_not_fit_is_told():
    with pytest.raises(ForetokenError, match=r"no token in common.*slem"):
        tli(
            TranslatedSource("tli", 0, tables.lms(tables.APART)[1], tables.translation(tables.APART)),
            static.chain(1),
            IID,
        )
    with pytest.raises(ForetokenError, match="both tokenizers"):
        zoo.load_bytes(vocab="tli", tokenizer=None, drafter_tokenizer=None)
    with pytest.raises(ForetokenError, match="byte-level BPE"):
        zoo.load_bytes(vocab="tli", drafter_tokenizer=zoo.word_level())
