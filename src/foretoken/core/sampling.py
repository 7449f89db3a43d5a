"""The one map from logits to probabilities: for the target and for drafters, at the root and at every tree node.

In annotations m is a number of rows, one per prefix or tree node, and v the number of tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.limits import check_sampling
from foretoken.core.shapes import Float, Int
from foretoken.kernel.sizes import ALL

Processor = Callable[[Tensor, Tensor], Tensor]  # (ids [1, t], scores [1, v]) -> scores [1, v], as in transformers
Truncation = tuple[int, float, float]  # top_k, top_p, min_p
LARGEST = 2**31 - 1  # top_k for compiled loops; no vocabulary is larger
SMALLEST = 1e-30  # the least divisor of float32 scores; by it scores that differ at all are infinitely far apart
COLDEST = 1e-20  # below this temperature a quotient of float32 scores could overflow
NOT_FINITE = "NaN or infinite logits"
# Processors of transformers that keep state from call to call, which has no meaning on a tree of alternatives.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


@runtime_checkable
class Constraint(Protocol):
    """A processor that forbids tokens, as a grammar does, by the ids before them alone, whatever the scores are."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores with those of forbidden tokens set to -inf [1, v].

        ids: prompt and output so far [1, t].
        scores: those of the next token [1, v].
        """
        ...

    def allows(self, ids: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `ids`, the prompt and the output so far."""
        ...


@dataclass(frozen=True)
class Sampling:
    """Settings of the next-token distribution p, and the map itself.

    They act in this order: logit_bias, penalties, processors, temperature, top_k, top_p, min_p.

    temperature: the divisor of the scores, >= 0; at 0 p is one-hot at the largest score.
    top_k: keep the k best scores (0: all; ties with the k-th stay), as in transformers.
    top_p: keep the smallest set of best tokens whose probability is >= top_p, as in transformers.
    min_p: drop tokens whose probability is below min_p times the largest one, as in transformers.
    repetition_penalty: > 0; divides positive scores of tokens in prompt or output, multiplies negative ones, as in
        transformers.
    frequency_penalty, presence_penalty: subtracted from the score of a token that is in the output, the first one as
        often as the token is there, as in OpenAI's API.
    logit_bias: token id -> the number that is added to its score; -inf forbids the token.
    processors: functions (ids [1, t], scores [1, v]) -> scores, such as any Hugging Face LogitsProcessor. Each is
        called once per visited node with the node's own prefix, so that it must depend on its arguments alone (one that
        counts its calls has no meaning on a tree).

    Raises ForetokenError for a number out of its range, and for transformers' processors that keep state between calls.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        check_sampling(**{name: getattr(self, name) for name in CHECKED})
        if not isinstance(self.processors, (list, tuple)) or not all(map(callable, self.processors)):
            raise ForetokenError("processors must be a list of functions (ids, scores) -> scores, such as [processor].")
        check_processors(self.processors)
        # They are kept as Python's own numbers, and in a dict that no caller changes while a text is written.
        for name in CHECKED:
            if name != "logit_bias":
                value = getattr(self, name)
                object.__setattr__(self, name, index(value) if name == "top_k" else float(value))
        object.__setattr__(self, "logit_bias", {index(token): float(bias) for token, bias in self.logit_bias.items()})

    @property
    def reads_prefix(self) -> bool:
        """Whether p depends on the ids before the token, apart from the logits."""
        return bool(
            self.processors or self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The processors that forbid tokens; draft tokens that they forbid are not scored."""
        return tuple(processor for processor in self.processors if isinstance(processor, Constraint))

    @property
    def moves_scores(self) -> bool:
        """Whether bias, penalties or processors change the logits."""
        return bool(self.logit_bias) or self.reads_prefix

    @property
    def truncation(self) -> Truncation:
        """(top_k, top_p, min_p), as compiled loops take them."""
        return min(self.top_k, LARGEST), float(self.top_p), float(self.min_p)

    def without_ids(self) -> "Sampling":
        """Return the settings without bias, penalties and processors, whose ids are those of one vocabulary."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def __call__(
        self, logits: Float[Tensor, "m v"], prefixes: Iterable[Sequence[int] | None] = (), num_prompt: int = 0
    ) -> Float[Tensor, "m v"]:
        """Return p of the token after each of m prefixes, float32 or float64 [m, v].

        logits: the model's scores of the next token [m, v].
        prefixes: the ids of prompt and output before it, one iterable per row; read only if `reads_prefix`, so that a
            generator costs nothing else. None: the text has ended before this row, which penalties and processors
            leave as it is.
        num_prompt: how many ids of each prefix are the prompt.

        Raises NotFiniteError where a row has NaN, +inf, or no finite score.
        """
        scores = self.scores(logits, prefixes, num_prompt)
        return softmax(scores, self.temperature, self.truncation) if self.temperature > 0 else best(scores)

    def scores(
        self, logits: Float[Tensor, "m v"], prefixes: Iterable[Sequence[int] | None] = (), num_prompt: int = 0
    ) -> Float[Tensor, "m v"]:
        """Return the logits after bias, penalties and processors, before temperature, float32 or float64 [m, v].

        logits, prefixes, num_prompt: as in `__call__`.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not self.moves_scores:
            return scores
        scores = scores.clone()
        if self.logit_bias:
            ids = torch.tensor(list(self.logit_bias), device=scores.device)
            bias = torch.tensor(list(self.logit_bias.values()), dtype=scores.dtype, device=scores.device)
            scores[:, ids] += bias
        if not self.reads_prefix:
            return scores
        for row, prefix in zip(scores, prefixes, strict=True):
            if prefix is None:
                continue
            ids = torch.tensor(prefix, dtype=torch.long, device=scores.device)
            known = ids[ids < row.shape[0]]
            if self.repetition_penalty != 1:
                seen = row[known]
                row[known] = torch.where(seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty)
            if self.frequency_penalty or self.presence_penalty:
                output = ids[num_prompt:]
                counts = torch.bincount(output[output < row.shape[0]], minlength=row.shape[0])
                row -= self.frequency_penalty * counts + self.presence_penalty * (counts > 0)
            for processor in self.processors:
                moved = processor(ids[None], row[None].clone())
                if not isinstance(moved, Tensor) or moved.shape != (1, len(row)):
                    got = f"shape {list(moved.shape)}" if isinstance(moved, Tensor) else type(moved).__name__
                    raise ForetokenError(
                        f"Processor {processor!r} returned {got}: it must return scores as a tensor [1, {len(row)}]."
                    )
                row.copy_(moved[0].detach())
        return scores


