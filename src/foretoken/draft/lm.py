"""A language model with the target's vocabulary as drafter: a tree grows level by level, by at most a forward each."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.interfaces import DraftSession, Path
from foretoken.core.laws import Law, Opaque, draw_each, weights_of
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree, TreeBuilder
from foretoken.core.verifier import LawFamily
from foretoken.draft.fused import fused_chain, suits
from foretoken.draft.growth import Growth
from foretoken.draft.source import Source
from foretoken.heads.lm import HeadLM
from foretoken.heads.rows import HeadRows
from foretoken.heads.serial import SerialRows
from foretoken.models.causal_lm import CausalLM
from foretoken.models.fused_rows import FusedRows
from foretoken.models.rows import Rows

CHAIN = 16  # so many unread ids are read in the same forward as the root; more get a forward of their own
FAINT = -1e15  # the least score where there are constraints; beside an ordinary score its probability is 0


@dataclass(frozen=True)
class LMDrafter:
    """Draws each node's children from the model's own next-token distribution.

    lm: the model, or a draft head.
    policy: the tree policy.
    law: how children are drawn at temperature > 0. At temperature 0 they are the likeliest tokens (opaque), since
        every rule is exact match then, by which the likeliest are accepted most.
    vocab_size: that of the target; columns that the model lacks get probability 0, columns beyond it are dropped
        before probabilities are made.
    """

    lm: CausalLM | HeadLM
    policy: TreePolicy
    law: LawFamily
    vocab_size: int

    @property
    def name(self) -> str:
        return self.lm.name

    @property
    def laws(self) -> tuple[Law, ...]:
        return self.policy.laws(self.law)

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    def open(self, batch: int, slots: int) -> DraftSession:
        return LMDraftSession(self, self.lm.open(batch, slots))


def same(source: Source, policy: TreePolicy, law: LawFamily) -> LMDrafter:
    """Return the drafter of a language model with the target's vocabulary; source, policy, law: as in `recipe.Kind`."""
    return LMDrafter(source.model, policy, law, source.vocab_size)


