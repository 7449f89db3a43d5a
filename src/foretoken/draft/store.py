"""Texts of earlier requests, which later ones are looked up in: bounded, and shared by threads."""

from collections.abc import Sequence as Seq
from threading import Lock

import numpy as np

from foretoken.draft.index import Index
from foretoken.kernel.suffixes import BORDER, LONGEST, Draft, draft

CAPACITY = 2**19  # tokens, in some 32 MB; the oldest go first
SHORTEST = 4  # tokens of a match: what follows a word or two in a text on something else is a guess


class Store:
    """The latest tokens of all texts that were finished, prompts included."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._lock = capacity, Lock()
        self._index = Index(capacity)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._index = Index(self._capacity)

    def tokens(self) -> np.ndarray:
        """The tokens and borders that are remembered, oldest first [n] int32."""
        with self._lock:
            return self._index.tokens()

    def __len__(self) -> int:
        """Tokens and borders that are remembered."""
        return min(len(self._index), len(self._index.ring.tokens))

    def add(self, ids: Seq[int]) -> None:
        """Append a text, but for the beginning that the store has already: conversations send all they had before."""
        with self._lock:
            self._index.extend([*ids[self._known(ids) :], BORDER])

    def _known(self, ids: Seq[int]) -> int:
        """How many tokens of a text's beginning need not be appended.

        The beginning is compared by LONGEST tokens; the last of those that are known are appended once more, so that
        what is new stands behind its context.
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
        """Fill a tree with what followed the end of a text elsewhere, where more tokens match than in the text itself.

        Args:
            tail: the last LONGEST tokens of the text, or all of them [n] int32.
            longer: the tokens that match in the text itself.
            shape, depth, rates, floor: as in `kernel.suffixes.draft`.
            out: is filled; its root is there already.

        Returns:
            The number of nodes, the root included; 0 where the text itself is the better source.
        """
        with self._lock:
            matches = self._index.matches(tail)
            if matches.longest <= max(longer, SHORTEST - 1):
                return 0
            return draft(*matches, False, shape, depth, rates, floor, out)
