"""The store of texts of earlier requests, in which later ones are looked up: bounded in size, and shared by threads."""

from collections.abc import Sequence as Seq
from threading import Lock

import numpy as np

from foretoken.draft.index import Index
from foretoken.kernel.suffixes import BORDER, LONGEST, Draft, draft

CAPACITY = 2**19  # tokens, in some 32 MB; the oldest are dropped first
SHORTEST = 4  # the fewest tokens of a match: what follows a word or two in another text is only a guess


class Store:
    """The latest tokens of all texts that were finished, prompts included."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """capacity: the least number of tokens and borders that are remembered."""
        self._capacity, self._lock = capacity, Lock()
        self._index = Index(capacity)

    def __deepcopy__(self, memo: object) -> "Store":
        """Return this object: copies of an engine learn from each other's texts."""
        return self

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._index = Index(self._capacity)

    def __len__(self) -> int:
        """The number of tokens and borders that are remembered."""
        return min(len(self._index), len(self._index.ring.tokens))

    def add(self, ids: Seq[int]) -> list[int]:
        """Append the text with these token ids, and return what was appended: not a beginning that is here already.

        Each request of a conversation repeats all that was said before.
        """
        with self._lock:
            new = [*ids[self._known(ids) :], BORDER]
            self._index.extend(new)
        return new

    def _known(self, ids: Seq[int]) -> int:
        """Return how many tokens of a text's beginning need not be appended.

        The beginning is compared in blocks of LONGEST tokens; the last known block is appended once more, so that the
        new part stands behind its context.
        """
        known = 0
        while known + LONGEST <= len(ids):
            block = np.array(ids[known : known + LONGEST], np.int32)
            if self._index.matches(block).longest < LONGEST:
                break
            known += LONGEST
        return max(known - LONGEST, 0)

    def draft(
        self, tail: np.ndarray, longer: int, shape: np.ndarray, depth: int, rates: np.ndarray, floor: float, out: Draft
    ) -> int:
        """Fill a tree with what followed the end of a text in other texts, if more tokens match there than in itself.

        tail: the last LONGEST tokens of the text, or all if they are fewer [n] int32.
        longer: the number of tokens that match in the text itself, to be exceeded.
        shape, depth, rates, floor: as in `kernel.suffixes.draft`.
        out: the tree that is filled; its root is there already.

        Returns the number of nodes, the root included; 0 where no match here is long enough.
        """
        with self._lock:
            matches = self._index.matches(tail)
            if matches.longest <= max(longer, SHORTEST - 1):
                return 0
            return draft(*matches, False, shape, depth, rates, floor, out)