CHECKED = tuple(each.name for each in fields(Sampling) if each.name != "processors")  # what `check_sampling` takes


def check_processors(processors: Iterable[object]) -> None:
    """Refuse those of transformers' `processors` that keep state between calls, also within lists of processors."""
    for processor in processors:
        name = type(processor).__name__
        if name in STATEFUL:
            raise ForetokenError(f"{name} keeps state between calls, so it cannot run on a tree.")
        if isinstance(processor, list):
            check_processors(processor)


def best(scores: Float[Tensor, "m v"]) -> Float[Tensor, "m v"]:
    """Return rows that are one-hot at the largest of the `scores` [m, v]: the limit of softmax at temperature 0."""
    return torch.zeros_like(scores).scatter_(-1, likeliest(scores)[:, None], 1.0)


def likeliest(scores: Float[Tensor, "m v"]) -> Int[Tensor, " m"]:
    """Return the id of the largest of each row's scores, on a CPU the lowest one of equals [m].

    scores: any numbers [m, v]. Raises NotFiniteError where a row's largest is not finite; NaN counts as largest.
    """
    if scores.device.type == "cpu" and scores.dtype == torch.float32:  # numpy's argmax is several times as fast there
        rows = scores.detach().numpy()
        tokens = rows.argmax(-1)
        finite = bool(np.isfinite(rows[np.arange(len(rows)), tokens]).all())
        tokens = torch.from_numpy(tokens)
    else:
        largest, tokens = scores.max(-1)
        finite = bool(largest.isfinite().all())
    if not finite:
        raise NotFiniteError(NOT_FINITE)
    return tokens


def softmax(scores: Float[Tensor, "m v"], temperature: float, truncation: Truncation = ALL) -> Float[Tensor, "m v"]:
    """Return softmax(scores / temperature) over the tokens that `truncated` keeps [m, v]; 0 for all others.

    float32 scores on a CPU take compiled code, which never sorts whole rows. It gives what torch gives up to rounding,
    which may also decide about the token at the cut, and 0 for probabilities below 1e-38.

    scores: logits after bias, penalties and processors [m, v].
    temperature: > 0.
    truncation: (top_k, top_p, min_p) as in Sampling.

    Raises NotFiniteError where a row has NaN, +inf, or no finite score.
    """
    fast = scores.device.type == "cpu" and scores.dtype == torch.float32
    if truncation != ALL and not (fast and temperature >= COLDEST):
        return softmax(truncated(scaled(scores, temperature), truncation), 1.0)
    if not fast:
        return plain_softmax(scores, temperature)
    from foretoken.kernel import softmax as compiled

    rows, p = np.ascontiguousarray(scores.detach().numpy()), np.empty(scores.shape, np.float32)
    scale = inverse(temperature)
    if truncation == ALL:  # a loop of its own, which takes less time to compile
        finite = compiled.softmax(rows, scale, p)
    else:
        finite = compiled.truncated_softmax(rows, scale, truncation, p)
    if not finite:
        raise NotFiniteError(NOT_FINITE)
    return torch.from_numpy(p)


def plain_softmax(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """Return `softmax` of `scores` [m, v] at a `temperature` > 0 over all tokens, in torch."""
    p = torch.softmax(scaled(scores, temperature), -1)
    # One bad score makes its whole row NaN, so one column shows it.
    if bool(p[:, 0].isnan().any()):
        raise NotFiniteError(NOT_FINITE)
    return p


def scaled(scores: Float[Tensor, "m v"], temperature: float) -> Float[Tensor, "m v"]:
    """Return scores / temperature, up to a constant per row [m, v]."""
    if temperature < COLDEST:  # the largest score becomes 0 first, else the quotient would overflow
        scores = scores - scores.amax(-1, keepdim=True)
    return scores if temperature == 1 else scores / max(temperature, SMALLEST)


def inverse(temperature: float) -> np.float32:
    """Return 1 / temperature, by which the compiled softmax multiplies scores, as a positive float32."""
    return np.float32(max(1 / max(temperature, SMALLEST), SMALLEST))


def truncated(scores: Float[Tensor, "m v"], truncation: Truncation) -> Float[Tensor, "m v"]:
    """Return the scores with those of the tokens that are not kept set to -inf [m, v]; as in transformers.

    top_k keeps the k best tokens and those equal to the last of them. top_p then keeps each token if those above it
    have a probability below top_p together; of equal scores the one with the highest id counts as the highest. min_p
    then keeps those with at least min_p times the largest probability.

    scores: divided by the temperature already [m, v].
    truncation: (top_k, top_p, min_p) as in Sampling.
    """
    top_k, top_p, min_p = truncation
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if top_p < 1:
        ascending, order = scores.sort(dim=-1, stable=True)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[:, -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    if min_p:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf"))
    return scores
