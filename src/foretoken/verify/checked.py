"""Rules that check their arguments, for users who call a rule directly. The decoding loop does without the checks."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law, Opaque, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings
from foretoken.core.verifier import Verifier
from foretoken.verify.acceptance import distributions


def checked(rule: Verifier) -> Verifier:
    """Return a copy of `rule`, of a subclass of its class, whose calls check their arguments by `check`."""
    kind = type(rule)
    settings = {setting.name: getattr(rule, setting.name) for setting in fields(kind)}  # pyright: ignore[reportArgumentType]
    return type(kind.__name__, (_Checking, kind), {})(**settings)


class _Checking:
    def __call__(self: Any, p: Float[Tensor, "..."], siblings: Siblings) -> Float[Tensor, "..."]:
        check(self, p, siblings)
        return super().__call__(p, siblings)  # pyright: ignore[reportAttributeAccessIssue]


def check(rule: Verifier, p: Float[Tensor, "..."], siblings: Siblings) -> None:
    """Raise ForetokenError where a rule cannot be called with these arguments.

    rule: the rule, which must be lossless for the law of the siblings.
    p: the target's distribution, one row of sum 1 [v].
    siblings: the draws, which their law must be able to make, and q, if any, a distribution like p.
    """
    q, law, draws = siblings.q, siblings.law, siblings.draws
    if not rule.accepts(law):
        raise ForetokenError(f"Verifier {rule.name} is not lossless for law {law.name} with {law.k} draws.")
    for name, row in (("p", p), ("q", q)):
        if row is None:
            continue
        if row.ndim != 1 or len(row) == 0:
            raise ForetokenError(f"{name} must be one row over the vocabulary, but its shape is {tuple(row.shape)}.")
        distributions(row[None], name)
    if q is not None and q.shape != p.shape:
        raise ForetokenError(f"p has {len(p)} tokens and q {len(q)}: both must be over the target's vocabulary.")
    for x in draws:
        if not 0 <= x < len(p):
            raise ForetokenError(f"Draw {x} is outside the vocabulary: token ids are 0 to {len(p) - 1}.")
        if q is not None and not q[x] > 0:
            raise ForetokenError(f"Draw {x} cannot come from q: its probability there is 0.")
    if not isinstance(law, Opaque):
        assert q is not None
        check_draws(law, q, draws)


def check_draws(law: Law, q: Float[Tensor, " v"], draws: tuple[int, ...]) -> None:
    """Raise ForetokenError for draws that the law never makes: too few, too many, repeated, or without a hub.

    law: any but the opaque one.
    q: the drafter's distribution [v].
    draws: token ids in draw order, each with q > 0.
    """
    # Not by `prob` of draws of which any may be improbable: the product of many small numbers would vanish.
    if isinstance(law, IID):
        possible = len(draws) <= law.k and law.chances[len(draws)] > 0
    elif isinstance(law, WithoutReplacement):
        possible = len(draws) == len(set(draws)) == min(law.k, int((q > 0).sum()))
    else:
        possible = law.prob(q, draws) > 0
    if not possible:
        raise ForetokenError(
            f"Law {law.name} with {law.k} draws never makes the draws {draws} from a q of {int((q > 0).sum())} tokens."
        )
