"""SLRS, string-level rejection sampling (Timor et al. 2025, Algorithm 3): drafts are strings of exact probability.

At a context the drafter writes its own tokens until the first target token t of the string is settled (longest match).
Then t is proposed, and what was written beyond it is dropped. The law of t is

    psi(t) = sum over the drafts d_1 .. d_i that settle on t of  q(d_1) q(d_2 | d_1) .. q(d_i | d_1 .. d_(i-1))

(Theorem 3.2) over the feasible drafts (vocab/segmentation.py), which are scored in one forward, as a tree after the
context. The next token is drafted afresh after the text with t. So each position is an ordinary proposal with a psi of
its own, and the chain rule holds. The rule string-rejection verifies it, lossless at any temperature.

Contexts, drafts and the trees of psi share nodes: each sequence has one trie of nodes after the committed ids in the
drafter's cache.

Union (Algorithm 1), a baseline, is the same with drafts of one token: psi(t) = q(t) for tokens of both vocabularies,
and nothing is proposed where the drafter draws a token that the target lacks.
"""

from collections.abc import Generator
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import ShapePolicy, TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import PricedSiblings, Siblings, TokenTree, chain
from foretoken.core.verifier import LawFamily
from foretoken.draft.lm import CHAIN
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.vocab.price import Price, Row, Trie
from foretoken.vocab.segmentation import NONE, OPEN, Segmentation, SingleTokens
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.strings import common_prefix
from foretoken.vocab.translation import FIRM, Edge, Translation

NODES = 32  # the most nodes of a plan
MARGIN = 4  # ids at the end of a context that are not committed, since what follows may split them otherwise


@dataclass(frozen=True)
class SLRSDrafter:
    """A drafter with another vocabulary whose drafted strings have an exact probability.

    lm: the drafter's model.
    translation: from the target's vocabulary to the drafter's.
    policy: the shape of the trees, which must be a chain of fixed depth.
    vocab_size: the number of columns of the target's logits; no id beyond it is proposed.
    limit: the most nodes of a plan, see `Segmentation`.
    lookahead: the number of drafter tokens after which a draft ends at the latest, the paper's threshold n; None for no
        limit.
    drafts: the kind of drafts: Segmentation for Algorithm 3, SingleTokens for union.

    Raises ForetokenError for any other shape than a chain of fixed depth.
    """

    lm: CausalLM
    translation: Translation
    policy: TreePolicy
    vocab_size: int
    limit: int = NODES
    lookahead: int | None = None
    drafts: type[Segmentation] = Segmentation

    def __post_init__(self) -> None:
        if not (isinstance(self.policy, ShapePolicy) and self.policy.chain_depth > 0 and self.policy.floor == 0):
            raise ForetokenError("vocab slrs and union draft a fixed number of tokens in a row: choose e.g. chain:4.")

    @property
    def name(self) -> str:
        return self.lm.name

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(1),)

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    @cached_property
    def segmentation(self) -> Segmentation:
        """The drafts that settle on each target token, for all sessions."""
        return self.drafts(self.translation, self.lm.vocab_size, self.vocab_size, self.limit, self.lookahead)

    def open(self, batch: int, slots: int) -> "SLRSSession":
        return SLRSSession(self, batch, 2 * slots)


def slrs(source: TranslatedSource, policy: TreePolicy, law: LawFamily) -> SLRSDrafter:
    """Return the drafter of Algorithm 3.

    source: its weights and translation.
    policy: the shape of the trees, a chain of fixed depth.
    law: not used; draws are made as the algorithm says.
    """
    return SLRSDrafter(source.rewound, source.translation, policy, source.vocab_size)


def union(source: TranslatedSource, policy: TreePolicy, law: LawFamily) -> SLRSDrafter:
    """Return the drafter of Algorithm 1; source, policy, law: as in `slrs`."""
    return replace(slrs(source, policy, law), drafts=SingleTokens)


