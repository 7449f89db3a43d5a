"""How often each child of a node is the accepted one: the vector that Sequoia trees are computed from.

    a_b = P(the emitted token is the b-th draw, and none before it),   b = 1 .. k,

unconditional, for one rule, law and temperature, where k children are drawn: a mean over the positions of a workload,
the target's own continuations of some prompts. Given the draws it is the row's mass at the draw, so that no emitted
token is sampled: only draws are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core import files
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import NONE, Law, Opaque
from foretoken.core.sampling import Sampling
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.engine import Engine
from foretoken.measure.results import as_line, check, parsed
from foretoken.measure.teacher_forcing import ScoredText, drafter_lm, logits_at, written

DRAWS = 4  # of all children at each position


@dataclass(frozen=True)
class ChildAcceptance:
    """acceptance[b]: of child b; standard_error: of each, over the positions."""

    verifier: str
    law: str
    temperature: float
    acceptance: tuple[float, ...]
    standard_error: tuple[float, ...]
    positions: int


def continued(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float, seed: int
) -> ScoredText:
    """Logits of both models along the target's own continuations of the prompts, `num_tokens` of each.

    Raises ForetokenError where the drafter is no language model.
    """
    lms = engine.target.lm, drafter_lm(engine, "has no distribution to draw from")
    texts = [
        ids + text for ids, text in zip(prompts, written(engine, prompts, num_tokens, temperature, seed), strict=True)
    ]
    places = [(i, len(ids) + t - 1) for i, ids in enumerate(prompts) for t in range(len(texts[i]) - len(ids))]
    v = engine.target.vocab_size
    return ScoredText(*(logits_at(lm, texts, places, v) for lm in lms))


def child_acceptance(
    rule: Verifier, family: LawFamily, children: int, text: ScoredText, temperature: float, seed: int
) -> ChildAcceptance:
    """a_1 .. a_k for k = `children`. At temperature 0 children are the likeliest tokens, matched exactly."""
    p = Sampling(temperature=temperature)(text.target.double())
    opaque = family is Opaque  # ranked by any score; at temperature 0 q would be one-hot
    q = Sampling(temperature=1.0 if opaque else temperature)(text.drafter.double())
    mass = sampled(rule, family(children), p, q, 1 if opaque else DRAWS, seed).mean(1)
    errors = mass.std(0) / len(mass) ** 0.5 if len(mass) > 1 else torch.zeros(children)
    return ChildAcceptance(
        rule.name, family.name, temperature, tuple(mass.mean(0).tolist()), tuple(errors.tolist()), len(mass)
    )


def siblings(draws: tuple[int, ...], q: Float[Tensor, " v"], law: Law) -> Siblings:
    return Siblings(draws, None if isinstance(law, Opaque) else q, law)


def draw(law: Law, q: Float[Tensor, " v"], times: int, rng: torch.Generator) -> list[tuple[int, ...]]:
    """The draws of one node, again and again."""
    u = torch.rand(times, law.num_uniforms, generator=rng, dtype=torch.float64)
    return [tuple(x for x in row if x != NONE) for row in law.draw(q.expand(times, -1), u).tolist()]


def sampled(
    rule: Verifier, law: Law, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], num_draws: int, seed: int
) -> Float[Tensor, "n m k"]:
    """P(emitted token is draw j | draws), for `num_draws` draws m at each of n pairs."""
    rng = torch.Generator().manual_seed(seed)
    mass = torch.zeros(len(p), num_draws, law.k, dtype=torch.float64)
    for i in range(len(p)):
        for j, draws in enumerate(draw(law, q[i], num_draws, rng)):
            row = rule(p[i], siblings(draws, q[i], law))
            for place, x in first_places(draws):
                mass[i, j, place] = row[x]
    return mass


def first_places(draws: Sequence[int]) -> list[tuple[int, int]]:
    """(place, token) of the distinct draws, each at its first place."""
    return [(place, x) for place, x in enumerate(draws) if x not in draws[:place]]


def read(path: Path, settings: Mapping[str, Any]) -> ChildAcceptance | None:
    """What an earlier run left in the file, None if there is none; ForetokenError if its settings were others."""
    if not path.exists():
        return None
    try:
        found, record = parsed(ChildAcceptance, path.read_text())
    except OSError as error:
        raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ForetokenError(f"{path} is not a file of foretoken bench acceptance: move it or name another.") from error
    check(path, record, settings, "--out")
    return found


def write(found: ChildAcceptance, path: Path, settings: Mapping[str, Any]) -> None:
    """Write JSON, which `sequoia:N@FILE` reads; it is moved into place when it is whole."""

    def how(temporary: Path) -> None:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(as_line(found, settings))

    files.write(path, how)
