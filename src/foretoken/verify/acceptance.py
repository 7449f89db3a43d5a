"""Acceptance without sampling: the probability that the emitted token is among the draws."""

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.verifier import HasAcceptance, Verifier
from foretoken.verify import VERIFIERS
from foretoken.verify.rows import rows


def acceptance(
    rule: str | Verifier, law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """P(the emitted token is among the draws), exactly, for every pair of rows p, q; float64, without sampling.

    rule: a name or a verifier, law: how the children are drawn, e.g. foretoken.law("iid", 4). p, q: distributions
    [..., v], whose leading dimensions broadcast; for the opaque law q is any score, its best k tokens the children.
    Raises ForetokenError if the rule is not lossless for the law, a row is no distribution, or there is no closed form.
    """
    rule = _named(rule) if isinstance(rule, str) else rule
    if not rule.accepts(law):
        raise ForetokenError(f"Verifier {rule.name} is not lossless for law {law.name} with {law.k} draws.")
    if not isinstance(rule, HasAcceptance):
        able = [name for name, other in VERIFIERS.items() if isinstance(other, HasAcceptance)]
        raise ForetokenError(f"Verifier {rule.name} has no closed form of its acceptance; {', '.join(able)} have one.")
    p_rows, q_rows, shape = rows(p, q, scores=law.name == "opaque")
    return rule.acceptance(p_rows, q_rows, law).reshape(shape)


def _named(name: str) -> Verifier:
    if name not in VERIFIERS:
        raise ForetokenError(f"Unknown verifier {name}: choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]
