"""The decoding loop. It depends on interfaces only; plain decoding is the same loop with trees of one node."""

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import Tensor

from foretoken.core.default_device import on_cpu_by_default
from foretoken.core.errors import DraftError
from foretoken.core.interfaces import (
    Drafter,
    DraftSession,
    FeatureDrafter,
    GuestSession,
    LearningSession,
    Path,
    Target,
)
from foretoken.core.permitted import permitted
from foretoken.core.random import Random
from foretoken.core.sequence import Sequence, Step
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree, root_only
from foretoken.core.verifier import Verifier
from foretoken.core.walk import NodeScores, walk_of

P = ParamSpec("P")
T = TypeVar("T")
# Called at every step for every sequence, before its tokens are committed, with the sequence, the tree that was scored
# (without draft tokens that a grammar forbids), the scores of its nodes, the accepted path, and the id after it.
Observer = Callable[[Sequence, TokenTree, NodeScores, Path, int], None]


class DraftFailedWarning(RuntimeWarning):
    """A drafter raised an error during generation; decoding goes on without it."""


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding: every tree is its root. It has no state, so it is its own session."""

    name: str = "none"
    laws: tuple[()] = ()
    max_nodes: int = 1

    def open(self, batch: int, slots: int) -> DraftSession:
        return self

    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [root_only(seq.ids[-1]) for seq in sequences]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None: ...


def no_drafter(*_: object) -> NoDrafter:
    """Return the drafter of plain decoding; the arguments, those of every `Kind.make`, are not used."""
    return NoDrafter()


class Decoder:
    """One batch of sequences that join and leave between steps; row i of every cache belongs to `sequences[i]`.

    gave_up: whether the drafter failed, so that the rest is decoded without it.
    """

    @on_cpu_by_default
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        batch: int,
        slots: int,
        observer: Observer | None = None,
    ) -> None:
        """Open a session of the target and one of the drafter.

        target, drafter: the two models, or whatever else scores and proposes.
        verifier: the rule, lossless for the drafter's laws.
        batch: the most sequences at a time.
        slots: the most tokens of a sequence: prompt, output and the nodes of one tree together.
        observer: is called at every step for every sequence; None: nothing is.
        """
        self.observer = observer or (lambda *_: None)
        self.walk = walk_of(verifier)
        self.gave_up = False
        self.sequences: list[Sequence] = []
        layers = drafter.feature_layers if isinstance(drafter, FeatureDrafter) else ()
        self.target = target.open(batch, slots, layers)
        self.drafter: DraftSession = drafter.open(batch, slots)
        if isinstance(self.drafter, GuestSession):
            self.drafter.share(self.target)
        self._learner = self.drafter if isinstance(self.drafter, LearningSession) else None
        self._drafted: list[TokenTree] = []  # the trees of the present step, as the drafter proposed them
        self._places: list[Seq[int]] = []  # per scored tree, the index of each of its nodes in the drafted tree

    def join(self, sequence: Sequence) -> None:
        """Add a sequence to the batch; what is unread of its prompt is read at the next step."""
        self.sequences.append(sequence)
        self.target.join()
        self.drafter.join()

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch, whether or not it is finished."""
        row = self.sequences.index(sequence)
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()
        self.target.leave(row)
        self.drafter.leave(row)

    @on_cpu_by_default
    def step(self) -> list[tuple[Sequence, Step]]:
        """Take one step, with one forward of the target for all sequences.

        Returns (sequence, what the step brought to it) for every one; those that are finished have left the batch.
        """
        sequences, steps, paths = list(self.sequences), [], []
        trees = self._propose(sequences)  # one token tree per sequence, root = the last committed token
        scores = self.target.score(sequences, trees)  # one forward for the whole batch
        for seq, tree, score in zip(sequences, trees, scores, strict=True):
            path, token = self._decide(tree, score, seq.rng)  # the accepted nodes, and the token after them
            self.observer(seq, tree, score, path, token)
            steps.append((seq, seq.commit(tree, path, token)))
            paths.append(path)
        self.target.keep(paths)  # the accepted path stays in the cache, nothing else is copied
        self._guard(self._observe, sequences, trees, paths)
        for seq in sequences:
            if seq.finished:
                self.leave(seq)
        return steps

    def _propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        """Return the drafter's trees; that the target cannot compute its states is no failure of the drafter."""
        features = None if self._learner is None else self.target.features(sequences)
        return self._guard(self._draft, sequences, features)

    def _draft(self, sequences: Seq[Sequence], features: list[Float[Tensor, "_ f"]] | None) -> list[TokenTree]:
        """Have the drafter draft, from the target's states where it learns from them, and drop forbidden nodes."""
        if self._learner is not None and features is not None:
            self._learner.learn(features)
        self._drafted = self.drafter.propose(sequences)
        allowed = [permitted(*each) for each in zip(sequences, self._drafted, strict=True)]
        self._places = [places for _, places in allowed]
        return [tree for tree, _ in allowed]

    def _observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Pass the accepted paths to the drafter, as nodes of the trees that it drew, forbidden nodes included."""
        whole = [tuple(places[node] for node in path) for places, path in zip(self._places, paths, strict=True)]
        self.drafter.observe(sequences, self._drafted, whole)

    def _decide(self, tree: TokenTree, scores: NodeScores, rng: Random) -> tuple[Path, int]:
        """Walk one tree; if the drafter fails in it, the accepted nodes stay, and the next token is drawn from p."""
        try:
            return self.walk(tree, scores, rng)
        except DraftError as error:
            self._give_up(error.__cause__ or error)
            return error.path, scores.draw(error.path[-1], rng)

    def _guard(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call of the drafter; if it fails, warn once and go on with plain decoding."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._give_up(error)
            return call(*args, **kwargs)

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(self.drafter, NoDrafter):
            self.gave_up = True
            blamed = "The drafter"
            if any(sequence.sampling.moves_scores for sequence in self.sequences):
                blamed = "The drafter, or a processor or logit bias that was applied to its scores,"
            warnings.warn(
                f"{blamed} failed ({type(error).__name__}: {error}); going on with plain decoding.",
                DraftFailedWarning,
                stacklevel=4,
            )
        self.drafter, self._learner = NoDrafter(), None
