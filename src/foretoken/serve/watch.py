"""The target's log probabilities at the tokens of one step."""

from foretoken.core.tree import TokenTree
from foretoken.core.walk import LogitScores, NodeScores
from foretoken.serve.jobs import TokenLogprob


def step_logprobs(
    tree: TokenTree, scores: NodeScores, path: tuple[int, ...], token: int, top: int
) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities at each token of a step: the accepted draft tokens and the one after them.

    tree: the token tree of the step.
    scores: its node scores, of a sequence that shows its logits.
    path: the accepted nodes of the tree, the root first.
    token: the id of the token after the accepted ones.
    top: number of the most probable tokens that are reported for each.
    """
    assert isinstance(scores, LogitScores)
    tokens = [*(tree.tokens[node] for node in path[1:]), token]
    logprobs = scores.logits[list(path)].double().log_softmax(-1)  # row i: at the position of token i
    best = logprobs.topk(min(top, logprobs.shape[1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, float(row[token]), tuple(zip(*of_row, strict=True)))
        for token, row, of_row in zip(tokens, logprobs, pairs, strict=True)
    )
