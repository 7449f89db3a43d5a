"""TLI, token-level intersection (Timor et al. 2025, Algorithm 4): a drafter that proposes only tokens of both models.

`IntersectionLM` wraps the drafter's model and behaves like a language model with the target's vocabulary:

    q'(t) = q(d(t)) / (sum of q over the intersection)   for tokens t that both have, d(t) the drafter's id,   else 0.

So `LMDrafter` draws from it, and every tree, law and verifier works with it unchanged. The cost per scored node is one
gather over the target's vocabulary. The caller's model is never modified.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.policy import TreePolicy
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.draft.lm import LMDrafter
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.translation import Translation


class IntersectionLM(CausalLM):
    """The drafter's model with ids and logits of the target's vocabulary. Tokens that the drafter lacks have -inf.

    lm: the drafter's model.
    translation: from the target's vocabulary to the drafter's.
    context: None, since one target token may take several tokens of the drafter's.
    columns: per target id the column of the drafter's logits; one past the last for a token that the drafter lacks.

    Raises ForetokenError where the vocabularies have no token in common.
    """

    def __init__(self, lm: CausalLM, translation: Translation) -> None:
        pairs = {t: d for t, d in translation.pairs.items() if d < lm.vocab_size}
        if not pairs:
            raise ForetokenError(
                f"Drafter {lm.name} and target {translation.source.name} have no token in common, which vocab tli "
                "needs: use slem, which goes by the text."
            )
        self.lm = lm
        self.name = lm.name
        self.vocab_size = max(len(translation.source.tokens), 1 + max(pairs))
        self.context = None
        self.translation = translation
        self.columns = torch.full((self.vocab_size,), lm.vocab_size)
        self.columns[list(pairs)] = torch.tensor(list(pairs.values()))

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> Rows:
        assert not layers, "no one asks a drafter for hidden states"
        return TranslatedRows(self, batch, slots)


def tli(source: TranslatedSource, policy: TreePolicy, law: LawFamily) -> LMDrafter:
    """Return the drafter of TLI; source: its weights and translation; policy, law: as in `LMDrafter`."""
    return LMDrafter(IntersectionLM(source.model, source.translation), policy, law, source.vocab_size)


class TranslatedRows(Rows):
    """Rows of an IntersectionLM: their ids are the target's, and the *inner* rows beneath have the drafter's ids.

    A target token that the drafter spells with several tokens is a chain of inner nodes. The inner rows have twice as
    many slots as are asked for; where a text takes more of the drafter's tokens than that, the number doubles.

    lm, batch, slots: as in `CausalLM.open`; slots are counted in target tokens.
    """

    def __init__(self, lm: IntersectionLM, batch: int, slots: int) -> None:
        self._lm = lm
        self._columns = lm.columns
        self._batch, self._room = batch, 2 * slots
        self._inner = lm.lm.open(batch, self._room)
        self.lengths = []
        self._ids: list[list[int]] = []  # per row the committed ids of the drafter
        self._tokens: list[list[int]] = []  # per row the drafter's ids of the inner nodes
        self._parents: list[list[int]] = []  # and their parents
        self._chains: list[list[range]] = []  # per row and node of the target's tree the inner nodes that spell it

    def __len__(self) -> int:
        return len(self.lengths)

    def join(self) -> int:
        self._inner.join()
        self.lengths.append(0)
        for state in (self._ids, self._tokens, self._parents, self._chains):
            state.append([])
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        self._inner.leave(row)
        states: list[list[Any]] = [self.lengths, self._ids, self._tokens, self._parents, self._chains]
        for state in states:
            state[row] = state[-1]
            state.pop()

    def save(self, row: int, start: int, end: int) -> None:
        """Return None: how the drafter's tokens split a part of a text depends on what follows the part."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Commit `tokens` to row `row`, whose tree is empty; the text is split as the drafter's tokenizer splits it."""
        if not tokens:
            return
        translation = self._lm.translation
        ids = translation.text(tokens) if self.lengths[row] else translation.beginning(tokens)
        self._reserve(len(self._ids[row]) + len(ids))
        self._inner.extend(row, ids)
        self._ids[row] += ids
        self.lengths[row] += len(tokens)

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "n v"]]:
        spelled = [self._spell(row, some, above) for row, (some, above) in enumerate(zip(tokens, parents, strict=True))]
        held = zip(self._ids, self._tokens, spelled, strict=True)
        self._reserve(max(len(committed) + len(nodes) + len(new) for committed, nodes, (new, _, _) in held))
        rows = self._inner.score([ids for ids, _, _ in spelled], [ups for _, ups, _ in spelled])
        for row, (ids, ups, _) in enumerate(spelled):
            self._tokens[row] += ids
            self._parents[row] += ups
        return [self._outer(logits, ends) for logits, (_, _, ends) in zip(rows, spelled, strict=True)]

    def _spell(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the inner nodes of new nodes of one row: (their ids; their parents; the indices, among these, of those
        that end a target token)."""
        first, chains = len(self._tokens[row]), self._chains[row]
        ids: list[int] = []
        ups: list[int] = []
        for token, parent in zip(tokens, parents, strict=True):
            opening = parent < 0 and self.lengths[row] == 0
            spelled = self._lm.translation.opening(token) if opening else self._lm.translation.token(token)
            start = first + len(ids)
            ups += [chains[parent][-1] if parent >= 0 else -1, *range(start, start + len(spelled) - 1)]
            ids += spelled
            chains.append(range(start, start + len(spelled)))
        return ids, ups, [chain[-1] - first for chain in chains[len(chains) - len(tokens) :]]

    def _outer(self, logits: Float[Tensor, "m d"], ends: list[int]) -> Float[Tensor, "n v"]:
        self._columns = self._columns.to(logits.device)
        if len(ends) < len(logits):
            logits = logits[ends]
        missing = logits.new_full((len(logits), 1), -torch.inf)
        return torch.cat((logits, missing), 1).index_select(1, self._columns)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        inner = [[i for node in path for i in chains[node]] for path, chains in zip(paths, self._chains, strict=True)]
        self._inner.keep(inner)
        for row, nodes in enumerate(inner):
            self._ids[row] += [self._tokens[row][i] for i in nodes]
            self.lengths[row] += len(paths[row])
            self._tokens[row], self._parents[row], self._chains[row] = [], [], []

    def _reserve(self, needed: int) -> None:
        """Double the slots of the inner rows until each has `needed`, and read everything again where that is done."""
        if needed <= self._room:
            return
        while self._room < needed:
            self._room *= 2
        self._inner = self._lm.lm.open(self._batch, self._room)
        for ids in self._ids:
            self._inner.extend(self._inner.join(), ids)
        self._inner.score(self._tokens, self._parents)
