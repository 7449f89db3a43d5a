"""A language model with the target's vocabulary as drafter: the tree grows level by level, one forward a level."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.core.draw_each import draw_each
from foretoken.core.interfaces import Path
from foretoken.core.laws import IID, Law, Opaque, WithoutReplacement
from foretoken.core.policy import LonePolicy, ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.softmax import TINY
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, chain
from foretoken.core.verifier import LawFamily
from foretoken.draft.growth import Growth
from foretoken.draft.rows import ChainRows, DraftRows, TreeRows
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM

UNIFORMS = 4.0  # a node, at hand for a tree that is grown in one call; it is grown level by level if it takes more
CHAIN = 16  # pending ids up to here ride along with the first tree node instead of a forward of their own


@dataclass(frozen=True)
class LMDrafter:
    """Draws each node's children from the model's own next-token distribution.

    vocab_size: the target's; missing columns get probability 0, columns beyond it are dropped before normalising.
    law: how children are drawn at temperature > 0. At temperature 0 they are the likeliest tokens (opaque), since
    every rule then is exact match and likeliest is best.
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

    def open(self, batch: int, slots: int) -> "LMDraftSession":
        return LMDraftSession(self, self.lm.open(batch, slots))


@dataclass(frozen=True)
class Chain:
    """A tree that was drafted in one call: the cache holds the pending ids, and its nodes but the last, in order."""

    num_pending: int
    tree: TokenTree

    def kept(self, accepted: int) -> range:
        """What the cache is to keep of it."""
        return range(self.num_pending + min(accepted, self.tree.num_drafted - 1))


