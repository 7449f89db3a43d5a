"""Token ids, and the places where the end of a text stood before: kernel/suffixes.py as a class."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from foretoken.kernel.suffixes import REMEMBERED, Draft, Ring, draft, empty_ring, extend, search


@dataclass(frozen=True)
class Matches:
    """Occurrences of the end of a text.

    places: behind each of them, latest first [m]. lengths: the tokens that match before each place [m].
    """

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
        return Matches(places[:found], lengths[:found])

    def draft(
        self,
        matches: Matches,
        shape: np.ndarray,
        depth: int,
        rates: np.ndarray,
        floor: float,
        drafted: Draft,
        own: bool = False,
    ) -> int:
        """Fill a tree with what followed these occurrences.

        Args:
            matches: of this index.
            shape: the tree's parent list [n].
            depth: the deepest level that is filled.
            rates: the acceptance of a draft token by the group of its match [GROUPS].
            floor: the least probability with which a path comes to a node.
            drafted: is filled; its root is there already.
            own: whether this is the index of the very text that goes on.

        Returns:
            The number of nodes, the root included.
        """
        return draft(self.ring, matches.places, matches.lengths, own, shape, depth, rates, floor, drafted)