class SLRSSession:
    """A session of SLRS or union."""

    def __init__(self, drafter: SLRSDrafter, batch: int, room: int) -> None:
        """Open a session of `drafter`.

        batch: the largest number of sequences.
        room: the slots of each sequence in the drafter's cache, to begin with.
        """
        self.drafter = drafter
        self.segmentation = drafter.segmentation
        self._batch, self._room = batch, room
        self.rows: Rows = drafter.lm.open(batch, room)
        self._rows: list[Row] = []

    def join(self) -> None:
        self.rows.join()
        self._rows.append(Row(self.drafter.translation, self.drafter.drafts.heals))

    def leave(self, row: int) -> None:
        self.rows.leave(row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        trees: list[TokenTree | None] = [None] * len(sequences)
        writing = {}
        for r, (row, seq) in enumerate(zip(self._rows, sequences, strict=True)):
            self._begin(r, row, seq)
            writing[r] = self._write(row, seq)
        while writing:
            for r, steps in list(writing.items()):
                try:
                    next(steps)
                except StopIteration as done:
                    trees[r] = done.value
                    del writing[r]
            self.score()
        return [tree for tree in trees if tree is not None]

    def _begin(self, r: int, row: Row, seq: Sequence) -> None:
        if not row.ids:
            row.follow(seq.ids)
            row.sampling = seq.sampling.without_ids()
        elif row.seen < len(seq.ids):  # there were steps in which no draft was asked for
            row.follow(seq.ids)
            self._forget(r, row)
        new = row.ids[len(row.committed) :]
        if len(new) > CHAIN:
            self._reserve(len(row.ids))
            row.committed += new[:-MARGIN]
            self.rows.extend(r, new[:-MARGIN])

    def _write(self, row: Row, seq: Sequence) -> Generator[None, None, TokenTree]:
        """Draft for one sequence and return its tree. Yields where nodes that wait in its trie must be scored first."""
        greedy = seq.sampling.temperature == 0
        following = copy(row)
        tokens, records = [seq.ids[-1]], []
        while len(tokens) <= min(self.drafter.policy.max_nodes - 1, seq.depth_left):
            ids, edge = following.ids, following.edge
            done = len(row.committed)
            if ids[:done] != row.committed or len(ids) == done:
                break  # the text's new end splits committed ids otherwise
            node = -1
            for token in ids[done:]:
                node = row.trie.grow(node, token)
            if node >= len(row.trie.q):
                yield
            drafted = yield from self._string(row, seq, node, edge)
            if drafted is None:
                break
            token, price = drafted
            draws = () if token == NONE else (token,)
            records.append(
                Siblings(draws, None, Opaque(1)) if greedy else PricedSiblings(draws, None, Opaque(1), price)
            )
            if token == NONE:
                return chain(tokens, records)
            tokens.append(token)
            if not self.drafter.translation.source.spell([token]):
                break
            following.follow([*seq.ids, *tokens[1:]])
        return chain(tokens, [*records, None])

    def _string(
        self, row: Row, seq: Sequence, node: int, edge: Edge
    ) -> Generator[None, None, tuple[int, Price] | None]:
        """Sample one draft and return (its first target token or NONE, its price); None where none may be drafted.

        node: that of the context's last drafter id, which is scored.
        edge: the end of the context.
        """
        state, draft, at, greedy = b"", [], node, seq.sampling.temperature == 0
        drafted = 0  # tokens of the draft, without one that was taken back and is written again
        while True:
            again = FIRM if draft else edge
            weights, nothing = row.trie.q[at], -np.inf if greedy else 0.0
            if again.taken:
                weights = np.where(self.segmentation.closed(again), nothing, weights)
                if weights.max() == nothing:
                    return None
            if greedy:
                token = int(weights.argmax())  # of NaN, if there is one
                if not np.isfinite(weights[token]):
                    raise NotFiniteError(f"Model {self.drafter.name} gave NaN or infinite logits.")
            else:
                token = int(draw_iid(torch.from_numpy(weights)[None], seq.rng.uniforms(1, 1)))
            code = int(self.segmentation.outcomes(state, again, self.segmentation.ends(drafted))[token])
            if code > OPEN:
                break
            state = self.segmentation.states[OPEN - code]
            draft.append(token)
            drafted += bool(state)
            at = row.trie.grow(at, token)
            if at >= len(row.trie.q):
                yield
        price = Price(self.segmentation, row, self.score, node, edge)
        if greedy:
            return code, price  # at temperature 0 any proposal will do, and its probability is not needed
        plan = None if code == NONE else self.segmentation.plan(code, edge)
        if plan is None or not plan.has(draft):
            return NONE, price
        price.plant(plan)
        return code, price

    def score(self) -> None:
        """Score the nodes that wait in all tries, in one forward."""
        waiting = [row.trie.waiting for row in self._rows]
        if all(some.start == some.stop for some in waiting):
            return
        self._reserve(max(len(row.committed) + len(row.trie.tokens) for row in self._rows))
        for row, rows in zip(self._rows, self._logits(waiting), strict=True):
            if len(rows):
                row.trie.q += list(self._q(row, rows))

    def _logits(self, parts: Seq[slice]) -> list[Float[Tensor, "n d"]]:
        """Return the logits after a part of each trie's nodes, in one forward."""
        tries = [(row.trie, part) for row, part in zip(self._rows, parts, strict=True)]
        return self.rows.score(
            [trie.tokens[part] for trie, part in tries], [trie.parents[part] for trie, part in tries]
        )

    def _q(self, row: Row, logits: Float[Tensor, "n d"]) -> np.ndarray:
        """Return what the next tokens are chosen by [n, d]: distributions, float64, or scores at temperature 0."""
        if row.sampling.temperature == 0:
            return logits.float().cpu().numpy()
        q = row.sampling(logits).cpu().numpy().astype(np.float64)
        return q / q.sum(-1, keepdims=True)

    def _reserve(self, needed: int) -> None:
        """Open rows of 2 * `needed` slots, and read everything again, where `needed` do not fit."""
        if needed <= self._room:
            return
        self._room = 2 * needed
        self.rows = self.drafter.lm.open(self._batch, self._room)
        for row in self._rows:
            self.rows.extend(self.rows.join(), row.committed)
        self._logits([slice(len(row.trie.q)) for row in self._rows])

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Keep the nodes that the new context goes through; forget committed ids that are now split otherwise."""
        kept: list[Path] = []
        margin = MARGIN if self.drafter.translation.dest.longest > 1 else 0
        for row, seq in zip(self._rows, sequences, strict=True):
            row.follow(seq.ids)
            done, last = len(row.committed), len(row.ids) - 1 - margin
            path: list[int] = []
            if row.ids[:done] == row.committed:
                for token in row.ids[done:last]:
                    node = row.trie.child(path[-1] if path else -1, token)
                    if node is None:
                        break
                    path.append(node)
            kept.append(tuple(path))
        self.rows.keep(kept)
        for r, (row, nodes) in enumerate(zip(self._rows, kept, strict=True)):
            row.committed += [row.trie.tokens[node] for node in nodes]
            self._forget(r, row)
            row.trie = Trie()

    def _forget(self, r: int, row: Row) -> None:
        """Forget the committed ids that are now split otherwise; r: the index of the row."""
        agreed = min(common_prefix(row.committed, row.ids), len(row.ids) - 1)
        if agreed < len(row.committed):
            del row.committed[agreed:]
            self.rows.cut(r, agreed)
