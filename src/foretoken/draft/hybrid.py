"""Two drafters in a row: a lookup where it is expected to gain more, a model where it is not.

At every step each text takes the draft whose tokens per time are expected to be the higher,

    (1 + accepted draft tokens) / (1 + what the draft takes, in plain steps).

Of a lookup's draft the sum of its tokens' reach (the probability that a path comes to them) is expected to be accepted,
of a model's draft what its drafts for this text brought lately; where the lookup finds nothing, the model drafts. Under
method auto a batch of several texts is left to the model, whose controller measures what a node costs them. A choice
depends on the text so far and on earlier steps, never on a draw of the step that it decides about, so that every step
is lossless as a step of the drafter that was chosen.

Source: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975 (its hybrid: a model where the score of the suffix tree is
low; here both sides are expected gains).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.core.interfaces import Drafter, DraftSession, Path, PrefixSession
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, root_only
from foretoken.draft.acceptance import FORGET, HOPE
from foretoken.draft.auto import AutoSession
from foretoken.draft.controller import EXTRA, expected_extra
from foretoken.draft.lookup import LookupDrafter, LookupSession
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession

WEIGHT = 2.0  # the weight, in drafted steps, of what is assumed of a model that has not drafted for a text yet


@dataclass(frozen=True)
class HybridDrafter(WrappedDrafter[Drafter]):
    """A model (`inner`) behind a lookup. Its laws are the model's: any walk matches draft tokens without a q exactly.

    lookup: the lookup. At temperatures above 0 it looks in the text itself alone. The choice of the drafter decides
        there which random numbers are used for what, and a seed must give the same text after any earlier requests.
    sizes: the most nodes of the model's tree besides the root when it is cut at depth 0, 1, ..
    """

    lookup: LookupDrafter
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.lookup.name}+{self.inner.name}"

    @property
    def max_nodes(self) -> int:
        return max(self.lookup.max_nodes, self.inner.max_nodes)

    def open(self, batch: int, slots: int) -> "HybridSession":
        return HybridSession(self.inner.open(batch, slots), self.lookup.open(batch, slots), self.sizes)


def model_of(drafter: Drafter) -> Drafter:
    """Return the drafter behind a lookup, or the `drafter` itself where there is none in front of it."""
    return drafter.inner if isinstance(drafter, HybridDrafter) else drafter


@dataclass
class Brought:
    """What a model's drafts brought to one text: accepted draft tokens, and steps; older steps count less."""

    accepted: float
    steps: float = WEIGHT

    @property
    def gain(self) -> float:
        """The number of draft tokens that are expected to be accepted of its next draft."""
        return self.accepted / self.steps

    def learn(self, accepted: int) -> None:
        """Count one draft, of which `accepted` tokens were accepted."""
        self.accepted = FORGET * self.accepted + accepted
        self.steps = FORGET * self.steps + 1


class HybridSession(WrappedSession[DraftSession]):
    """The sessions of a model and of a lookup. While the model does not draft it reads no text; it catches up later."""

    def __init__(self, inner: DraftSession, lookup: LookupSession, sizes: tuple[int, ...]) -> None:
        """inner: the model's session. lookup: that of the lookup. sizes: as in HybridDrafter."""
        super().__init__(inner)
        self._lookup, self._sizes = lookup, sizes
        self._hope = WEIGHT * sum(HOPE**depth for depth in range(1, len(sizes)))
        self._models: list[Brought] = []
        self._drawn: list[TokenTree] | None = None  # the model's trees of this step, None where it drafted none
        self._taken: list[bool] = []  # per text, whether the model's tree is the one that is scored
        if isinstance(inner, PrefixSession):
            self.read, self.save, self.restore = inner.read, inner.save, inner.restore

    def join(self) -> None:
        super().join()
        self._lookup.join()
        self._models.append(Brought(self._hope))

    def leave(self, row: int) -> None:
        super().leave(row)
        self._lookup.leave(row)
        self._models[row] = self._models[-1]
        self._models.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        # In a batch every node takes time from the other texts, and the model's controller measures how much.
        crowded = len(sequences) > 1 and isinstance(self.inner, AutoSession)
        found, taken = [], []
        for text, seq, model in zip(self._lookup.texts, sequences, self._models, strict=True):
            seq.floors = None  # the model's controller set them for its last draft
            tree = text.draft(seq, self._lookup.store if seq.sampling.temperature == 0 else None)
            looked_up = (1 + text.gain) / (1 + EXTRA[2] * tree.num_drafted)
            found.append(root_only(seq.ids[-1]) if crowded else tree)
            taken.append(crowded or not tree.num_drafted or looked_up < (1 + model.gain) / self._model_steps)
        self._drawn = self._draw(sequences, taken) if any(taken) else None
        if self._drawn is None:
            self._taken = taken
            return found
        if isinstance(self.inner, AutoSession) and self.inner.looking:
            self._taken = [False] * len(sequences)
            return self._drawn
        # A model under a controller may draft nothing: then the lookup's tree is better than none. But where the draw
        # at the root was that there is no draft token, the root has a record of it: the rule must decide over that one.
        self._taken = [mine and tree.siblings[0] is not None for mine, tree in zip(taken, self._drawn, strict=True)]
        drafts = zip(self._taken, self._drawn, found, strict=True)
        return [drawn if mine else tree for mine, drawn, tree in drafts]

    @property
    def _model_steps(self) -> float:
        """The expected time of a step with the model's draft, in plain steps."""
        if isinstance(self.inner, AutoSession):
            return self.inner.controller.costs.drafted_step
        return 1 + expected_extra(self._sizes)[-1]

    def _draw(self, sequences: Seq[Sequence], taken: Seq[bool]) -> list[TokenTree]:
        """Return the model's trees; taken: per text whether the model drafts; if not, its tree is the root alone."""
        limits = [seq.depth_limit for seq in sequences]
        for seq, mine in zip(sequences, taken, strict=True):
            if not mine:
                seq.depth_limit = 0
        try:
            return self.inner.propose(sequences)
        finally:
            for seq, limit in zip(sequences, limits, strict=True):
                seq.depth_limit = limit

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        self._lookup.observe(sequences, trees, paths)
        if self._drawn is None:
            return
        for model, path, mine in zip(self._models, paths, self._taken, strict=True):
            if mine:
                model.learn(len(path) - 1)
        own = [path if mine else (0,) for path, mine in zip(paths, self._taken, strict=True)]  # the others are roots
        self.inner.observe(sequences, self._drawn, own)
