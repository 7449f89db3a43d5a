"""Acceptance without sampling: the probability that the emitted token is among the draws."""

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Law
from foretoken.core.shapes import Float
from foretoken.core.verifier import HasAcceptance, Verifier
from foretoken.verify import VERIFIERS

SUM_TOLERANCE = 1e-3  # a float16 softmax over a large vocabulary is off by about that


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


def rows(
    p: Float[Tensor, "..."], q: Float[Tensor, "..."], scores: bool = False
) -> tuple[Float[Tensor, "m v"], Float[Tensor, "m v"], torch.Size]:
    """Checked, broadcast, float64 and normalised rows, and the leading shape. scores: q is left as it is."""
    if p.ndim == 0 or q.ndim == 0 or p.shape[-1] != q.shape[-1] or p.shape[-1] == 0:
        raise ForetokenError(
            f"p and q must be over one vocabulary, but their shapes are {tuple(p.shape)} and {tuple(q.shape)}."
        )
    try:
        p, q = torch.broadcast_tensors(p, q)
    except RuntimeError:
        raise ForetokenError(
            f"The leading dimensions of p {tuple(p.shape)} and q {tuple(q.shape)} do not broadcast."
        ) from None
    v = p.shape[-1]
    p_rows = distributions(p.reshape(-1, v), "p")
    q_rows = q.reshape(-1, v).double() if scores else distributions(q.reshape(-1, v), "q")
    return p_rows, q_rows, p.shape[:-1]


def distributions(rows: Float[Tensor, "m v"], name: str) -> Float[Tensor, "m v"]:
    """The rows in float64, normalised; ForetokenError where one is no distribution."""
    rows = rows.double()
    totals = rows.sum(-1, keepdim=True)
    bad = ~((rows >= 0).all(-1) & ((totals[:, 0] - 1).abs() <= SUM_TOLERANCE))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ForetokenError(
            f"Row {i} of {name} is no distribution (least {float(rows[i].min()):g}, sum {float(totals[i]):g}): "
            "give probabilities >= 0 that sum to 1."
        )
    return rows / totals


def _named(name: str) -> Verifier:
    if name not in VERIFIERS:
        raise ForetokenError(f"Unknown verifier {name}: choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]
