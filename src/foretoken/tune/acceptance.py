"""Expected tokens per step, by teacher forcing on the target's own text.

The target continues each prompt plainly, at the temperature that is tuned for. Let r_j = min(1, q / p) at the text's
token j: given the text, the probability that a draft there was accepted, independently of all others. With

    R_t(i) = P(a step that starts before token t accepts more than i drafts),     a_j = acceptance(rule, law, p, q),

    chain, token by token:      r_t r_{t+1} .. r_{t+i}
    chain, block verification:  min over j <= i of min(1, Q_j / P_j),   Q_j, P_j = products of q, p of tokens t .. t + j
    tree, every node alike:     a_t a_{t+1} .. a_{t+i}

whose mean over texts is exact for chains, and for trees but for how acceptance at one node hangs together with the next
(tests/test_tune_acceptance.py). Steps follow one another as a renewal process: one that starts at t moves on to
t + 1 + (drafts accepted). Places where drafts fail see more steps than easy ones, which a plain mean over the text
would miss.

What a step costs goes by the nodes of its tree. Draws that repeat one another share a node, so a node at the text's
token t has E[distinct draws | q_t] children. Its other children, which are off the text, are taken to have as many as
the text's own token has, so that a tree from t on is expected to have

    D_t,   D_t D_{t+1},   ..   nodes at depth 1, 2, ..

With coins of probability a every a q stands for q, and a chain has a, a^2, .. nodes. chain:D@C goes on at the text's
token while the product of q down to it is C or more; how often its own drafts do is counted on tokens drawn from the q
of the same places.

A drafter without a distribution is watched instead: steps of the deepest chain, cut at any depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foretoken.core.budgeted import expected_distinct
from foretoken.core.laws import IID, Law, Opaque
from foretoken.core.policy import ShapePolicy
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.teacher_forcing import begins, block_survival, drafter_lm, logits_at
from foretoken.models.causal_lm import CausalLM
from foretoken.names import tree_policy, verifier_named
from foretoken.recipe import Recipe
from foretoken.tune.costs import most_nodes
from foretoken.verify.acceptance import acceptance

SAMPLES = 16  # per place


@dataclass(frozen=True, eq=False)
class Forced:
    """A text of t tokens, and the distributions that both models had before each of them."""

    ids: list[int]
    p: Float[Tensor, "t v"]
    q: Float[Tensor, "t v"]

    @cached_property
    def drawn(self) -> Float[Tensor, "t m"]:
        """q of tokens drawn from it at every place."""
        rng = torch.Generator().manual_seed(0)
        return self.q.gather(1, torch.multinomial(self.q, SAMPLES, replacement=True, generator=rng))

    @property
    def own(self) -> Float[Tensor, " t"]:
        """q of the text's own tokens."""
        return self.q[torch.arange(len(self.ids)), self.ids]


def has_distribution(engine: Engine) -> bool:
    """Whether the drafter is a language model whose q, over the target's tokens, can be asked for at any place."""
    return type(engine.drafter) is LMDrafter and isinstance(engine.drafter.lm, CausalLM)


def drafting_model(engine: Engine) -> CausalLM:
    """The drafter's model, of an engine that `has_distribution`."""
    return drafter_lm(engine, "has no distribution")


def forced(engine: Engine, prompt: list[int], ids: list[int], temperature: float) -> Forced:
    """One forward of each model over the prompt and the text that the target wrote after it."""
    places = [(0, len(prompt) - 1 + t) for t in range(len(ids))]
    target, drafter = (
        logits_at(lm, [[*prompt, *ids]], places, engine.target.vocab_size).double()
        for lm in (engine.target.lm, drafting_model(engine))
    )
    # At temperature 0 the drafter's likeliest tokens are proposed, so their order must stay known.
    q = Sampling(temperature=temperature or 1.0)(drafter)
    return Forced(ids, Sampling(temperature=temperature)(target), q)


