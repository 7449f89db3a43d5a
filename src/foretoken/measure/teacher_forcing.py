"""Teacher forcing: the scores of both models along a given text, from which rules are judged without decoding."""

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
    """Logits of both models after the same n positions of a text, over the target's v tokens [n, v]."""

    target: Float[Tensor, "n v"]
    drafter: Float[Tensor, "n v"]

    def rows(
        self, temperature: float, draft_temperature: float | None = None
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
        """Return p and q after each position, float64 [n, v] each.

        temperature: the target's, 0 for one-hot p.
        draft_temperature: the drafter's; None for the target's.
        """
        q_temperature = temperature if draft_temperature is None else draft_temperature
        p = Sampling(temperature=temperature)(self.target.double())
        return p, Sampling(temperature=q_temperature)(self.drafter.double())


def drafter_lm(engine: Engine, lack: str) -> CausalLM:
    """Return the language model of the engine's drafter, which has the target's ids.

    Raises ForetokenError for a drafter without one; lack: what to say of it, as "has no distribution to draw from".
    """
    drafter = engine.drafter
    if not isinstance(drafter, LMDrafter) or not isinstance(drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {drafter.name} {lack}: name a model with the target's vocabulary, --drafter.")
    return drafter.lm


def written(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Return the ids that the target alone writes after each prompt; end-of-text tokens do not end a text.

    engine: the models; its drafter is not used.
    prompts: the ids of each prompt.
    num_tokens: the number of new tokens of each text.
    temperature, seed: as in `Engine.generate`.
    """
    endless = replace(plain(engine), tokenizer=None, eos_ids=frozenset())
    results = endless.generate(list(prompts), max_new_tokens=num_tokens, temperature=temperature, seed=seed)
    return [result.token_ids for result in results]


@torch.inference_mode()
def logits_at(lm: CausalLM, windows: Sequence[list[int]], places: Sequence[tuple[int, int]], v: int) -> Tensor:
    """Return the logits of the model `lm` after given tokens of given texts, float32 or float64 [n, v], on the CPU.

    They are grouped by text; within a text they have the order of `places`.

    windows: the ids of each text; ids beyond the model's vocabulary are replaced by its last one.
    places: (w, t) for token t of text w, n of them.
    v: the number of columns; those that the model lacks are -inf, those beyond v are dropped.
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
    logits = torch.cat(found)[:, :v]
    return torch.nn.functional.pad(logits, (0, v - logits.shape[1]), value=-torch.inf)