class LMDraftSession:
    """The drafter's cache of one batch, and the trees of the present step.

    Trees grow level by level, all sequences of the batch together. For a single sequence compiled calls may do the same
    in less time; `__init__` finds out which of them the rows have.
    """

    def __init__(self, drafter: LMDrafter, rows: Rows | HeadRows) -> None:
        """drafter: whose trees are drafted. rows: the cache of its model, with no row in use."""
        self.drafter = drafter
        self.rows = rows
        self.growths: list[Growth] = []
        self.pasts: list[Any] = []  # per sequence, what `TreePolicy.past` returned for its last tree
        shape = drafter.policy if isinstance(drafter.policy, ShapePolicy) else None
        self._chain_depth, self._floor = (shape.chain_depth, shape.floor) if shape else (0, 0.0)
        same_vocabulary = drafter.lm.vocab_size == drafter.vocab_size
        self._chains = rows if same_vocabulary and isinstance(rows, FusedRows | SerialRows) else None
        self._scoring = rows if same_vocabulary and isinstance(rows, FusedRows) else None
        if isinstance(rows, Rows):  # then it is a PrefixSession
            self.save, self.restore = rows.save, rows.restore
            self.read = self._read

    def join(self) -> None:
        self.rows.join()
        self.pasts.append(None)

    def leave(self, row: int) -> None:
        self.rows.leave(row)
        self.pasts[row] = self.pasts[-1]
        self.pasts.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self.growths = [self._begin(row, seq) for row, seq in enumerate(sequences)]
        if len(sequences) == 1 and self._chains is not None and suits(sequences[0], self.growths[0]):
            tree = fused_chain(self._chains, sequences[0], self.growths[0], self._pending(0, sequences[0]))
            if tree is not None:
                return [tree]
        while any(chosen := [self._choose(seq, g) for seq, g in zip(sequences, self.growths, strict=True)]):
            weights = self._weights_after(sequences, chosen)
            for seq, g, nodes, q in zip(sequences, self.growths, chosen, weights, strict=True):
                if nodes:
                    self._draw(seq, g, nodes, q)
        return self._finish(sequences)

    def _begin(self, row: int, seq: Sequence) -> Growth:
        """Return a new tree of one sequence with its root alone; row: the index of the sequence."""
        law = Opaque if seq.sampling.temperature == 0 else self.drafter.law
        policy = self.drafter.policy.at(law, seq.sampling.temperature)
        root = policy.root(self.pasts[row])
        g = Growth(policy, law, TreeBuilder(seq.ids[-1]), [root])
        g.allowed = self._deepest(seq) >= 1
        if not g.allowed:
            return g
        g.floor = self._floor
        # Floors of 0 end nothing. For a text that is alone they are kept, so that the tree records `sure`, from which
        # the controller learns.
        if self._chain_depth and seq.floors and (any(seq.floors) or len(self.pasts) == 1):
            g.floors = seq.floors
        g.frontier = policy.select([root], 0)
        levels = min(self._chain_depth, seq.depth_left)
        if levels > 0:
            # A chain takes the uniforms of all its levels at once, also of levels that it does not reach, so that a
            # compiled call draws by the same ones. Opaque draws take none, so that a seed gives the text that it gives
            # without drafts.
            g.uniforms = torch.zeros(levels, 1, dtype=torch.float64) if law is Opaque else seq.rng.uniforms(levels, 1)
        return g

    def _choose(self, seq: Sequence, g: Growth) -> list[int]:
        """Return the nodes of the lowest level that are to have children."""
        nodes, g.frontier = g.frontier, []
        return nodes

    def _weights_after(self, sequences: Seq[Sequence], nodes: Seq[list[int]]) -> list[Float[Tensor, "_ _"]]:
        """Return q after some nodes of each sequence, per sequence [m, v], by one forward.

        nodes: per sequence the nodes, which may be none. Where they are the root alone, the committed ids that the
            cache does not have yet are read in the same forward.
        """
        tokens: list[Seq[int]] = []
        parents: list[Seq[int]] = []
        for row, (seq, g, wanted) in enumerate(zip(sequences, self.growths, nodes, strict=True)):
            if wanted == [0]:
                pending = self._pending(row, seq)
                g.num_pending, g.scored = len(pending), {0: len(pending) - 1}
                tokens.append(pending)
                parents.append(range(-1, len(pending) - 1))
                continue
            first = g.num_pending + len(g.scored) - 1 if g.scored else 0
            tokens.append(self._known([g.builder.tokens[node] for node in wanted]))
            parents.append([g.scored[g.builder.parents[node]] for node in wanted])
            g.scored.update((node, first + i) for i, node in enumerate(wanted))
        if len(sequences) == 1:
            q = self._weights_at_once(sequences[0], self.growths[0], tokens[0], parents[0])
            if q is not None:
                return [q[-len(nodes[0]) :]]
        weights = []
        scores = self._score(tokens, parents)
        for seq, g, logits, wanted in zip(sequences, self.growths, scores, nodes, strict=True):
            logits = logits[-1:] if wanted == [0] else logits
            weights.append(self._weights(seq, g, logits, [g.suffix(node) for node in wanted]) if wanted else logits)
        return weights

    def _weights_at_once(
        self, seq: Sequence, g: Growth, tokens: Seq[int], parents: Seq[int]
    ) -> Float[Tensor, "n v"] | None:
        """Return `_weights` after new nodes by one compiled call; None if there is no such call, or q is not finite.

        tokens: the ids of the new nodes. parents: their indices among the scored nodes, as `Rows.score` takes them.
        """
        if self._scoring is None or not seq.softmax_only:
            return None
        if g.needs_probabilities(seq.sampling):
            return self._scoring.score_tree(0, tokens, parents, seq.sampling.temperature)
        scores = self._scoring.score_tree(0, tokens, parents, 0.0)
        return scores.softmax(-1) if g.weighs and scores is not None else scores

    def _score(self, tokens: Seq[Seq[int]], parents: Seq[Seq[int]]) -> list[Float[Tensor, "_ _"]]:
        """Return the model's logits after new nodes of each sequence; tokens, parents: as in `Rows.score`."""
        return self.rows.score(tokens, parents)

    def _pending(self, row: int, seq: Sequence) -> list[int]:
        """Return the committed ids that the cache does not have, the root last; if they are many, read all but the root
        first."""
        if len(seq.ids) - self.rows.lengths[row] > CHAIN:
            self.rows.extend(row, self._known(seq.ids[self.rows.lengths[row] : -1]))
        return self._known(seq.ids[self.rows.lengths[row] :])

    def _read(self, row: int, sequence: Sequence, end: int) -> None:
        self.rows.extend(row, self._known(sequence.ids[self.rows.lengths[row] : end]))

    def _known(self, ids: list[int]) -> list[int]:
        """Return ids that the drafter can embed: the target's padding ids beyond its vocabulary become its last id."""
        last = self.drafter.lm.vocab_size - 1
        return [min(token, last) for token in ids] if self.drafter.vocab_size > last + 1 else ids

    def _weights(
        self, seq: Sequence, g: Growth, logits: Float[Tensor, "m d"], suffixes: Iterable[list[int]]
    ) -> Float[Tensor, "m _"]:
        """Return q over the target's vocabulary [m, v]; for opaque children scores, unless the policy weighs.

        logits: the drafter's, after m nodes [m, d]. suffixes: per node the drafted ids from below the root down to it.
        """
        missing = self.drafter.vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        elif missing < 0:
            logits = logits[:, : self.drafter.vocab_size]
        return self._q(seq, g, logits, suffixes)

    def _q(
        self, seq: Sequence, g: Growth, logits: Float[Tensor, "m _"], suffixes: Iterable[list[int]]
    ) -> Float[Tensor, "m _"]:
        """Return `_weights` from logits that have the columns of q already.

        Constraints may forbid all tokens that the drafter has: then the other allowed tokens are equally likely.
        """
        if seq.sampling.constraints:
            logits = (logits if logits.dtype == torch.float64 else logits.float()).clamp(min=FAINT)
        if g.needs_probabilities(seq.sampling):
            return seq.probabilities(logits, suffixes)
        scores = seq.scores(logits, suffixes)
        return scores.softmax(-1) if g.weighs else scores

    def _draw(self, seq: Sequence, g: Growth, nodes: list[int], q: Float[Tensor, "m _"]) -> None:
        """Draw the children of some nodes of one level; the new frontier is those that will have children themselves.

        nodes: the m nodes. q: the drafter's weights after them [m, _].
        """
        g.depth += 1
        plans = g.policy.plan([g.states[node] for node in nodes], q, g.law)
        planned = [plan for plan in plans if plan is not None]
        if not planned:
            return
        if len(planned) < len(nodes):
            places = [i for i, plan in enumerate(plans) if plan is not None]
            nodes, q = [nodes[i] for i in places], q[places]
        laws = [plan.law for plan in planned]
        drawn_by = [g.decided.get(node, law) for node, law in zip(nodes, laws, strict=True)]
        if g.uniforms is None:
            u = seq.rng.uniforms(len(nodes), max(law.num_uniforms for law in drawn_by))
        else:
            u = g.uniforms[g.depth - 1 : g.depth]
        draws = draw_each(drawn_by, q, u)
        first = len(g.states)
        states = g.policy.grow(planned, q, draws)
        weights = weights_of(draws, q).tolist() if g.asks else None
        g.add(nodes, laws, *self._of_target(g, q, draws), states, weights)
        if g.depth < self._deepest(seq) and len(g.states) > first:
            g.frontier = g.select(first)

    def _deepest(self, seq: Sequence) -> int:
        """Return the largest depth of the sequence's next tree."""
        return seq.depth_left

    def _of_target(
        self, g: Growth, q: Float[Tensor, "m _"], draws: list[tuple[int, ...]]
    ) -> tuple[Float[Tensor, "m _"], list[tuple[int, ...]]]:
        """Return q and the draws of m nodes in the ids of the target's vocabulary, for drafters with other columns."""
        return q, draws

    def _finish(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        """Return the grown trees."""
        return [g.finish() for g in self.growths]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Keep in the cache what it has of the accepted paths; the other accepted ids are read at the next step."""
        pasts = zip(self.growths, self.pasts, strict=True)
        self.pasts = [g.policy.past(g.states) if g.allowed else past for g, past in pasts]
        kept = [
            [*range(g.num_pending), *(g.scored[node] for node in path[1:] if node in g.scored)]
            for g, path in zip(self.growths, paths, strict=True)
        ]
        self.rows.keep(kept)