def of_one_draft(text: Forced, temperature: float) -> Float[Tensor, " t"]:
    """sum min(p, q); at temperature 0 whether the likeliest tokens agree."""
    if temperature == 0:
        return acceptance("exact-match", Opaque(1), text.p, text.q)
    return torch.minimum(text.p, text.q).sum(1)


def reach(text: Forced, configuration: Recipe, temperature: float) -> Float[Tensor, "s d"]:
    """R_t(i) for i = 0 .. depth - 1 at every t that has so many tokens after it."""
    depth, law = len(most_nodes(configuration)), _law(configuration, temperature)
    goes_on = _goes_on(text.own[:, None], configuration)[:, 0]
    if law.k > 1 or temperature == 0:
        rule = "exact-match" if temperature == 0 else verifier_named(str(configuration.verifier))
        return goes_on * acceptance(rule, law, text.p, text.q).unfold(0, depth, 1).cumprod(1)
    a = 1.0 if configuration.draft_probability is None else configuration.draft_probability
    places = torch.arange(len(text.ids))
    ratio = (a * text.own / text.p[places, text.ids]).double()
    if configuration.verifier == "block":
        return goes_on * block_survival(ratio.log(), depth)
    return goes_on * ratio.clamp(max=1).unfold(0, depth, 1).cumprod(1)


def widths(text: Forced, configuration: Recipe, temperature: float) -> Float[Tensor, "s d"]:
    """Nodes expected at depth 1, 2, .. of a tree at every t of `reach`."""
    depth, law = len(most_nodes(configuration)), _law(configuration, temperature)
    if law.k == 1:
        drawn = text.q.max(1, keepdim=True).values if temperature == 0 else text.drawn
        a = 1.0 if configuration.draft_probability is None else configuration.draft_probability
        return _goes_on(drawn, configuration).mean(1) * a ** torch.arange(1, depth + 1, dtype=torch.float64)
    draws = torch.full((len(text.ids),), float(law.k), dtype=torch.float64)
    distinct = expected_distinct(text.q, draws) if isinstance(law, IID) else draws
    return distinct.unfold(0, depth, 1).cumprod(1)


def _goes_on(q: Float[Tensor, "t m"], configuration: Recipe) -> Float[Tensor, "s m d"]:
    """1 where there is a draft at depth 1, 2, .., all before it accepted, 0 where the tree has ended. q: of drafts."""
    policy, depth = tree_policy(configuration.tree), len(most_nodes(configuration))
    floor = policy.floor if isinstance(policy, ShapePolicy) else 0.0
    down = q.double().unfold(0, depth, 1).cumprod(2)
    before = torch.cat([torch.ones_like(down[..., :1]), down[..., :-1]], 2)
    return (before >= floor).double()


def _law(configuration: Recipe, temperature: float) -> Law:
    """The law by which the children of every node are drawn."""
    k = tree_policy(configuration.tree).max_draws
    return Opaque(k) if temperature == 0 else verifier_named(str(configuration.verifier)).laws[0](k)


def per_step(reached: Sequence[Float[Tensor, "_ d"]], values: Sequence[Float[Tensor, "_ m"]]) -> np.ndarray:
    """What a step has of `values`, known at every place where one may start: their mean over the renewal process."""
    total, steps = np.zeros(values[0].shape[1]), 0.0
    for survival, value in zip(reached, values, strict=True):
        started = begins(survival.double().numpy())[: len(survival)]
        total += started @ value.double().numpy()
        steps += started.sum()
    return total / steps


def tokens_per_step(reached: Sequence[Float[Tensor, "_ d"]]) -> float:
    """Expected tokens over expected steps."""
    return float(per_step(reached, [1 + survival.sum(1, keepdim=True) for survival in reached])[0])


def tokens_watched(tokens: Sequence[Sequence[int]], depth: int) -> float:
    """Mean tokens of a step cut at `depth`, from those of steps of a deeper chain; a run's last step is left out, for
    it may have ended with the text."""
    every = [min(n, depth + 1) for run in tokens for n in run[:-1]]
    return sum(every) / len(every)
