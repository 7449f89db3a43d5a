"""Losses of drafters that imitate the target, with its vocabulary or with another.

With another, the target's law of its next token becomes one of the drafter's next token. Where a target token begins,
each target token t says which drafter token comes next: the first one of its spelling. So the law of the next drafter
token is the sum of p(t) over the t whose spelling begins with it. Inside a target token, after drafter tokens
d_1 .. d_j of it, the same over those t whose spelling begins with d_1 .. d_j and goes on: whether the target's token
ended there is known from the text itself, since it is drawn. Where the drafter's tokens reach over a target token's
end, the label is the token that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

UNKNOWN = -1
Loss = Callable[[LlamaForCausalLM, torch.Tensor, float], torch.Tensor]


def imitation(p: torch.Tensor, log_q: torch.Tensor, progress: float) -> torch.Tensor:
    """Kullback-Leibler divergence, giving way to the share of draft tokens that the target would refuse."""
    divergence = F.kl_div(log_q, p, reduction="none").sum(-1).mean()
    refused = 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
    weight = min(1.0, progress / 0.7) * 0.9
    return (1 - weight) * divergence + weight * refused


def distil_loss(target: LlamaForCausalLM) -> Loss:
    def loss(model: LlamaForCausalLM, rows: torch.Tensor, progress: float) -> torch.Tensor:
        with torch.no_grad():
            p = target(input_ids=rows[:, :-1], use_cache=False).logits.float().softmax(-1)
        return imitation(p, model(input_ids=rows[:, :-1], use_cache=False).logits.float().log_softmax(-1), progress)

    return loss


def cross_loss(target: LlamaForCausalLM, own: Tokenizer, tok: Tokenizer) -> Loss:
    """For rows in the target's tokens; the drafter, whose tokenizer is `tok`, reads the same text in its own."""
    labels = CrossLabels(own, tok)

    def loss(model: LlamaForCausalLM, rows: torch.Tensor, progress: float) -> torch.Tensor:
        texts = [labels.read(ids) for ids in rows.tolist()]
        read = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)  # what fills a row is never reached
        taught, laws = torch.zeros_like(read, dtype=torch.bool), []
        with torch.no_grad():
            logits = target(input_ids=rows[:, :-1], use_cache=False).logits.float()
            for r, (ids, text) in enumerate(zip(rows, texts, strict=True)):
                read[r, : len(text)] = torch.tensor(text)
                token, inside = map(torch.from_numpy, labels.places(ids.cpu().numpy(), read[r, : len(text)].numpy()))
                known = token > 0  # the row's first token has no law
                taught[r, : len(text)] = known
                law = F.one_hot(read[r, : len(text)][known], model.config.vocab_size).to(logits)
                token, inside = token[known].to(rows.device), inside[known].to(rows.device)
                fits = inside != UNKNOWN
                law[fits] = labels.laws(logits[r, token[fits] - 1], ids[token[fits]], inside[fits], law.shape[1])
                laws.append(law)
        logits = model(input_ids=read[:, :-1].to(rows.device), use_cache=False).logits.float()
        return imitation(torch.cat(laws), logits[taught[:, 1:].to(rows.device)].log_softmax(-1), progress)

    return loss


def by_id(tok: Tokenizer) -> list[str]:
    """Each token as the characters that stand for its bytes."""
    vocabulary = tok.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def spellings(own: Tokenizer, tok: Tokenizer) -> list[list[int]]:
    """Each token of `own` in tokens of `tok`; a special token is the other's of the same name."""
    known = tok.get_vocab()
    return [[known[t]] if t in known else [p.id for p in tok.model.tokenize(t)] for t in by_id(own)]


class CrossLabels:
    """spelled[t, j]: the j-th drafter token of target token t. node[t, j]: a number for its first j ones, where a j-th
    follows; both UNKNOWN beyond the end."""

    def __init__(self, own: Tokenizer, tok: Tokenizer) -> None:
        self.own, self.tok = own, tok
        self._lengths = [np.array([len(token) for token in by_id(t)]) for t in (own, tok)]
        written = spellings(own, tok)
        shape = len(written), max(map(len, written))
        self.spelled, self.node = np.full(shape, UNKNOWN), np.full(shape, UNKNOWN)
        numbers: dict[tuple[int, ...], int] = {}
        for t, ids in enumerate(written):
            self.spelled[t, : len(ids)] = ids
            self.node[t, : len(ids)] = [numbers.setdefault(tuple(ids[:j]), len(numbers)) for j in range(len(ids))]

    def read(self, ids: Sequence[int]) -> list[int]:
        """The same text in the drafter's tokens, up to bytes that are no character."""
        text = self.own.decode(list(ids), skip_special_tokens=False).partition("\ufffd")[0]
        return self.tok.encode(text, add_special_tokens=False).ids

    def places(self, ids: np.ndarray, read: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of the drafter's ids `read` for the text of target ids `ids`: the target token in which it begins,
        and how many of the drafter's come before it there (UNKNOWN where it reaches over the end of a target token)."""
        ends, read_ends = (np.cumsum(lengths[x]) for lengths, x in zip(self._lengths, (ids, read), strict=True))
        starts, read_starts = ends - self._lengths[0][ids], read_ends - self._lengths[1][read]
        token = np.minimum(np.searchsorted(ends, read_starts, side="right"), len(ids) - 1)
        first = np.searchsorted(read_starts, starts[token])
        inside = np.minimum(np.arange(len(read)) - first, self.spelled.shape[1] - 1)
        other = self.spelled[ids[token], inside] != read
        others = np.concatenate([[0], np.cumsum(other)])
        fits = (others[1:] == others[first]) & (read_starts[first] == starts[token])
        return token, np.where(fits, inside, UNKNOWN)

    def laws(self, logits: torch.Tensor, tokens: torch.Tensor, inside: torch.Tensor, vocab: int) -> torch.Tensor:
        """The law of the next drafter token: [n, vocab] for the target's logits [n, V], its token and the place there.

        Costs a pass over the logits and, for n places, n additions for each target token.
        """
        p = logits.softmax(-1)
        laws = p.new_zeros(vocab, len(p))
        for j in inside.unique().tolist():
            rows = (inside == j).nonzero()[:, 0]
            node, spelled = (torch.from_numpy(x[:, j]).to(p.device) for x in (self.node, self.spelled))
            kept = (spelled != UNKNOWN).nonzero()[:, 0]
            part = p[rows] if j == 0 else p[rows][:, kept] * (node[kept] == node[tokens[rows]][:, None])
            laws[:, rows] = part.new_zeros(vocab, len(rows)).index_add_(0, spelled[kept], part.mT.contiguous())
        return laws.mT / laws.sum(0)[:, None].clamp(min=1e-30)
