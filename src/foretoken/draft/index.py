"""Token ids, and the places where the end of a text stood before: kernel/suffixes.py as a class."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from foretoken.kernel.suffixes import REMEMBERED, Ring, empty_ring, extend, search


class Matches(NamedTuple):
    """Occurrences of the end of a text: what the kernel's `draft` begins with.

    ring: where they are. places: behind each of them, latest first [m]. lengths: the tokens that match before each
    place [m].
    """

    ring: Ring
    places: np.ndarray
    lengths: np.ndarray

    @property
    def longest(self) -> int:
        """The tokens of the longest match, 0 where there is none."""
        return int(self.lengths.max()) if len(self.lengths) else 0


class Index:
    """The latest tokens of one text, or of several with borders between them."""

    def __init__(self, capacity: int) -> None:
        """capacity: the least number of tokens that are remembered."""
        self.ring: Ring = empty_ring(capacity)

    def __len__(self) -> int:
        """The tokens and borders appended so far, forgotten ones included."""
        return int(self.ring.state[0])

    def tokens(self) -> np.ndarray:
        """A copy of the tokens and borders that are remembered, oldest first [n] int32."""
        tokens, end = self.ring.tokens, len(self)
        return tokens[:end].copy() if end < len(tokens) else np.roll(tokens, -(end % len(tokens)))

    def extend(self, ids: Seq[int] | np.ndarray) -> None:
        """Append tokens, or borders."""
        extend(self.ring, np.array(ids, np.int32))

    def matches(self, tail: np.ndarray) -> Matches:
        """The occurrences of the last tokens of a text. tail: [n] int32, n <= LONGEST."""
        places, lengths = np.empty(REMEMBERED, np.int64), np.empty(REMEMBERED, np.int64)
        found = search(self.ring, tail, places, lengths)
        return Matches(self.ring, places[:found], lengths[:found])
