"""The target's log probabilities at the tokens of one step, and at those of a prompt."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from foretoken.core.interfaces import Path
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, chain
from foretoken.core.walk import LogitScores, NodeScores
from foretoken.decode import Decoder
from foretoken.serve.jobs import TokenLogprob
from foretoken.serve.prefix import BLOCK, PrefixCache


def step_logprobs(tree: TokenTree, scores: NodeScores, path: Path, token: int, top: int) -> tuple[TokenLogprob, ...]:
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


def prompt_logprobs(
    open_one: Callable[[], Decoder], cache: PrefixCache, ids: Seq[int], top: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield the log probabilities at the tokens of a prompt, piece by piece.

    The target scores the prompt as it scores a draft of which all is accepted.

    open_one: returns a new decoder of one row.
    cache: the prefix cache, which keeps what was read.
    ids: the ids of the prompt.
    top: number of the most probable tokens that are reported at each position.
    """
    yield (TokenLogprob(ids[0], None, ()),)
    decoder = open_one()
    sequence = Sequence(list(ids[:1]), Sampling(), seeded(0), len(ids), shows_logits=True)
    decoder.join(sequence)
    for start in range(0, len(ids) - 1, BLOCK):
        *nodes, last = ids[start : start + BLOCK + 1]
        tree, path = chain(nodes, [None] * len(nodes)), tuple(range(len(nodes)))
        (scores,) = decoder.target.score([sequence], [tree])
        yield step_logprobs(tree, scores, path, last, top)
        decoder.target.keep([path])
        sequence.ids += [*nodes[1:], last]
    cache.keep(decoder, 0, ids[:-1], cache.match(ids[:-1]))
