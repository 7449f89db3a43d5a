"""The relation between drafts, which are sequences of drafter tokens, and the target token that each begins with.

Source: Timor et al. 2025, sections 3.3 and 3.4.

A draft is written token by token until its first target token is *settled*: that is the longest target token that the
string begins with, once no continuation can make it longer. Until then the string is *open*: a proper prefix of some
target token.

    target  a  ab  abc        "a" and "ab" are open; "ax" has settled a, "abx" has settled ab, and "abc" abc
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from foretoken.vocab.translation import FIRM, Edge, Translation

# Outcomes of a drafter token that are no target id:
NONE = -1  # the draft begins with no target token
OPEN = -2  # OPEN - i: the draft goes on; it is open string i
REMEMBERED = 1 << 25  # numbers in all remembered outcomes together, and about as many in all remembered plans
PLAN = 8  # arrays of nearly the drafter's whole width that a plan has, about


@dataclass(frozen=True, eq=False)
class Plan:
    """All feasible drafts that settle on one target token, as a tree of drafter tokens.

    Node 0 is the context; node i > 0 is drafter token tokens[i] after node parents[i] < i.

    tokens, parents: the nodes [n]; both are -1 for node 0.
    stops: stops[i] are the drafter ids that, drafted after node i, settle the draft on this target token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    stops: tuple[np.ndarray, ...]

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """{(parent, drafter token): node} of all nodes but the first."""
        return {(self.parents[i], self.tokens[i]): i for i in range(1, len(self.tokens))}

    def has(self, draft: Sequence[int]) -> bool:
        """Whether a draft is in the plan as far as its last token; draft: its drafter tokens without the last."""
        node: int | None = 0
        for token in draft:
            node = self.children.get((node, token))
            if node is None:
                return False
        return True


