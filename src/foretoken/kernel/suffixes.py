"""Where the end of a text occurred before, and what followed it there: hash chains over a ring of tokens.

For each length n of ORDERS, `heads` has the place behind the latest occurrence of every n tokens (by their hash), and
`links` leads from each occurrence to the one before it. A search starts at the longest n, follows one chain for a
bounded number of links, and compares tokens; so its time does not depend on the length of the text, and what the ring
has overwritten needs no clearing: such a link is out of reach.

Sources: Ziv & Lempel 1977, A universal algorithm for sequential data compression (copies of earlier text, which may
overlap what they produce); Deutsch 1996, RFC 1951, section 4 (hash chains); Oliaro et al. 2024, SuffixDecoding,
arXiv:2411.04975 (which continuation is drafted, and how far, by how often it was seen).
"""

from typing import NamedTuple

import numpy as np

from foretoken.kernel.compile import compiled

ORDERS = (1, 2, 4, 8, 16)  # numbers n of tokens whose occurrences are chained
LONGEST = 64  # most tokens of a match that are compared
REMEMBERED = 16  # most occurrences, the latest ones, that a search returns
VISITS = 48  # most links that a search follows; some lead to other tokens with the same hash
BORDER = -1  # stands between two texts of one ring, and matches nothing
GROUPS = 7  # lengths of a match whose drafts are accepted alike: 1, 2-3, 4-7, ..., 64


class Ring(NamedTuple):
    """The latest tokens of a text that grows, with their chains. A place is a number of tokens since the beginning.

    tokens: token ids; that with place p is at index p modulo the capacity, which is a power of 2, int32 [capacity].
    links: for every order and place, how far before the place the previous occurrence ends, 0 for none, int32 [orders,
        capacity].
    heads: for every order and hash, the place behind the latest occurrence, 0 for none, int64 [orders, hashes].
    state: the place behind the last token, and the number of tokens since the last border, int64 [2].
    """

    tokens: np.ndarray
    links: np.ndarray
    heads: np.ndarray
    state: np.ndarray


class Draft(NamedTuple):
    """A drafted tree, of which `draft` fills as many nodes as it drafts.

    tokens: the id of each node's token, the root's first, int64 [nodes].
    parents: each node's parent, -1 for the root, int64 [nodes].
    reach: the estimated probability that all tokens from the root to the node are accepted, float64 [nodes].
    groups: the group (`group`) of the match that the node continues, int64 [nodes].
    """

    tokens: np.ndarray
    parents: np.ndarray
    reach: np.ndarray
    groups: np.ndarray


def empty_ring(capacity: int) -> Ring:
    """Return a ring without tokens, for at least `capacity` of them; its memory is taken as it fills."""
    size = 1 << max(capacity - 1, 1).bit_length()
    orders = len(ORDERS)
    return Ring(
        np.zeros(size, np.int32),
        np.zeros((orders, size), np.int32),
        np.zeros((orders, size), np.int64),
        np.zeros(2, np.int64),
    )


def empty_draft(nodes: int) -> Draft:
    """Return room for a tree of so many nodes, the root included; the caller sets the root's token."""
    return Draft(np.zeros(nodes, np.int64), np.full(nodes, -1), np.ones(nodes), np.zeros(nodes, np.int64))


@compiled
def hashed(tokens: np.ndarray, end: int, n: int, size: int) -> int:
    """Return the hash, below `size`, of the n tokens before a place of a ring.

    tokens: the ring's tokens, int32 [capacity].
    end: the place behind the last of them.
    n: number of tokens.
    size: number of hashes, a power of 2.
    """
    mask = tokens.shape[0] - 1
    value = np.uint64(n)
    for place in range(end - n, end):
        value = (value ^ np.uint64(tokens[place & mask])) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return int(value & np.uint64(size - 1))


@compiled
def extend(ring: Ring, ids: np.ndarray) -> None:
    """Append tokens, or borders between two texts, to a ring.

    ring: a Ring, which is changed.
    ids: token ids or BORDER, int32 [n].
    """
    capacity, size = ring.tokens.shape[0], ring.heads.shape[1]
    mask, end, run = capacity - 1, ring.state[0], ring.state[1]
    for token in ids:
        if token != BORDER:
            for order in range(len(ORDERS)):
                n = ORDERS[order]
                link = 0
                if run >= n:
                    slot = hashed(ring.tokens, end, n, size)
                    before = ring.heads[order, slot]
                    if before > 0 and end - before < capacity:
                        link = end - before
                    ring.heads[order, slot] = end
                ring.links[order, end & mask] = link
        ring.tokens[end & mask] = token
        run = run + 1 if token != BORDER else 0
        end += 1
    ring.state[0], ring.state[1] = end, run


