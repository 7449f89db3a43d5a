"""The index of a text beside a search of the whole text, token by token."""

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from foretoken.draft.index import Index
from foretoken.draft.store import Store
from foretoken.kernel.suffixes import BORDER, GROUPS, LONGEST, ORDERS, REMEMBERED, draft, empty_draft

ALL = np.ones(GROUPS)


def naive(ids: Seq[int], tail: Seq[int], oldest: int = 0) -> list[tuple[int, int]]:
    """(place, length) of the latest occurrences of the end of `tail` that something follows, of the longest order that
    has any, latest first."""
    found = []
    for place in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(place - oldest, len(tail)) and ids[place - length - 1] == tail[-length - 1] != BORDER:
            length += 1
        if length and ids[place] != BORDER:
            found.append((place, length))
    for order in reversed(ORDERS):
        if of_order := [each for each in found if each[1] >= order]:
            return of_order[:REMEMBERED]
    return []


def matches(index: Index, tail: Seq[int]) -> list[tuple[int, int]]:
    found = index.matches(np.array(tail[-LONGEST:], np.int32))
    return [*zip(found.places.tolist(), found.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_matches_are_those_of_a_search_of_the_whole_text(seed):
    """Of random texts that repeat themselves, with borders, after every token. At most 48 links are followed, which is
    all of a chain here unless hashes are equal."""
    rng = random.Random(seed)
    ids, index = list[int](), Index(1024)
    for _ in range(40):
        if ids and rng.random() < 0.5:
            begin = rng.randrange(len(ids))
            new = ids[begin : begin + rng.randrange(1, 90)]
        else:
            new = [rng.choice([BORDER, *range(30)]) for _ in range(rng.randrange(1, 12))]
        ids += new
        index.extend(new)
        if ids[-1] != BORDER and len(ids) < 1024:
            tail = ids[-LONGEST:]
            tail = tail[len(tail) - tail[::-1].index(BORDER) :] if BORDER in tail else tail
            assert matches(index, tail) == naive(ids, tail)


def test_what_the_ring_has_overwritten_is_not_found():
    """The capacity is a bound: of 600 tokens the last 64 are there, and nothing else is found, however it is asked."""
    ids = [random.Random(1).randrange(20) for _ in range(600)]
    index = Index(64)
    for i, token in enumerate(ids):
        index.extend([token])
        known = ids[max(0, i - 63) : i + 1]
        for tail in (ids[max(0, i - 9) : i + 1], ids[max(0, i - 200) :][:10]):
            found = [(place - max(0, i - 63), length) for place, length in matches(index, tail)]
            # Tokens before the oldest one cannot be compared, so a match that begins there is as long as it is known.
            assert set(found) <= set(naive(known, tail)) | {(p, n) for p, n in found if n == p}
            assert all(0 < n <= p < 64 for p, n in found)
            assert all(known[p - n : p] == list(tail[-n:]) for p, n in found)


def drafted(index: Index, tail: Seq[int], shape: Seq[int], depth: int = 99, rates=ALL, floor=0.0, own=True):
    """[(token, parent, reach)] of a tree that follows `tail`."""
    out = empty_draft(len(shape))
    out.tokens[0] = tail[-1]
    found = index.matches(np.array(tail[-LONGEST:], np.int32))
    n = draft(*found, own, np.array(shape), depth, rates, floor, out)
    return [*zip(out.tokens[:n].tolist(), out.parents[:n].tolist(), out.reach[:n].tolist(), strict=True)]


CHAIN = (-1, 0, 1, 2, 3, 4, 5)


def index_of(ids: Seq[int]) -> Index:
    index = Index(256)
    index.extend(ids)
    return index


def test_a_draft_is_what_followed_the_longest_match():
    ids = [1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 8, 1, 2, 3]
    assert [token for token, *_ in drafted(index_of(ids), ids, CHAIN)] == [3, 4, 5, 9, 2, 3, 7]


def test_a_draft_goes_on_with_itself_where_the_text_ends():
    """The text ends in a period of three, which goes on for ever."""
    ids = [9, 1, 2, 3, 1, 2, 3]
    assert [token for token, *_ in drafted(index_of(ids), ids, CHAIN)] == [3, 1, 2, 3, 1, 2, 3]
    assert [token for token, *_ in drafted(index_of(ids), ids, CHAIN, own=False)] == [3, 1, 2, 3]


def test_the_most_frequent_continuation_comes_first_and_its_share_is_its_reach():
    ids = [5, 1, 6, 5, 1, 7, 5, 1, 7, 5, 1, 8, 5, 1]
    found = drafted(index_of(ids), ids, (-1, 0, 0, 0, 1, 2))
    assert [(token, parent) for token, parent, _ in found] == [(1, -1), (7, 0), (8, 0), (6, 0), (5, 1), (5, 2)]
    assert [reach for *_, reach in found] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 4])


def test_a_draft_ends_at_the_floor_and_at_the_depth():
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    rates = np.array([0.9, 0.8, 0.5, 0.5, 1.0, 1.0, 1.0])
    found = drafted(index_of(ids), ids, CHAIN, rates=rates, floor=0.3)
    assert [token for token, *_ in found] == [2, 3, 4, 5]
    assert [reach for *_, reach in found] == pytest.approx([1, 0.8, 0.64, 0.32])  # matches of 2, 3 and 4 tokens
    assert len(drafted(index_of(ids), ids, CHAIN, depth=2)) == 3
    assert len(drafted(index_of(ids), ids, CHAIN, depth=0)) == 1
    assert len(drafted(index_of([1, 2, 3]), [1, 2, 3], CHAIN)) == 1  # nothing occurred before


def from_store(store: Store, tail: Seq[int], longer: int = 0) -> list[int]:
    out = empty_draft(len(CHAIN))
    n = store.draft(np.array(tail[-LONGEST:], np.int32), longer, np.array(CHAIN), 99, ALL, 0.0, out)
    return out.tokens[1:n].tolist()


def test_the_store_drafts_where_more_matches_than_in_the_text_itself():
    store = Store(256)
    store.add([1, 2, 3, 4, 5, 6, 7])
    store.add([2, 3, 4, 9])
    assert from_store(store, [1, 2, 3, 4]) == [5, 6, 7]  # nothing beyond the border
    assert from_store(store, [8, 1, 2, 3, 4], longer=3) == [5, 6, 7]
    assert from_store(store, [8, 1, 2, 3, 4], longer=4) == []
    assert from_store(store, [8, 2, 3]) == []  # too short to speak of the same matter


def test_a_store_is_bounded_and_forgets_what_is_oldest():
    store = Store(256)
    for first in range(0, 3000, 10):
        store.add(range(first, first + 10))
    assert len(store) == 256
    assert from_store(store, [2990, 2991, 2992, 2993]) == [*range(2994, 3000)]
    assert from_store(store, [0, 1, 2, 3]) == []


def test_a_conversation_that_goes_on_is_stored_once():
    """What its beginning adds is its new part, behind the last tokens before it."""
    store, texts = Store(4096), [*range(10, 210)]
    store.add(texts)
    before = len(store)
    store.add([*texts, 5, 6, 7, 8])
    assert len(store) - before <= 200 % LONGEST + LONGEST + 5
    assert from_store(store, texts[-20:]) == [5, 6, 7, 8]
