"""Prompt lookup: what followed the last occurrence of the current longest n-gram is proposed again."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder
from foretoken.core.verifier import LawFamily
from foretoken.draft.source import Source

LONGEST = 4  # n-grams of this length down to 1 are indexed
REMEMBERED = 8  # latest occurrences kept for each n-gram


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes continuations found earlier in the same text; costs no forward. The children are opaque.

    Raises ForetokenError for a tree that goes by the drafter's probabilities.
    """

    policy: TreePolicy
    name: str = "ngram"

    def __post_init__(self) -> None:
        if not (isinstance(self.policy, ShapePolicy) and self.policy.floor == 0):
            raise ForetokenError("Drafter ngram has no probabilities, which this tree goes by: take chain or kary.")

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(self.policy.max_draws),)

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    def open(self, batch: int, slots: int) -> "NgramSession":
        return NgramSession(self.policy)


def ngram(source: Source, policy: TreePolicy, law: LawFamily) -> NgramDrafter:
    """The drafter that looks the prompt up; nothing of a source or a law matters to it."""
    return NgramDrafter(policy)


@dataclass
class Index:
    """For every n-gram of one text, the positions that followed its latest occurrences, oldest first."""

    length: int = 0
    positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def update(self, ids: list[int]) -> None:
        """Index what was added; the n-grams that end the text are left out, since nothing follows them yet."""
        for end in range(max(self.length, 1), len(ids)):
            for n in range(1, min(LONGEST, end) + 1):
                followers = self.positions.setdefault(tuple(ids[end - n : end]), [])
                followers.append(end)
                del followers[:-REMEMBERED]
        self.length = len(ids)

    def longest_match(self, ids: list[int]) -> list[int]:
        """Positions that followed earlier occurrences of the longest known suffix, latest first."""
        for n in range(min(LONGEST, len(ids) - 1), 0, -1):
            if found := self.positions.get(tuple(ids[-n:])):
                return found[::-1]
        return []


class NgramSession:
    def __init__(self, policy: TreePolicy) -> None:
        self.policy = policy
        self.indexes: list[Index] = []

    def join(self) -> None:
        self.indexes.append(Index())

    def leave(self, row: int) -> None:
        self.indexes[row] = self.indexes[-1]
        self.indexes.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [self._tree(seq, index) for seq, index in zip(sequences, self.indexes, strict=True)]

    def _tree(self, seq: Sequence, index: Index) -> TokenTree:
        index.update(seq.ids)
        builder = TreeBuilder(seq.ids[-1])
        frontier = [(0, self.policy.root(None), index.longest_match(seq.ids))]
        for _ in range(seq.depth_left):
            frontier = [below for node in frontier for below in self._children(builder, seq.ids, *node)]
            if not frontier:
                break
        return builder.build()

    def _children(self, builder: TreeBuilder, ids: list[int], node: int, state: object, positions: list[int]) -> list:
        """Add the distinct next tokens of `positions`, latest first, as children: (child, state, positions)."""
        plan = self.policy.plan([state], None, Opaque)[0]
        if plan is None:
            return []
        following: dict[int, list[int]] = {}
        for position in positions:
            if position < len(ids):
                following.setdefault(ids[position], []).append(position + 1)
        draws = tuple(following)[: plan.law.k]
        if not draws:
            return []
        (states,) = self.policy.grow([plan], None, [draws])
        nodes = builder.add(node, Siblings(draws, None, plan.law))
        return [(child, states[j], following[draws[j]]) for j, child in nodes.items()]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Nothing to do: the index reads the committed ids at the next step."""