class Segmentation:
    """Drafts in the drafter's vocabulary `translation.dest`, read as tokens of the target's, `translation.source`.

    heals: whether drafts may have to begin with bytes of the context that were taken back, as in `strings.Followed`.
    ids: {bytes: target id} of the tokens that may be proposed.
    states: all open strings; each has its index here as its number.
    following: {open string: the bytes that may follow it}.
    outcomes: the remembered results of `_outcomes`, which describes the arguments and the array.
    closed: closed(edge) are the drafter tokens that may not come first after a context with this edge [width], bool.
    plan: plan(token, edge) is the Plan of target id `token` after a context with this edge; None where no draft settles
        on it.
    """

    heals: ClassVar[bool] = True

    def __init__(
        self, translation: Translation, width: int, vocab_size: int, limit: int, lookahead: int | None = None
    ) -> None:
        """Prepare the tables of open strings.

        translation: from the target's vocabulary to the drafter's.
        width: the number of columns of the drafter's logits.
        vocab_size: the number of columns of the target's logits; no id beyond it is proposed.
        limit: the most nodes of a plan. Nodes of fewer tokens come first, and a draft that needs a node beyond the
            limit is infeasible. The choice depends on the vocabularies and the edge alone.
        lookahead: the number of drafter tokens after which a draft ends, so that its string is settled as it is; None
            for no such end. A token that was taken back and is written again does not count.
        """
        self.limit = limit
        self.lookahead = lookahead
        self.width = width
        self.ids = {token: i for token, i in translation.source.ids.items() if i < vocab_size}
        self.following: dict[bytes, set[int]] = {}
        for token in self.ids:
            for n in range(len(token)):
                self.following.setdefault(token[:n], set()).add(token[n])
        self.states = list(self.following)
        self._numbers = {state: i for i, state in enumerate(self.states)}
        spelled = sorted((token, i) for i, token in enumerate(translation.dest.tokens[:width]) if token)
        self._keys = [token for token, _ in spelled]
        self._order = np.array([i for _, i in spelled], dtype=np.int64)
        # {dest id: source id} of special tokens that both have; after any other one a draft ends.
        self._special = {d: s for d, s in translation.special_back.items() if d < width and s < vocab_size}
        self._spelled = {i: token for token, i in self.ids.items()}
        remembered = max(16, REMEMBERED // max(width, 1))
        self.outcomes = lru_cache(remembered)(self._outcomes)
        self.closed = lru_cache(remembered)(lambda edge: edge.closed(width))
        self.plan = lru_cache(max(16, remembered // PLAN))(self._plan)

    def first(self, data: bytes) -> int:
        """Return the longest target token that `data` begins with, NONE if there is none."""
        return next((self.ids[data[:n]] for n in range(len(data), 0, -1) if data[:n] in self.ids), NONE)

    def ends(self, drafted: int) -> bool:
        """Whether the next token is a draft's last one, unless it writes again what was taken back.

        drafted: the number of the draft's tokens so far.
        """
        return self.lookahead is not None and drafted + 1 >= self.lookahead

    def _outcomes(self, state: bytes, edge: Edge = FIRM, last: bool = False) -> np.ndarray:
        """Return what each drafter token does to a draft [width], int32: the target token on which the draft settles
        with it, NONE, or OPEN - i where the draft goes on as states[i].

        state: the open string of the draft so far.
        edge: the context's, for a draft that begins; FIRM for one that goes on.
        last: whether the draft ends with this token, so that none goes on but one that is still empty.
        """
        taken = edge.taken
        codes = np.full(self.width, NONE if taken else self.first(state), dtype=np.int32)
        low = bisect_left(self._keys, taken)
        high = _after(self._keys, taken, low)
        if not (taken or state):
            codes[list(self._special)] = list(self._special.values())
        self._mark(codes, state, taken, low, high)
        codes[self.closed(edge)] = NONE
        if last:
            goes_on = (codes <= OPEN) & (codes != OPEN - self._numbers[b""])
            codes[goes_on] = [self.first(self.states[OPEN - code]) for code in codes[goes_on]]
        return codes

    def _mark(self, codes: np.ndarray, state: bytes, prefix: bytes, low: int, high: int) -> None:
        """Write the outcomes of the drafter tokens _keys[low:high] into `codes`: all begin with `prefix`, and a draft
        that goes on with `prefix` alone is the open string `state`."""
        own = bisect_right(self._keys, prefix, low, high)
        codes[self._order[low:own]] = OPEN - self._numbers[state]
        for byte in self.following[state]:
            longer, string = prefix + bytes((byte,)), state + bytes((byte,))
            start = bisect_left(self._keys, longer, own, high)
            end = _after(self._keys, longer, start, high)
            if start == end:
                continue
            if string in self.ids:
                codes[self._order[start:end]] = self.ids[string]
            if string in self.following:
                self._mark(codes, string, longer, start, end)

    def _plan(self, token: int, edge: Edge = FIRM) -> Plan | None:
        """Return the feasible drafts that settle on target id `token`, breadth first; None where there is none."""
        passing = self._passing(token)
        tokens, parents, states, depths, stops = [-1], [-1], [b""], [0], []
        open_ = deque([0])
        while open_:
            node = open_.popleft()
            state, again = states[node], FIRM if node else edge
            codes = self.outcomes(state, again, self.ends(depths[node]))
            stops.append(np.flatnonzero(codes == token).astype(np.int32))
            for string in passing:
                if string.startswith(state) and (again.taken or len(string) > len(state)):
                    for drafted in self._spelling(again.taken + string[len(state) :]):
                        if codes[drafted] <= OPEN and len(tokens) < self.limit:
                            open_.append(len(tokens))
                            tokens.append(drafted)
                            parents.append(node)
                            states.append(string)
                            depths.append(depths[node] + bool(string))
        return Plan(tuple(tokens), tuple(parents), tuple(stops)) if any(map(len, stops)) else None

    def _passing(self, token: int) -> list[bytes]:
        """Return the open strings through which a draft may come to settle on `token`, the longest first.

        They are the token's proper prefixes, the token itself if it can become a longer one, and longer strings that
        begin with no longer target token yet but still may.
        """
        spelled = self._spelled.get(token)
        if spelled is None:
            return [b""]  # a special token comes alone
        strings = [spelled[:n] for n in range(len(spelled))]
        beyond = [spelled] if spelled in self.following else []
        for string in beyond:
            longer = (string + bytes((byte,)) for byte in sorted(self.following[string]))
            beyond += [s for s in longer if s in self.following and s not in self.ids]
        return sorted([*strings, *beyond], key=len, reverse=True)

    def _spelling(self, data: bytes) -> list[int]:
        """Return the drafter tokens that spell `data`; there may be several."""
        low = bisect_left(self._keys, data)
        return self._order[low : bisect_right(self._keys, data, low)].tolist()


class SingleTokens(Segmentation):
    """Drafts of one token each, settled on the target token of equal bytes, or NONE: no string is open."""

    heals: ClassVar[bool] = False

    def _outcomes(self, state: bytes, edge: Edge = FIRM, last: bool = False) -> np.ndarray:
        codes = np.full(self.width, NONE, dtype=np.int32)
        for key, i in zip(self._keys, self._order, strict=True):
            codes[i] = self.ids.get(key, NONE)
        codes[list(self._special)] = list(self._special.values())
        return codes

    def _plan(self, token: int, edge: Edge = FIRM) -> Plan | None:
        stops = np.flatnonzero(self.outcomes(b"", edge) == token).astype(np.int32)
        return Plan((-1,), (-1,), (stops,)) if len(stops) else None


def _after(keys: list[bytes], prefix: bytes, low: int, high: int | None = None) -> int:
    """Return the index at which, in sorted keys[low:high], those that begin with `prefix` end."""
    high = len(keys) if high is None else high
    stem = prefix.rstrip(b"\xff")
    return bisect_left(keys, stem[:-1] + bytes((stem[-1] + 1,)), low, high) if stem else high
