"""What the server asks of the thread that owns the model, and what comes back: jobs in, progress out."""

from collections.abc import Callable
from dataclasses import dataclass

from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Origin
from foretoken.engine import FinishReason
from foretoken.serve.errors import ApiError


@dataclass(frozen=True)
class Job:
    """One text that is to be generated.

    ids: the prompt's token ids.
    sampling: the settings of its next-token distribution.
    seed: the seed of its own random numbers, so that its text does not depend on the jobs beside it.
    max_new_tokens: the most tokens it may emit; clipped to what the context leaves.
    eos_ids: tokens that end it.
    stops: strings that end the text before them.
    top_logprobs: how many of the most probable tokens are reported at every position; None reports no probabilities.
    depth: the largest depth of its token trees; None leaves it to the engine, 0 is plain decoding.
    shows_trees: whether each step's token tree is reported, for the page that draws it.
    scores_prompt: whether the log probabilities of the prompt are reported too; max_new_tokens may be 0 then.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int]
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    depth: int | None = None
    shows_trees: bool = False
    scores_prompt: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities at one position under the target's softmax at temperature 1, before bias, penalties and
    truncation.

    token: the emitted id.
    logprob: its log probability, natural; None for the first token of a prompt, before which nothing stands.
    top: (id, log probability) of the most probable tokens, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Progress:
    """What one step of the model added to one job.

    text: the text that became certain.
    token_ids: the emitted ids.
    origins: where each id comes from; `core.sequence.Step.origins` explains the words.
    num_drafted: number of draft tokens in the step's tree.
    logprobs: log probabilities at each id's position, where the job asked for them; else empty.
    tree: the step's token tree, where the job asked for it, else None: under "tokens" the id of each node, of which
        node 0 is the last committed token, under "parents" the index of each node's parent, -1 for node 0, and under
        "path" the indices of the accepted nodes, from node 0 down.
    num_cached: number of prompt tokens that the prefix cache held.
    waited_s: seconds that the job waited for others to end; the same at every step.
    finish_reason: why the text ended; None before the last step.
    prompt_logprobs: those at the prompt's ids, at the first step of a job that asked for them; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprob, ...] = ()
    tree: dict[str, tuple[int, ...]] | None = None
    num_cached: int = 0
    waited_s: float = 0.0
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


# Called on the model's thread, once per step and at last with a finish reason or the error that is the answer; it must
# return at once. RuntimeError from it means that nobody waits for the job any more.
Deliver = Callable[[Progress | ApiError], None]
