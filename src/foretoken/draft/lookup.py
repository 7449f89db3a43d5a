"""Drafting without a model: the draft is what followed the same tokens earlier, in the text or in earlier requests.

How far it drafts depends on acceptance, which is learnt for each text by how many tokens match before a draft token. A
path ends where the probability that it is accepted up to there (its *reach*) falls below FLOOR.

Sources: Saxena 2023, Prompt Lookup Decoding (drafts from the prompt); Oliaro et al. 2024, SuffixDecoding,
arXiv:2411.04975 (drafts from earlier outputs, scored by frequency, as long as their match allows).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, opaque_tree
from foretoken.core.verifier import LawFamily
from foretoken.draft.index import Index
from foretoken.draft.source import Source
from foretoken.draft.store import Store
from foretoken.kernel.suffixes import LONGEST, draft, empty_draft

# Acceptance by the group of the match (1, 2-3, 4-7, .. tokens): as in docs/LOG.md
ASSUMED = np.array([0.2, 0.5, 0.8, 0.9, 0.93, 0.97, 0.99])
WEIGHT = 8.0  # the weight of what is assumed, in trials
FLOOR = 0.05  # the least probability with which a path comes to a draft token


@dataclass(frozen=True)
class LookupDrafter:
    """Proposes what followed the same tokens earlier; it costs no forward. The children are opaque.

    policy: the largest tree, whose shape is fixed.
    store: texts of earlier requests; None to look in the text itself alone.

    Raises ForetokenError for a tree whose shape depends on the drafter's probabilities.
    """

    policy: TreePolicy
    store: Store | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.policy, ShapePolicy) and self.policy.floor == 0):
            raise ForetokenError(
                f"Drafter {self.name} has no probabilities to grow such a tree by: take chain or kary."
            )

    @property
    def name(self) -> str:
        return "ngram" if self.store is None else "suffix"

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(self.policy.max_draws),)

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    def open(self, batch: int, slots: int) -> "LookupSession":
        assert isinstance(self.policy, ShapePolicy)
        return LookupSession(np.array(self.policy.parents), self.store, slots)


def lookup(source: Source, policy: TreePolicy, law: LawFamily) -> LookupDrafter:
    """Return the drafter that looks the text up; source, policy, law: as in `recipe.Kind`, but no law is used."""
    return LookupDrafter(policy, source.store)


class Text:
    """One sequence with its index, and the acceptance of its drafts.

    ids: the sequence's ids, as `read` last had them.
    gain: the number of tokens of the present draft that are expected to be accepted.
    """

    gain = 0.0

    def __init__(self, shape: np.ndarray, slots: int) -> None:
        """shape: the parent of each node of the largest tree [nodes]. slots: the most tokens that the text may have."""
        self.ids: Seq[int] = ()
        self._shape, self._index = shape, Index(slots)
        self._drafted, self._nodes = empty_draft(len(shape)), 1
        self._hits, self._trials = WEIGHT * ASSUMED, np.full(len(ASSUMED), WEIGHT)

    def draft(self, seq: Sequence, store: Store | None) -> TokenTree:
        """Return the tree for the next step of this text, which is `seq`.

        store: texts of earlier requests, which give the draft where more tokens match there; None: they are not used.
        """
        self.read(seq)
        tail, drafted = np.array(seq.ids[-LONGEST:], np.int32), self._drafted
        matches = self._index.matches(tail)
        settings = self._shape, max(seq.depth_left, 0), self._hits / self._trials, FLOOR, drafted
        drafted.tokens[0] = seq.ids[-1]
        nodes = store.draft(tail, matches.longest, *settings) if store is not None else 0
        self._nodes = nodes or draft(*matches, True, *settings)
        self.gain = float(drafted.reach[1 : self._nodes].sum())
        return opaque_tree(drafted.tokens[: self._nodes].tolist(), drafted.parents[: self._nodes].tolist())

    def read(self, seq: Sequence) -> None:
        """Index what was committed to `seq` since the last call, and learn from it how much of the draft was right."""
        new = seq.ids[len(self._index) :]
        if new:
            self._learn(new)
            self.ids = seq.ids
            self._index.extend(new)

    def _learn(self, new: Seq[int]) -> None:
        """Count the draft tokens that were tried: those on the committed path, and the likeliest one after it.

        new: the ids that were committed since the draft was made.
        """
        tokens, parents, groups = self._drafted.tokens, self._drafted.parents, self._drafted.groups
        node = 0
        for token in new:
            below = [child for child in range(node + 1, self._nodes) if parents[child] == node]
            if not below:
                break
            self._trials[groups[below[0]]] += 1
            right = [child for child in below if tokens[child] == token]
            if not right:
                break
            self._hits[groups[below[0]]] += 1
            node = right[0]
        self._nodes = 1


class LookupSession:
    """The texts of one batch."""

    def __init__(self, shape: np.ndarray, store: Store | None, slots: int) -> None:
        """shape, slots: as in Text. store: as in LookupDrafter; each text is added to it when it leaves."""
        self.texts: list[Text] = []
        self.store = store
        self._shape, self._slots = shape, slots

    def join(self) -> None:
        self.texts.append(Text(self._shape, self._slots))

    def leave(self, row: int) -> None:
        ids = self.texts[row].ids  # as long as the sequence is now, whether or not all of it was looked up
        if self.store is not None and ids:
            self.store.add(ids)
        self.texts[row] = self.texts[-1]
        self.texts.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [text.draft(seq, self.store) for text, seq in zip(self.texts, sequences, strict=True)]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Read what was committed, at once: a sequence that leaves now does not come back."""
        for text, seq in zip(self.texts, sequences, strict=True):
            text.read(seq)