@compiled
def search(ring: Ring, tail: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> int:
    """Find the latest occurrences of the end of a text that a token follows; return their number.

    They are those of the longest order that has any.

    ring: where they are looked for.
    tail: the last LONGEST tokens of the text, or all of them if they are fewer, int32 [n].
    places: is filled with the places behind the occurrences, latest first, int64 [m], m > 0.
    lengths: is filled with the number of tokens that match before each of those places, int64 [m].
    """
    capacity, size = ring.tokens.shape[0], ring.heads.shape[1]
    mask, end, known = capacity - 1, ring.state[0], tail.shape[0]
    oldest = max(0, end - capacity)
    padded = np.empty(LONGEST, np.int32)  # hashed reads rings, whose size is a power of 2
    for i in range(known):  # an assignment of arrays takes two seconds to compile
        padded[i] = tail[i]
    for order in range(len(ORDERS) - 1, -1, -1):
        n = ORDERS[order]
        if n > known:
            continue
        found, place = 0, ring.heads[order, hashed(padded, known, n, size)]
        for _ in range(VISITS):
            if place - n < oldest:
                break
            length = 0
            while (
                length < known
                and place - length > oldest
                and ring.tokens[(place - length - 1) & mask] == tail[known - length - 1]
            ):
                length += 1
            if length >= n:
                places[found], lengths[found] = place, length
                found += 1
                if found == places.shape[0]:
                    break
            link = ring.links[order, place & mask]
            if link == 0:
                break
            place -= link
        if found > 0:
            return found
    return 0


@compiled
def group(length: int) -> int:
    """Return the group of a match of `length` tokens, from 0 to GROUPS - 1, by powers of 2."""
    found = 0
    while found < GROUPS - 1 and length >= 2 << found:
        found += 1
    return found


@compiled
def draft(
    ring: Ring,
    places: np.ndarray,
    lengths: np.ndarray,
    overlapping: bool,
    shape: np.ndarray,
    depth: int,
    rates: np.ndarray,
    floor: float,
    drafted: Draft,
) -> int:
    """Draft a tree from what followed the occurrences of the end of a text.

    A node's next child is the token that followed the longest match, of several the one that followed most often, of
    equals the latest. Its reach is its parent's, times the acceptance of its group, times its share among the
    occurrences of matches as long. A node whose reach is below the floor is left out, and so is what is below it.

    ring: the Ring that was searched.
    places, lengths: as `search` found them, int64 [m], m < 63.
    overlapping: whether the ring holds the text itself, up to its end: then the drafted tokens are what follows its
        last token, and an occurrence near the end goes on with them.
    shape: the parent of each place of the tree, -1 for the root, which comes first, int64 [n].
    depth: the deepest level that is filled.
    rates: the acceptance of a draft token, by the group of its match, float64 [GROUPS].
    floor: the least reach of a node.
    drafted: is filled with up to n nodes; its root is there already.

    Returns the number of nodes, the root included.
    """
    mask, end, m, n = ring.tokens.shape[0] - 1, ring.state[0], places.shape[0], shape.shape[0]
    at, depths = np.full(n, -1), np.zeros(n, np.int64)  # the node in each place of the shape, the depth of each node
    # Per node the occurrences, as bits, that led to it, and those of them that no child was made of yet.
    active, left = np.zeros(n, np.int64), np.zeros(n, np.int64)
    follower = np.empty(m, np.int64)
    at[0], count = 0, 1
    active[0] = left[0] = (1 << m) - 1
    for i in range(1, n):
        parent = at[shape[i]]
        if parent < 0 or depths[parent] >= depth or left[parent] == 0:
            continue
        for j in range(m):
            follower[j] = BORDER
            if active[parent] >> j & 1:
                place = places[j] + depths[parent]
                if place < end:
                    follower[j] = ring.tokens[place & mask]
                elif overlapping:
                    node = parent
                    while depths[node] > place - end + 1:
                        node = drafted.parents[node]
                    follower[j] = drafted.tokens[node]
        best, longest, votes, peers = -1, 0, 0, 0
        for j in range(m):
            if follower[j] == BORDER or not left[parent] >> j & 1:
                continue
            most, same, alike = 0, 0, 0
            for other in range(m):
                if follower[other] == follower[j]:
                    same += 1
                    most = max(most, lengths[other])
            if most < longest or (most == longest and same <= votes):
                continue
            for other in range(m):
                alike += follower[other] != BORDER and lengths[other] >= most
            best, longest, votes, peers = j, most, same, alike
        if best < 0:
            left[parent] = 0
            continue
        taken, agreeing = 0, 0
        for j in range(m):
            if follower[j] == follower[best]:
                taken |= 1 << j
                agreeing += lengths[j] >= longest
        left[parent] &= ~taken
        kind = group(longest + depths[parent])
        reach = drafted.reach[parent] * rates[kind] * agreeing / max(peers, 1)
        if reach < floor:
            continue
        drafted.tokens[count], drafted.parents[count] = follower[best], parent
        drafted.reach[count], drafted.groups[count] = reach, kind
        at[i], depths[count], left[count] = count, depths[parent] + 1, taken
        active[count] = taken
        count += 1
    return count
