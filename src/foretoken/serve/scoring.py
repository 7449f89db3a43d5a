"""The target's log probabilities at the tokens of a prompt, of which no text is made."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import chain
from foretoken.decode import Decoder
from foretoken.serve.jobs import TokenLogprob
from foretoken.serve.prefix import BLOCK, PrefixCache
from foretoken.serve.watch import step_logprobs


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
