"""Teacher forcing: what both models say along a given text, and what drafts of it would be worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.build import plain
from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.models.causal_lm import CausalLM


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Logits of both models after the same n positions of a text, over the target's v tokens."""

    target: Float[Tensor, "n v"]
    drafter: Float[Tensor, "n v"]

    def rows(
        self, temperature: float, draft_temperature: float | None = None
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
        """p and q in float64; q at the target's temperature, unless another one is given."""
        q_temperature = temperature if draft_temperature is None else draft_temperature
        p = Sampling(temperature=temperature)(self.target.double())
        return p, Sampling(temperature=q_temperature)(self.drafter.double())


def drafter_lm(engine: Engine, lack: str) -> CausalLM:
    """The drafter's language model; ForetokenError, which says what it lacks, where it is none."""
    drafter = engine.drafter
    if not isinstance(drafter, LMDrafter) or not isinstance(drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {drafter.name} {lack}: name a model folder, --drafter.")
    return drafter.lm


def written(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """What the target writes behind each prompt, so many tokens whatever they are."""
    endless = replace(plain(engine), tokenizer=None, eos_ids=frozenset())
    results = endless.generate(list(prompts), max_new_tokens=num_tokens, temperature=temperature, seed=seed)
    return [result.token_ids for result in results]


@torch.inference_mode()
def logits_at(lm: CausalLM, windows: Sequence[list[int]], places: Sequence[tuple[int, int]], v: int) -> Tensor:
    """Logits after given tokens of given texts, by one forward per text.

    places: (w, t) for token t of window w.
    Returns [n, v], by window, then in the order of places. Columns that the model lacks are -inf, those beyond v are
    dropped.
    """
    found = []
    for w in dict.fromkeys(w for w, _ in places):
        wanted = [t for other, t in places if other == w]
        first, last = min(wanted), max(wanted)
        ids = [min(token, lm.vocab_size - 1) for token in windows[w][: last + 1]]
        rows = lm.open(1, len(ids))
        rows.extend(rows.join(), ids[:first])
        (scores,) = rows.score([ids[first:]], [list(range(-1, last - first))])
        known = scores[[t - first for t in wanted]].cpu()
        found.append(known.to(torch.promote_types(known.dtype, torch.float32)))
    return columns(torch.cat(found), v)


def columns(logits: Tensor, v: int) -> Tensor:
    """[n, v]: those beyond v are dropped, missing ones are -inf."""
    return torch.nn.functional.pad(logits[:, :v], (0, max(v - logits.shape[1], 0)), value=-torch.inf)
