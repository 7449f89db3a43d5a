"""The decoding loop. It sees interfaces only; plain decoding is the same loop with trees of one node."""

import math
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import DraftError, ForetokenError, NotFiniteError
from foretoken.core.interfaces import (
    Drafter,
    DraftSession,
    FeatureDrafter,
    FeatureSession,
    FeatureTarget,
    LearningSession,
    Path,
    SamplingSession,
    Target,
    TargetSession,
)
from foretoken.core.laws import draw_iid
from foretoken.core.sequence import Sequence, Step
from foretoken.core.shapes import Float
from foretoken.core.softmax import likeliest
from foretoken.core.tree import TokenTree, root_only
from foretoken.core.verifier import Verifier
from foretoken.core.walk import Probabilities, draw, follow, walk_of

T = TypeVar("T")
# Called at every step for every sequence, before its tokens are committed: with the drafted tree, p after any of its
# nodes, the accepted path, and the token after it.
Observer = Callable[[Sequence, TokenTree, Probabilities, Path, int], None]


class DraftFailedWarning(RuntimeWarning):
    """A drafter raised in mid-generation; decoding went on without it."""


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


class Decoder:
    """One batch of sequences that join and leave between steps; row i of every cache is `sequences[i]`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        batch: int,
        slots: int,
        observer: Observer | None = None,
    ) -> None:
        """Room for `batch` sequences of `slots` ids each, prompt, output and one tree's nodes together."""
        self.name = target.name
        self.observer = observer
        self.walk = walk_of(verifier)
        self.sequences: list[Sequence] = []
        self.target = _open(target, drafter, batch, slots)
        self.drafter: DraftSession = drafter.open(batch, slots)
        # Asked once: looking for a protocol's methods takes 40 microseconds.
        self._features = self.target if isinstance(self.target, FeatureSession) else None
        self._sampler = self.target if isinstance(self.target, SamplingSession) else None
        self._learner = self.drafter if isinstance(self.drafter, LearningSession) else None

    def join(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.target.join()
        self.drafter.join()

    def leave(self, sequence: Sequence) -> None:
        row = self.sequences.index(sequence)
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()
        self.target.leave(row)
        self.drafter.leave(row)

    def step(self) -> list[tuple[Sequence, Step]]:
        """One target forward for every sequence; those that finished have left when it returns."""
        sequences = list(self.sequences)
        trees = self._drafting(lambda: self._propose(sequences))
        alone = len(sequences) == 1 and self.observer is None  # whose fused calls keep to themselves what they computed
        outcome = self._alone(sequences[0], trees[0]) if alone else None
        outcomes = [outcome] if outcome else self._scored(sequences, trees)
        steps, paths = [], []
        for seq, tree, (path, token) in zip(sequences, trees, outcomes, strict=True):
            steps.append((seq, seq.commit(tree, path, token)))
            paths.append(path)
        self.target.keep(paths)
        self._drafting(lambda: self.drafter.observe(sequences, trees, paths))
        for seq in sequences:
            if seq.finished:
                self.leave(seq)
        return steps

    def _propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        if self._learner is not None and self._features is not None:
            self._learner.learn(self._features.features(sequences))
        return self.drafter.propose(sequences)

    def _alone(self, seq: Sequence, tree: TokenTree) -> tuple[Path, int] | None:
        """A lone sequence's step, where the target has a call for it."""
        if self._sampler is None:
            return None
        # A root may have no child and still a record, of a law that happened to draw nothing: that is for the rule.
        if tree.siblings[0] is None:
            token = self._sampler.sample(seq)
            return None if token is None else ((0,), token)
        rows = self._sampler.tempered(seq, tree)
        if rows is None:
            return None
        if seq.sampling.temperature == 0:
            return self._follow(tree, rows, rows)
        return self._decide(seq, tree, lambda nodes: rows[nodes.start : nodes.stop])

    def _scored(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> list[tuple[Path, int]]:
        """Each sequence's path and the token after it, by one forward; the observer sees them."""
        scores = self.target.score(sequences, trees)
        outcomes = self._walks(sequences, trees, scores)
        if self.observer is not None:
            for seq, tree, logits, outcome in zip(sequences, trees, scores, outcomes, strict=True):
                self.observer(seq, tree, self._probabilities(seq, tree, logits), *outcome)
        return outcomes

    def _walks(
        self, sequences: Seq[Sequence], trees: Seq[TokenTree], scores: Seq[Float[Tensor, "_ v"]]
    ) -> list[tuple[Path, int]]:
        """Each sequence's path and the token after it."""
        plain = all(tree.siblings[0] is None for tree in trees)
        if not (plain and _one_sampling(sequences)):
            return [self._walk(*each) for each in zip(sequences, trees, scores, strict=True)]
        rows = scores[0] if len(scores) == 1 else torch.cat(list(scores))
        sampling = sequences[0].sampling
        try:
            if sampling.temperature == 0:
                return [((0,), token) for token in likeliest(sampling.scores(rows)).tolist()]
            p = sampling(rows)
        except NotFiniteError as error:
            raise self._explained(rows) from error
        u = torch.cat([seq.uniforms(1, 1) for seq in sequences])  # as `draw` takes them, one sequence at a time
        return [((0,), token) for token in draw_iid(p, u)[:, 0].tolist()]

    def _walk(self, seq: Sequence, tree: TokenTree, logits: Float[Tensor, "n v"]) -> tuple[Path, int]:
        if seq.sampling.temperature == 0 and not seq.sampling.reads_prefix:
            return self._follow(tree, seq.scores(logits, ()), logits)
        return self._decide(seq, tree, self._probabilities(seq, tree, logits))

    def _follow(self, tree: TokenTree, scores: Float[Tensor, "n v"], logits: Float[Tensor, "n v"]) -> tuple[Path, int]:
        # Every p is one-hot, and so every rule is exact match: docs/losslessness.md, section 3.
        try:
            return follow(tree, likeliest(scores).tolist())
        except NotFiniteError as error:
            raise self._explained(logits) from error

    def _decide(self, seq: Sequence, tree: TokenTree, probabilities: Probabilities) -> tuple[Path, int]:
        try:
            return self.walk(tree, probabilities, seq.rng)
        except DraftError as error:
            self._give_up(error.__cause__ or error)
            last = error.path[-1]
            return error.path, draw(probabilities(range(last, last + 1))[0], seq.rng)

    def _probabilities(self, seq: Sequence, tree: TokenTree, logits: Float[Tensor, "n v"]) -> Probabilities:
        # A plain annotation: one with a shape would be built anew at every step.
        def p(nodes: range) -> Tensor:
            rows = logits[nodes.start : nodes.stop]
            suffixes = ((tree.tokens[i] for i in tree.path_to(node)[1:]) for node in nodes)
            try:
                return seq.probabilities(rows, suffixes)
            except NotFiniteError as error:
                raise self._explained(rows) from error

        return p

    def _explained(self, logits: Float[Tensor, "m v"]) -> NotFiniteError:
        if bool(((logits < math.inf).all(-1) & logits.isfinite().any(-1)).all()):
            return NotFiniteError("The logit bias or a logits processor left no token to choose from.")
        return NotFiniteError(f"Model {self.name} gave NaN or infinite logits: check its weights and dtype.")

    def _drafting(self, call: Callable[[], T]) -> T:
        """A drafter that fails costs speed: warn once and go on with plain decoding."""
        try:
            return call()
        except Exception as error:
            self._give_up(error)
            return call()

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(self.drafter, NoDrafter):
            warnings.warn(
                f"The drafter failed ({type(error).__name__}: {error}); going on with plain decoding.",
                DraftFailedWarning,
                stacklevel=4,
            )
        self.drafter, self._learner = NoDrafter(), None


def _one_sampling(sequences: Seq[Sequence]) -> bool:
    """Whether all take the same map from logits to p, and one that does not look at their ids."""
    first = sequences[0].sampling
    return not first.reads_prefix and all(seq.sampling is first for seq in sequences)


def _open(target: Target, drafter: Drafter, batch: int, slots: int) -> TargetSession:
    """The target's session, with the hidden states that the drafter reads."""
    if not isinstance(drafter, FeatureDrafter):
        return target.open(batch, slots)
    if not isinstance(target, FeatureTarget):
        raise ForetokenError(f"Drafter {drafter.name} reads hidden states, which target {target.name} does not give.")
    return target.open_with_features(batch, slots, drafter.feature_layers)