def no_uniforms(rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    """For the likeliest tokens, which take none: a seed then gives the text that it gives without drafts."""
    return torch.zeros(rows, columns, dtype=torch.float64)


class LMDraftSession:
    """The cache of one batch, and the trees of the step under way."""

    def __init__(self, drafter: LMDrafter, rows: DraftRows) -> None:
        self.drafter = drafter
        self.rows = rows
        self.growths: list[Growth] = []
        self._chain: Chain | None = None  # instead of them
        self.pasts: list[Any] = []  # of each row, what its policy wants to know at the next tree
        # Asked once: looking for a protocol's methods takes 40 microseconds.
        shape = drafter.policy if isinstance(drafter.policy, ShapePolicy) else None
        self._chains = rows if isinstance(rows, ChainRows) else None
        self._trees = rows if isinstance(rows, TreeRows) and rows.scores_trees else None
        self._grows = self._trees is not None and isinstance(drafter.policy, LonePolicy)
        self._chain_depth, self._floor = (shape.chain_depth, shape.floor) if shape is not None else (0, 0.0)

    def join(self) -> None:
        self.rows.join()
        self.pasts.append(None)

    def leave(self, row: int) -> None:
        self.rows.leave(row)
        self.pasts[row] = self.pasts[-1]
        self.pasts.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self._chain = self._draft_chain(sequences[0]) if len(sequences) == 1 else None
        if self._chain is not None:
            return [self._chain.tree]
        if self._grows and len(sequences) == 1:
            tree = self._grow_alone(sequences[0])
            if tree is not None:
                return [tree]
        self.growths = []
        tokens, parents = [], []
        for row, seq in enumerate(sequences):
            pending, law = self._pending(row, seq), self._law(seq)
            policy = self.drafter.policy.at(law, seq.sampling.temperature)
            root = policy.root(self.pasts[row])
            frontier = policy.select([root], 0) if seq.depth_left > 0 else []
            builder, scored = TreeBuilder(seq.ids[-1]), {0: len(pending) - 1}
            levels = self._chain_levels(seq)
            uniforms = self._chain_uniforms(seq, law, levels) if levels > 0 else None
            self.growths.append(Growth(policy, law, builder, [root], scored, len(pending), frontier, uniforms))
            tokens.append(pending)
            parents.append(range(-1, len(pending) - 1))
        at = self._tempered_at(sequences[0]) if len(sequences) == 1 else None
        logits = [row[-1:] for row in self._score(tokens, parents, at)]
        depth = 0
        while True:
            depth += 1
            self._draw(sequences, logits, depth)
            if not any(g.frontier for g in self.growths):
                return self._finish(sequences)
            logits = self._score_frontier(at)

    def _tempered_at(self, seq: Sequence) -> float | None:
        """The temperature at which a lone sequence's nodes are scored in one compiled call, 0: not tempered; None where
        they are not."""
        sampling, (growth,) = seq.sampling, self.growths
        if self._trees is None or sampling.moves_scores or seq.shapes_logits:
            return None
        if self.drafter.lm.vocab_size != self.drafter.vocab_size:
            return None
        if growth.law is Opaque and not (growth.policy.weighs and sampling.temperature > 0):
            return 0.0
        return sampling.temperature if sampling.tempers_only else None

    def _score(self, tokens: Seq[Seq[int]], parents: Seq[Seq[int]], at: float | None) -> list[Float[Tensor, "_ v"]]:
        """The scores of nodes, tempered if it says so in the growth."""
        if at is not None and self._trees is not None:
            rows = self._trees.score_tree(0, tokens[0], parents[0], at)
            self.growths[0].tempered = at > 0 and rows is not None
            if rows is not None:
                return [rows]
        return self.rows.score(tokens, parents)

    def _finish(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        """The trees that grew level by level."""
        return [g.finish() for g in self.growths]

    def _law(self, seq: Sequence) -> LawFamily:
        return Opaque if seq.sampling.temperature == 0 else self.drafter.law

    def _pending(self, row: int, seq: Sequence) -> list[int]:
        """Committed ids that the cache has not seen, the root last; all but a few are read."""
        if len(seq.ids) - self.rows.lengths[row] > CHAIN:
            self.rows.extend(row, self._known(seq.ids[self.rows.lengths[row] : -1]))
        return self._known(seq.ids[self.rows.lengths[row] :])

    def _chain_levels(self, seq: Sequence) -> int:
        """Of the next tree, if it is a chain; else none."""
        return min(self._chain_depth, seq.depth_left)

    def _chain_uniforms(self, seq: Sequence, law: LawFamily, levels: int) -> Float[Tensor, "n 1"]:
        """Of a chain all at once: the same ones whether or not it is drawn in one call."""
        return no_uniforms(levels, 1) if law is Opaque else seq.uniforms(levels, 1)

    def _draft_chain(self, seq: Sequence) -> "Chain | None":
        """A lone sequence's chain in one compiled call: what would be drawn level by level. None where it cannot."""
        levels, sampling, law = self._chain_levels(seq), seq.sampling, self._law(seq)
        if self._chains is None or levels < 1 or sampling.moves_scores or seq.shapes_logits:
            return None
        if law is not Opaque and not (law in (IID, WithoutReplacement) and sampling.temperature >= TINY):
            return None
        if law is Opaque and self._floor > 0 and sampling.temperature > 0:
            return None  # the likeliest tokens, and their tempered probabilities too
        if self.drafter.lm.vocab_size != self.drafter.vocab_size:
            return None
        pending = self._pending(0, seq)
        if not self._chains.drafts_chains(0, len(pending) + levels - 1):
            return None
        u = self._chain_uniforms(seq, law, levels)
        temperature, one = 0.0 if law is Opaque else sampling.temperature, law(1)
        tokens, q = self._chains.draft_chain(0, pending, u, temperature, self._floor, sampling.truncation)
        rows = [None] * len(tokens) if law is Opaque else q.unbind()
        records = [Siblings((token,), row, one) for token, row in zip(tokens, rows, strict=True)]
        return Chain(len(pending), chain([seq.ids[-1], *tokens], [*records, None]))

    def _grow_alone(self, seq: Sequence) -> TokenTree | None:
        """A lone sequence's tree in one compiled call: what would grow level by level. None where it cannot."""
        sampling, law, rows = seq.sampling, self._law(seq), self._trees
        if rows is None or law is not IID or not sampling.tempers_only or seq.shapes_logits or seq.depth_left < 1:
            return None
        if self.drafter.lm.vocab_size != self.drafter.vocab_size:
            return None
        policy = self.drafter.policy.at(law, sampling.temperature)
        pending, most = self._pending(0, seq), policy.max_nodes
        if not rows.drafts_chains(0, len(pending) + most):
            return None
        levels, vocab_size, before = seq.depth_left, self.drafter.vocab_size, seq.rng.get_state()
        u = seq.uniforms(1, int(UNIFORMS * most))[0]
        seq.rng.set_state(before)
        grown = cast(LonePolicy, policy).grow_alone(  # asked for in `__init__`: it takes 40 microseconds
            self.pasts[0], seq.ids[-1], levels, vocab_size, u,
            lambda grow: rows.grow_tree(0, pending, levels, most, sampling.temperature, grow),
        )  # fmt: skip
        if grown is None:
            return None
        seq.uniforms(1, grown.num_uniforms)
        scored = {node: len(pending) - 1 + place for place, node in enumerate(grown.scored)}
        self.growths = [Growth(policy, law, TreeBuilder(seq.ids[-1]), list(grown.states), scored, len(pending))]
        return grown.tree

    def _known(self, ids: list[int]) -> list[int]:
        """Ids of the target's padding columns, which the drafter cannot embed, become its last id: a poor context."""
        last = self.drafter.lm.vocab_size - 1
        return [min(token, last) for token in ids] if self.drafter.vocab_size > last + 1 else ids

    def _score_frontier(self, at: float | None) -> list[Float[Tensor, "_ v"]]:
        tokens, parents = [], []
        for g in self.growths:
            first = g.num_pending + len(g.scored) - 1
            tokens.append(self._known([g.builder.tokens[node] for node in g.frontier]))
            parents.append([g.scored[g.builder.parents[node]] for node in g.frontier])
            g.scored.update((node, first + i) for i, node in enumerate(g.frontier))
        return self._score(tokens, parents, at)

    def _draw(self, sequences: Seq[Sequence], logits: list[Float[Tensor, "_ v"]], depth: int) -> None:
        """Draw the children of every frontier node; the new frontier is those that will have children themselves."""
        for seq, g, rows in zip(sequences, self.growths, logits, strict=True):
            nodes, g.frontier = g.frontier, []
            if not nodes:
                continue
            q = self._weights(seq, g, rows, (g.suffix(node) for node in nodes))
            plans = g.policy.plan([g.states[node] for node in nodes], q, g.law)
            planned = [plan for plan in plans if plan is not None]
            if not planned:
                continue
            if len(planned) < len(nodes):
                places = [i for i, plan in enumerate(plans) if plan is not None]
                nodes, q = [nodes[i] for i in places], q[places]
            laws = [plan.law for plan in planned]
            if g.uniforms is None:
                u = seq.uniforms(len(laws), max(law.num_uniforms for law in laws))
            else:
                u = g.uniforms[depth - 1 : depth]
            draws = draw_each(laws, q, u)
            first = len(g.states)
            self._add(g, nodes, laws, q, draws, g.policy.grow(planned, q, draws))
            if depth < seq.depth_left and len(g.states) > first:
                g.frontier = g.policy.select(g.states, first)

    def _add(
        self,
        g: Growth,
        nodes: Seq[int],
        laws: Seq[Law],
        q: Float[Tensor, "m _"],
        draws: Seq[tuple[int, ...]],
        states: Seq[Seq[Any]],
    ) -> None:
        """The children of m nodes, by tokens and columns of q."""
        g.add(nodes, laws, q, draws, states)

    def _weights(
        self, seq: Sequence, g: Growth, logits: Float[Tensor, "m d"], suffixes: Iterable[list[int]]
    ) -> Float[Tensor, "m v"]:
        """q over the target's vocabulary; for opaque children scores, which rank the same, if the policy is content."""
        if g.tempered:
            return logits
        missing = self.drafter.vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        elif missing < 0:
            logits = logits[:, : self.drafter.vocab_size]
        return self._q(seq, g, logits, suffixes)

    def _q(
        self, seq: Sequence, g: Growth, logits: Float[Tensor, "m _"], suffixes: Iterable[list[int]]
    ) -> Float[Tensor, "m _"]:
        """`_weights` from logits of the same columns."""
        if g.law is not Opaque or (g.policy.weighs and seq.sampling.temperature > 0):
            return seq.probabilities(logits, suffixes)
        scores = seq.scores(logits, suffixes)
        return scores.softmax(-1) if g.policy.weighs else scores

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Keep what the cache holds of the accepted path; the rest is pending at the next step."""
        if self._chain is not None:
            self.rows.keep([self._chain.kept(len(paths[0]) - 1)])
            return
        self.pasts = [g.policy.past(g.states) for g in self.growths]
        kept = []
        for g, path in zip(self.growths, paths, strict=True):
            accepted = [g.scored[node] for node in path[1:] if node in g.scored]
            kept.append([*range(g.num_pending), *accepted])
        self.rows.keep(kept)
