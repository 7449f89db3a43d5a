"""The one map from logits to probabilities: for the target and for drafters, at the root and at every tree node."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.limits import check_sampling
from foretoken.core.shapes import Float
from foretoken.core.softmax import best, softmax
from foretoken.core.truncated import Truncation, truncated_softmax

Processor = Callable[[Tensor, Tensor], Tensor]  # (ids [1, t], scores [1, v]) -> scores [1, v], as in transformers
CHECKED = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """Settings of the next-token distribution p, and the map itself.

    temperature: >= 0; at 0 p is one-hot at the largest score.
    top_k: keep the k best scores (0: all; ties with the k-th stay). top_p: keep the smallest set of best tokens with
    mass >= top_p. min_p: drop tokens below min_p times the best probability. In this order, after temperature,
    each as in transformers.
    repetition_penalty: > 0, over prompt and output (transformers). frequency_penalty, presence_penalty: over the
    output alone (OpenAI). logit_bias: token id -> added score.
    processors: any Hugging Face LogitsProcessor; called once per visited node with that node's own prefix, so it must
    be a function of its arguments (one that counts its calls has no meaning on a tree).
    Order: logit_bias, penalties, processors, temperature, top_k, top_p, min_p.
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

    @property
    def reads_prefix(self) -> bool:
        return bool(
            self.processors or self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )

    @property
    def moves_scores(self) -> bool:
        """Whether bias, penalties or processors change the logits."""
        return bool(self.logit_bias) or self.reads_prefix

    @property
    def truncation(self) -> Truncation:
        return self.top_k, float(self.top_p), float(self.min_p)

    @property
    def tempers_only(self) -> bool:
        """Whether p is softmax(logits / temperature) and no more."""
        truncates = self.top_k or self.top_p < 1 or self.min_p
        return self.temperature > 0 and not (truncates or self.moves_scores)

    def without_ids(self) -> "Sampling":
        """The same without bias, penalties and processors, which speak of one vocabulary's ids."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def __call__(
        self, logits: Float[Tensor, "m v"], prefixes: Iterable[Sequence[int]] = (), num_prompt: int = 0
    ) -> Float[Tensor, "m v"]:
        """Probabilities, float32 or better, of the token after each of m prefixes of ids.

        `prefixes` is read only if `reads_prefix`, so a generator costs nothing otherwise; the first `num_prompt` ids
        of each are the prompt. Raises NotFiniteError where a row has NaN, +inf, or no finite score.
        """
        scores = self.scores(logits, prefixes, num_prompt)
        if self.temperature == 0:
            return best(scores)
        if not (self.top_k or self.top_p < 1 or self.min_p):
            return softmax(scores, self.temperature)
        return truncated_softmax(scores, self.temperature, self.top_k, self.top_p, self.min_p)

    def scores(
        self, logits: Float[Tensor, "m v"], prefixes: Iterable[Sequence[int]] = (), num_prompt: int = 0
    ) -> Float[Tensor, "m v"]:
        """Logits after bias, penalties and processors, before temperature; float32 or better."""
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
                row.copy_(processor(ids[None], row[None].clone())[0])
        return scores
