"""An index of token ids that finds where the end of a text stood before: kernel/suffixes.py as a class."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from foretoken.kernel.suffixes import REMEMBERED, Ring, empty_ring, extend, search


class Matches(NamedTuple):
    """Earlier occurrences of the end of a text: the first arguments of `kernel.suffixes.draft`.

    ring: the tokens in which they were found.
    places: the place behind each of them, latest first [m].
    lengths: the number of tokens that match before each place [m].
    """

    ring: Ring
    places: np.ndarray
    lengths: np.ndarray

    @property
    def longest(self) -> int:
        """The number of tokens of the longest match, 0 where there is none."""
        return int(self.lengths.max()) if len(self.lengths) else 0


class Index:
    """The latest tokens of one text, or of several with borders between them."""

    def __init__(self, capacity: int) -> None:
        """capacity: the least number of tokens that are remembered."""
        self.ring: Ring = empty_ring(capacity)

    def __len__(self) -> int:
        """The number of tokens and borders appended so far, forgotten ones included."""
        return int(self.ring.state[0])

    def extend(self, ids: Seq[int] | np.ndarray) -> None:
        """Append `ids`: tokens, or BORDER between two texts."""
        extend(self.ring, np.array(ids, np.int32))

    def matches(self, tail: np.ndarray) -> Matches:
        """Find the latest occurrences of the end of a text; tail: its last tokens [n] int32, n <= LONGEST."""
        places, lengths = np.empty(REMEMBERED, np.int64), np.empty(REMEMBERED, np.int64)
        found = search(self.ring, tail, places, lengths)
        return Matches(self.ring, places[:found], lengths[:found])
