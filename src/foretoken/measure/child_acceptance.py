"""The acceptance of each child of a node: the vector from which Sequoia trees are computed.

    a_b = P(the emitted token is the b-th draw, and none before it),   b = 1 .. k,

for one rule, law and temperature, where k children are drawn. These probabilities are not conditional on the rejection
of earlier draws. Each is a mean over the positions of the target's own continuations of some prompts. Given the draws
it is the row's entry at the b-th draw, so that only draws are sampled, and no emitted token.
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
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Approximate, LawFamily, Verifier
from foretoken.engine import Engine
from foretoken.measure.results import as_line, check, parsed
from foretoken.measure.teacher_forcing import ScoredText, drafter_lm, logits_at, written

DRAWS = 4  # times that all children are drawn at each position


@dataclass(frozen=True)
class ChildAcceptance:
    """The acceptance of each child, for one rule, law and temperature.

    verifier, law: their names.
    temperature: of both models.
    acceptance: acceptance[b] is that of child b + 1, in draw order [k].
    standard_error: of each of these means, over the positions [k].
    positions: the number of positions.
    """

    verifier: str
    law: str
    temperature: float
    acceptance: tuple[float, ...]
    standard_error: tuple[float, ...]
    positions: int


def check_children(rule: Verifier, children: int) -> None:
    """Refuse a rule whose acceptance cannot be measured, since it is not lossless for so many children of a node.

    rule: the verifier, by the first of whose laws children are drawn.
    children: their number at each node.

    Raises ForetokenError.
    """
    if isinstance(rule, Approximate):
        raise ForetokenError(
            f"Verifier {rule.name} is only approximately lossless, so no engine takes it: choose another --verifier."
        )
    family = rule.laws[0]
    if not rule.accepts(family(children)):
        most = max(k for k in range(1, children) if rule.accepts(family(k)))
        raise ForetokenError(
            f"Verifier {rule.name} is not lossless for {children} children of a node: give --children {most}, or "
            "choose another --verifier."
        )


def continued(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float, seed: int
) -> ScoredText:
    """Return the logits of both models for each token of the target's own continuations of some prompts.

    engine, prompts, num_tokens, temperature, seed: as in `written`; each new token is one position.

    Raises ForetokenError where the drafter is no language model with the target's ids.
    """
    lms = engine.target.lm, drafter_lm(engine, "has no distribution to draw from")
    new = written(engine, prompts, num_tokens, temperature, seed)
    texts = [ids + text for ids, text in zip(prompts, new, strict=True)]
    places = [(i, len(ids) + t - 1) for i, ids in enumerate(prompts) for t in range(len(new[i]))]
    v = engine.target.vocab_size
    return ScoredText(*(logits_at(lm, texts, places, v) for lm in lms))


def child_acceptance(
    rule: Verifier, family: LawFamily, children: int, text: ScoredText, temperature: float, seed: int
) -> ChildAcceptance:
    """Return the acceptance of each child by a `rule`, a mean over the positions of a text.

    family: the kind of law by which children are drawn; by the opaque law they are the drafter's likeliest tokens.
    children: their number k at each node.
    text: the logits of both models.
    temperature: that of both; for the opaque law the drafter's is 1, which does not change the order of tokens.
    seed: of the draws.
    """
    opaque = family is Opaque  # ranked by any score; at temperature 0 q would be one-hot
    p, q = text.rows(temperature, 1.0 if opaque else temperature)
    mass = sampled(rule, family(children), p, q, 1 if opaque else DRAWS, seed).mean(1)
    errors = mass.std(0) / len(mass) ** 0.5 if len(mass) > 1 else torch.zeros(children)
    return ChildAcceptance(
        rule.name, family.name, temperature, tuple(mass.mean(0).tolist()), tuple(errors.tolist()), len(mass)
    )


def siblings(draws: tuple[int, ...], q: Float[Tensor, " v"], law: Law) -> Siblings:
    """Return the record of a node's children; draws, q, law: as in Siblings, but q is also given for an opaque law."""
    return Siblings(draws, None if isinstance(law, Opaque) else q, law)


def draw(law: Law, q: Float[Tensor, " v"], times: int, rng: torch.Generator) -> list[tuple[int, ...]]:
    """Return the draws of one node by a `law`, drawn so many `times` with random numbers of `rng`.

    q: the drafter's weights of the next token [v].
    """
    u = torch.rand(times, law.num_uniforms, generator=rng, dtype=torch.float64)
    return [tuple(x for x in row if x != NONE) for row in law.draw(q.expand(times, -1), u).tolist()]


def sampled(
    rule: Verifier, law: Law, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"], num_draws: int, seed: int
) -> Float[Tensor, "n m k"]:
    """Return P(the emitted token is the j-th draw | the draws) [n, m, k]; 0 for a draw that repeats an earlier one.

    rule: the verifier.
    law: how the k children of a node are drawn.
    p, q: distributions of the target and of the drafter at n nodes [n, v].
    num_draws: the number m of times that the children of each node are drawn.
    seed: that of the draws.
    """
    rng = torch.Generator().manual_seed(seed)
    mass = torch.zeros(len(p), num_draws, law.k, dtype=torch.float64)
    for i in range(len(p)):
        for j, draws in enumerate(draw(law, q[i], num_draws, rng)):
            row = rule(p[i], siblings(draws, q[i], law))
            for place, x in first_places(draws):
                mass[i, j, place] = row[x]
    return mass


def first_places(draws: Sequence[int]) -> list[tuple[int, int]]:
    """Return (place, token) of the distinct `draws`, each at its first place, counted from 0."""
    return [(place, x) for place, x in enumerate(draws) if x not in draws[:place]]


def read(path: Path, settings: Mapping[str, Any]) -> ChildAcceptance | None:
    """Read what an earlier run wrote into the file at `path`; returns None if that does not exist.

    settings: those of this run, by name, `children` among them.

    Raises ForetokenError where the file holds something else, or was measured with other settings.
    """
    if not path.exists():
        return None
    try:
        found, record = parsed(ChildAcceptance, path.read_text())
        if any(list(map(type, values)) != [float] * settings["children"] for values in
               (found.acceptance, found.standard_error)):  # fmt: skip
            raise ValueError("not a number per child")
    except OSError as error:
        raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ForetokenError(f"{path} is not a file of foretoken bench acceptance: move it or name another.") from error
    check(path, record, settings)
    return found


def write(found: ChildAcceptance, path: Path, settings: Mapping[str, Any]) -> None:
    """Write a JSON file that the tree `sequoia:N@FILE` reads; it is moved into place when it is complete.

    found: the result.
    settings: those of this run, by name.
    path: the file, replaced if it exists.
    """

    def how(temporary: Path) -> None:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(as_line(found, settings))

    files.write(path, how)
