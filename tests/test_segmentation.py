"""Drafts as target tokens: what settles, the plans, and the number of combinations (Timor et al. 2025, s. 3.4)."""

import itertools

import numpy as np
import pytest

import tokenizers_zoo as zoo
from benchmarks.papers.slrs_table5 import combinations
from foretoken.vocab.segmentation import NONE, OPEN, Segmentation
from foretoken.vocab.translation import FIRM, Edge, Translation
from foretoken.vocab.vocabulary import vocabulary

T = vocabulary(zoo.letters(["a", "ab", "abcd", "c", zoo.EOS]))
D = vocabulary(zoo.letters([zoo.EOS, "a", "b", "c", "d", "bc", "abx"]))
SEG = Segmentation(Translation(T, D), len(D.tokens) + 1, len(T.tokens), 64)


def loose(vocabulary, taken):
    """The edge where every token that begins with `taken` may come."""
    firsts = frozenset(i for i, token in enumerate(vocabulary.tokens) if token and token.startswith(taken))
    return Edge(taken, firsts) if taken else FIRM


def test_what_each_drafter_token_does():
    def read(state, taken=b""):
        codes = SEG.outcomes(state, loose(D, taken)).tolist()
        return [SEG.states[OPEN - c] if c <= OPEN else c for c in codes]

    a, ab, abcd, c, end = range(5)
    # ids: end of text, a, b, c, d, bc, abx, one past the tokenizer
    assert read(b"") == [end, b"a", NONE, c, NONE, NONE, ab, NONE]
    assert read(b"a") == [a, a, b"ab", a, a, b"abc", a, a]
    assert read(b"ab") == [ab, ab, ab, b"abc", ab, ab, ab, ab]
    assert read(b"abc") == [ab, ab, ab, ab, abcd, ab, ab, ab]
    assert read(b"", b"a") == [NONE, b"", NONE, NONE, NONE, NONE, NONE, NONE]  # "bx" begins with no token
    assert read(b"", b"b") == [NONE, NONE, b"", NONE, NONE, c, NONE, NONE]
    assert np.flatnonzero(~SEG.closed(loose(D, b"a"))).tolist() == [1, 6]
    assert np.flatnonzero(~SEG.closed(loose(D, b"b"))).tolist() == [2, 5]
    assert not SEG.closed(FIRM).any()


def test_a_plan_has_every_draft_once():
    plan = SEG.plan(1)  # "ab": a|b.., a|b|c|not d, a|bc|not d, abx
    strings = {0: b""}
    for i in range(1, len(plan.tokens)):
        strings[i] = strings[plan.parents[i]] + (D.tokens[plan.tokens[i]] or b"")
    assert sorted(strings.values()) == [b"", b"a", b"ab", b"abc", b"abc"]
    assert plan.has([1, 2, 3])
    assert not plan.has([1, 3])
    for i, state in strings.items():
        assert np.array_equal(plan.stops[i], np.flatnonzero(SEG.outcomes(state) == 1))


def test_the_feasible_drafts_are_the_shortest():
    few = Segmentation(Translation(T, D), len(D.tokens), len(T.tokens), 3)
    plan = few.plan(1)
    assert len(plan.tokens) == 3
    assert not plan.has([1, 2, 3])
    assert few.plan(99) is None


@pytest.mark.parametrize("taken", [b"", b"h", b" "])
@pytest.mark.parametrize("drafter", [zoo.byte_only, zoo.sentencepiece_bpe, lambda: zoo.byte_level(zoo.MERGES[:5])])
def test_every_outcome_is_the_longest_match(drafter, taken):
    """On real tokenizers, against the definition."""
    t, d = vocabulary(zoo.byte_level()), vocabulary(drafter())
    segmentation = Segmentation(Translation(t, d), len(d.tokens), len(t.tokens), 64)
    starts = {token[:n] for token in t.ids for n in range(len(token))}
    for state in [b""] if taken else segmentation.states:
        codes, closed = segmentation.outcomes(state, loose(d, taken)), segmentation.closed(loose(d, taken))
        for i, token in enumerate(d.tokens):
            if not token:
                continue
            assert closed[i] == (not token.startswith(taken))
            if closed[i]:
                assert codes[i] == NONE
                continue
            string = state + token[len(taken) :]
            if string in starts:
                assert segmentation.states[OPEN - codes[i]] == string
            else:
                best = max((s for s in t.ids if string.startswith(s)), key=len, default=None)
                assert codes[i] == (NONE if best is None else t.ids[best])


def test_combinations_of_a_complete_and_a_nearly_complete_vocabulary():
    """Lemma 3.1: 2^(m-1). Appendix C: 'Hello' has 14 of 16 in a real vocabulary, which lacks 'He|llo' and 'H|e|llo'."""
    for n in range(1, 7):
        complete = {bytes(s) for m in range(1, n + 1) for s in itertools.product(b"ab", repeat=m)}
        for m in range(1, n + 1):
            assert combinations(complete, b"abbaba"[:m]) == 2 ** (m - 1)
    every = {b"Hello"[i:j] for i in range(5) for j in range(i + 1, 6)}
    assert combinations(every, b"Hello") == 16
    assert combinations(every - {b"llo"}, b"Hello") == 14
    assert combinations({b"x"}, b"Hello") == 0
