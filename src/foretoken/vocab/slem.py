"""SLEM, string-level exact match (Timor et al. 2025, Algorithm 2): drafts are strings, split again for the target.

The drafter grows a token tree in its own ids. Every path of that tree is a string. The strings, split as the target's
tokenizer splits them, merge into one tree of target ids. The probability psi of such a target token under the drafter
is not known. So the law is opaque and the target's own draw decides (exact match), which is lossless at any temperature
for any strings. A sampled token is accepted with probability sum p psi (Table 3). The drafter's likeliest token x is
accepted with probability p(x), which is mostly more.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.policy import TreePolicy
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree, opaque_tree
from foretoken.core.verifier import LawFamily
from foretoken.draft.lm import LMDrafter, LMDraftSession
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.strings import Followed, common_prefix, continuation
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import Vocabulary

WIDER = 2  # target nodes allowed per drafter node, for drafters with longer tokens; more are cut off
ENDLESS = 2**31


@dataclass(frozen=True)
class SLEMDrafter:
    """A drafter with another vocabulary whose drafted strings are matched exactly.

    lm: the drafter's model.
    translation: from the target's vocabulary to the drafter's.
    policy, law: the shape of the tree in the drafter's own tokens, and the kind of laws by which it is drawn.
    vocab_size: the number of columns of the target's logits; no id beyond it is proposed.
    align: gives the target's ids of drafted text; called and described as `strings.continuation`.
    heals: whether the drafter may write its last token again as a longer one, as in `strings.Followed`.
    """

    lm: CausalLM
    translation: Translation
    policy: TreePolicy
    law: LawFamily
    vocab_size: int
    align: Callable[[Vocabulary, Seq[int], bytes], list[int]] = continuation
    heals: bool = True

    @property
    def name(self) -> str:
        return self.lm.name

    @property
    def laws(self) -> tuple[Law, ...]:
        return (Opaque(self.policy.max_nodes),)

    @property
    def max_nodes(self) -> int:
        return WIDER * self.policy.max_nodes

    def open(self, batch: int, slots: int) -> "SLEMSession":
        return SLEMSession(self, batch, 2 * slots)


def slem(source: TranslatedSource, policy: TreePolicy, law: LawFamily) -> SLEMDrafter:
    """Return the drafter of SLEM; source: its weights and translation; policy, law: as in `SLEMDrafter`."""
    return SLEMDrafter(source.rewound, source.translation, policy, law, source.vocab_size)


@dataclass(eq=False)
class Inner(Sequence):
    """A sequence in the drafter's ids, as the drafter's own session reads it.

    text: the sequence's text in the drafter's ids. Its edge decides which tokens may be drafted first.
    """

    text: Followed = field(kw_only=True)

    @property
    def shapes_logits(self) -> bool:
        return bool(self.text.edge.taken)

    def probabilities(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        suffixes = list(suffixes)
        return super().probabilities(self._healed(logits, suffixes), suffixes)

    def scores(self, logits: Float[Tensor, "m v"], suffixes: Iterable[Iterable[int]]) -> Float[Tensor, "m v"]:
        suffixes = list(suffixes)
        return super().scores(self._healed(logits, suffixes), suffixes)

    def _healed(self, logits: Float[Tensor, "m v"], suffixes: Seq[Iterable[int]]) -> Float[Tensor, "m v"]:
        if not self.shapes_logits or any(suffixes):
            return logits
        closed = torch.from_numpy(self.text.edge.closed(logits.shape[1]))
        return logits.masked_fill(closed.to(logits.device), -torch.inf)


@dataclass(eq=False)
class Row(Followed):
    """One sequence in the drafter's ids.

    inner: what the drafter's own session reads; None before the first draft.
    """

    inner: Inner | None = None


class SLEMSession:
    """A session of SLEM. Of the drafter's cache, only ids that new text caused to be split otherwise are read again."""

    def __init__(self, drafter: SLEMDrafter, batch: int, room: int) -> None:
        """Open a session of `drafter`.

        batch: the largest number of sequences.
        room: the slots of each sequence in the drafter's cache, to begin with.
        """
        self.drafter = drafter
        self._batch, self._room = batch, room
        self._session = self._open()
        self._rows: list[Row] = []
        self._trees: list[TokenTree] = []

    def _open(self) -> LMDraftSession:
        d = self.drafter
        drafter = LMDrafter(d.lm, d.policy, d.law, d.lm.vocab_size)
        return LMDraftSession(drafter, d.lm.open(self._batch, self._room))

    def join(self) -> None:
        self._session.join()
        self._rows.append(Row(self.drafter.translation, self.drafter.heals))

    def leave(self, row: int) -> None:
        self._session.leave(row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        inner = [self._inner(i, row, seq) for i, (row, seq) in enumerate(zip(self._rows, sequences, strict=True))]
        self._reserve(max(len(seq.ids) for seq in inner) + self.drafter.policy.max_nodes)
        self._trees = self._session.propose(inner)
        return [self._translated(*each) for each in zip(self._rows, sequences, self._trees, strict=True)]

    def _inner(self, index: int, row: Row, seq: Sequence) -> Sequence:
        if row.inner is None:
            row.inner = Inner(row.follow(seq.ids), seq.sampling.without_ids(), seq.rng, ENDLESS, text=row)
        elif row.seen < len(seq.ids):  # there were steps in which no draft was asked for
            old, new = row.inner.ids, row.follow(seq.ids)
            length = min(common_prefix(old, new), len(new) - 1, self._session.rows.lengths[index])
            self._cut(index, length)
            row.inner.ids = new
        row.inner.num_prompt = len(row.inner.ids)
        row.inner.max_new_tokens = ENDLESS if seq.num_left > 1 else 1  # at the last token nothing is drafted
        row.inner.depth_limit, row.inner.floors = seq.depth_limit, seq.floors
        return row.inner

    def _reserve(self, needed: int) -> None:
        """Open new and larger caches, which are empty, where a text takes more of the drafter's tokens than fit."""
        if needed > self._room:
            self._room = 2 * needed
            pasts, self._session = self._session.pasts, self._open()
            for _ in self._rows:
                self._session.join()
            self._session.pasts = pasts

    def _translated(self, row: Row, seq: Sequence, tree: TokenTree) -> TokenTree:
        """Return the strings of the drafter's tree as one tree in the target's ids."""
        d = self.drafter
        tokens, parents = [seq.ids[-1]], [-1]
        children: dict[tuple[int, int], int] = {}
        for leaf in sorted(set(range(len(tree))) - set(tree.parents)):
            node = 0
            string = self._string(row, seq, [tree.tokens[i] for i in tree.path_to(leaf)[1:]])
            for token in string[: seq.num_left - 1]:
                if (node, token) not in children:
                    if token >= d.vocab_size or len(tokens) == d.max_nodes:
                        break
                    children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node, token]
        return opaque_tree(tokens, parents, None if tree.sure is None else self._sure(row, tree, tokens[1:]))

    def _sure(self, row: Row, chain: TokenTree, tokens: Seq[int]) -> tuple[float, ...]:
        """Return the `sure` of a chain in the target's ids: of each token that of the drafter's token which spells its
        last byte. A special token counts as one byte."""
        assert chain.sure is not None
        translation = self.drafter.translation
        lengths = ([len(side.spell([token]) or " ") for token in ids] for side, ids in
                   ((translation.dest, chain.tokens[1:]), (translation.source, tokens)))  # fmt: skip
        ends, wanted = (np.cumsum(of_side) for of_side in lengths)
        places = np.searchsorted(ends - len(row.edge.taken), wanted).clip(max=len(ends) - 1)
        return 1.0, *(chain.sure[1 + place] for place in places.tolist())

    def _string(self, row: Row, seq: Sequence, tokens: list[int]) -> list[int]:
        """Return target ids of one drafted path. A special token ends them; it is their last if the target has it."""
        translation = self.drafter.translation
        source, dest = translation.source, translation.dest
        end = next((i for i, token in enumerate(tokens) if not dest.spell([token])), len(tokens))
        ids = self.drafter.align(source, seq.ids, dest.spell(tokens[:end])[len(row.edge.taken) :])
        last = translation.special_back.get(tokens[end]) if end < len(tokens) else None
        return ids if last is None else [*ids, last]

    def _cut(self, row: int, length: int) -> None:
        assert isinstance(self._session.rows, Rows)
        self._session.rows.cut(row, length)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Keep the drafter's nodes that spell what was accepted; forget cached ids that are now split otherwise."""
        kept: list[Path] = []
        agreed: list[int] = []
        for row, seq, tree in zip(self._rows, sequences, self._trees, strict=True):
            assert row.inner is not None
            old, new = row.inner.ids, row.follow(seq.ids)
            same = common_prefix(old, new)
            path = [0]
            if same == len(old):
                for token in new[same:-1]:  # the last id is the next root, which no cache holds
                    child = tree.child(path[-1], token)
                    if child is None:
                        break
                    path.append(child)
            kept.append(tuple(path))
            agreed.append(min(same + len(path) - 1, len(new) - 1))
            row.inner.ids = new
        self._session.observe([row.inner for row in self._rows if row.inner is not None], self._trees, kept)
        for row, length in enumerate(agreed):
            self._cut(row, min(length, self._session.rows.lengths[row]))
