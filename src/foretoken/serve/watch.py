"""What a step showed of one text besides its tokens: the target's log probabilities."""

from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.walk import LogitScores, NodeScores
from foretoken.serve.jobs import TokenLogprob


def step_logprobs(
    tree: TokenTree, scores: NodeScores, path: tuple[int, ...], token: int, top: int
) -> tuple[TokenLogprob, ...]:
    """Of each token of a step, the accepted ones and the one after them.

    scores: of a sequence that shows its logits. top: number of the most probable tokens that are reported for each.
    """
    assert isinstance(scores, LogitScores)
    return token_logprobs(scores.logits[list(path)], [*(tree.tokens[node] for node in path[1:]), token], top)


def token_logprobs(logits: Float[Tensor, "m v"], tokens: Seq[int], top: int) -> tuple[TokenLogprob, ...]:
    """Of each of m tokens, by the logits before it."""
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, float(row[token]), tuple(zip(*of_row, strict=True)))
        for token, row, of_row in zip(tokens, logprobs, pairs, strict=True)
    )
