"""Chains under block verification on a given text: what a step is worth, without drawing what the target says.

P(a step that begins here accepts at least i drafts | the text) = min(1, Q_1/P_1, .., Q_i/P_i), where Q_j and P_j are
the products of drafter's and target's probabilities of the text's next j tokens; proof: docs/theory.md, Theorem 13.
Two trees on the same texts differ by far less noise than two decodings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws import draw_iid
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.policy import TreePolicy
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.measure.teacher_forcing import begins, block_survival, columns, logits_at
from foretoken.models.causal_lm import CausalLM
from foretoken.trees.budget import BudgetTree
from foretoken.trees.static import StaticTree


@dataclass(frozen=True, eq=False)
class Path:
    """tokens [d], and q before each of them [d, v]."""

    tokens: list[int]
    q: Float[Tensor, "d v"]


@dataclass(frozen=True, eq=False)
class GivenText:
    """A text with n places at which a step may begin, and d tokens after the last of them.

    kept [n, d + 1]: P(a step at place t accepts at least i drafts | the text), if its chain is that long. ahead[t]: the
    text from place t on. drafted[t]: a path that the drafter drew there.
    """

    kept: Float[Tensor, "n d1"]
    ahead: Sequence[Path]
    drafted: Sequence[Path]


@dataclass(frozen=True)
class Count:
    """Mean counts of one decoding of a text."""

    tokens: float
    steps: float
    drafted: float


def one_path(policy: TreePolicy, name: str) -> TreePolicy:
    """The policy, of one draw a node at most; ForetokenError where it has none such."""
    if isinstance(policy, BudgetTree):
        return replace(policy, most_draws=1)
    if isinstance(policy, StaticTree) and policy.chain_depth > 0:
        return policy
    raise ForetokenError(f"Tree {name} is no single path: write chain:D, chain:D@C or budget:N.")


def given_text(
    target: CausalLM, drafter: CausalLM, prompt: list[int], text: list[int], depth: int, temperature: float,
    rng: torch.Generator,
) -> GivenText:  # fmt: skip
    """Score a text that the target wrote behind a prompt, at places before all of its tokens but the last `depth`."""
    n, v, sampling = len(text) - depth, target.vocab_size, Sampling(temperature=temperature)
    places = [(0, len(prompt) - 1 + t) for t in range(len(text))]
    p, q = (sampling(logits_at(lm, [prompt + text], places, v)) for lm in (target, drafter))
    own = torch.tensor(text)[:, None]
    ratios = (q.double().gather(1, own).log() - p.double().gather(1, own).log())[:, 0]
    drafted = _drafted(drafter, prompt, text[:n], depth, sampling, v, rng)
    return GivenText(kept(ratios, depth), [Path(text[t:], q[t:]) for t in range(n)], drafted)


def kept(log_ratios: Float[Tensor, " t"], depth: int) -> Float[Tensor, "n d1"]:
    """[t - depth, depth + 1], from ln q - ln p of a text's t tokens."""
    n = len(log_ratios) - depth
    return torch.cat([log_ratios.new_ones(n, 1), block_survival(log_ratios, depth)[:n]], 1)


def _drafted(
    lm: CausalLM, prompt: list[int], text: list[int], depth: int, sampling: Sampling, v: int, rng: torch.Generator
) -> list[Path]:
    """A path of `depth` tokens from every place of the text, all grown side by side in one tree whose trunk it is."""
    n, last = len(text), lm.vocab_size - 1
    rows = lm.open(1, len(prompt) + n * (depth + 1))
    rows.join()
    rows.extend(0, [min(token, last) for token in prompt[:-1]])
    tokens, parents = [prompt[-1], *text[:-1]], list(range(-1, n - 1))
    drawn, weights = [], []
    for level in range(depth):
        (logits,) = rows.score([[min(token, last) for token in tokens]], [parents])
        weights.append(sampling(columns(logits.cpu(), v)))
        drawn.append(draw_iid(weights[-1], torch.rand(n, 1, generator=rng, dtype=torch.float64))[:, 0])
        tokens, parents = drawn[-1].tolist(), list(range(n * level, n * (level + 1)))
    q, of_path = torch.stack(weights, 1), torch.stack(drawn, 1).tolist()
    return [Path(of_path[t], q[t]) for t in range(n)]


def grown(policy: TreePolicy, past: Any, path: Path) -> tuple[int, Any]:
    """How far the policy follows the path, and what it then remembers."""
    states = [policy.root(past)]
    while len(states) <= len(path.tokens) and policy.select(states, len(states) - 1):
        at = len(states) - 1
        q = path.q[at : at + 1]
        (plan,) = policy.plan(states[-1:], q, IID)
        if plan is None:
            break
        assert plan.law == IID(1)
        ((state,),) = policy.grow([plan], q, [(path.tokens[at],)])
        states.append(state)
    return len(states) - 1, policy.past(states)


def decoded(policy: TreePolicy, text: GivenText, runs: int, rng: np.random.Generator) -> Count:
    """Mean counts of decodings of the text, up to the first step that ends at its n-th place or behind it.

    What a step accepts is drawn given the text; what it spends, and what the policy remembers, is that of the path
    which the drafter drew there. So a policy with an account is given a path that does not depend on what was
    accepted: an approximation, 0.3% in its favour on a toy pair. Without an account nothing is approximate.
    """
    at_least, n = text.kept.numpy(), len(text.drafted)

    @cache  # without an account every run asks the same
    def followed(past: Any, t: int) -> tuple[int, int, Any]:
        longest, _ = grown(policy, past, text.ahead[t])
        return longest, *grown(policy, past, text.drafted[t])

    tokens = steps = drafted = 0
    for _ in range(runs):
        past, t = None, 0
        while t < n:
            longest, spent, past = followed(past, t)
            t += 1 + int((at_least[t, 1 : longest + 1] > rng.random()).sum())
            steps, drafted = steps + 1, drafted + spent
        tokens += t
    return Count(tokens / runs, steps / runs, drafted / runs)


def decoded_by_chain(kept: Float[Tensor, "n d1"], depth: int) -> Count:
    """The same by chains of `depth` drafts: exact, since where steps begin is a Markov chain on the text."""
    n, found = len(kept), begins(kept[:, 1 : depth + 1].numpy())
    steps = float(found[:n].sum())
    return Count(float(found[n:] @ np.arange(n, n + depth + 1)), steps, depth * steps)
