"""Acceptance without sampling: the probability that the emitted token is among the draws, and its bound alpha*."""

from importlib.util import find_spec

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement
from foretoken.core.limits import check_choice
from foretoken.core.shapes import Float
from foretoken.core.verifier import HasAcceptance, Verifier
from foretoken.verify import VERIFIERS
from foretoken.verify.published.sets import draw_sets
from foretoken.verify.published.solvers import flow_by_program
from foretoken.verify.successive import inside_suffixes

SUM_TOLERANCE = 1e-3  # a float16 softmax over a large vocabulary is off by about that


def acceptance(
    rule: str | Verifier, law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return P(the emitted token is among the draws), exactly, for every pair of rows of p and q; float64 [...].

    For `pairwise` and `transport-grouped` it is the probability that the one draw they pick is accepted, which can be a
    little less.

    rule: a name or a verifier.
    law: how the children are drawn, e.g. foretoken.law("iid", 4).
    p: target distributions [..., v].
    q: draft distributions [..., v], whose leading dimensions broadcast with p's; for the opaque law any scores, whose
        best k tokens are the children.

    Raises ForetokenError if the rule is not lossless for the law, a row is no distribution, or there is no closed form.
    """
    if isinstance(rule, str):
        check_choice("verifier", rule, VERIFIERS)
        rule = VERIFIERS[rule]
    if not rule.accepts(law):
        raise ForetokenError(f"Verifier {rule.name} is not lossless for law {law.name} with {law.k} draws.")
    if not isinstance(rule, HasAcceptance):
        able = [name for name, other in VERIFIERS.items() if isinstance(other, HasAcceptance)]
        raise ForetokenError(f"Verifier {rule.name} has no closed form of its acceptance; {', '.join(able)} have one.")
    p_rows, q_rows, shape = _pairs(p, q, scores=law.name == "opaque")
    return rule.acceptance(p_rows, q_rows, law).reshape(shape)


def alpha_star(law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the largest acceptance of any lossless rule for `law`, for every pair of rows of p and q; float64 [...].

        alpha* = 1 + min over token sets H of  p(H) - P(all draws are in H)

    For i.i.d. draws and for draws without replacement the best H is a suffix of the tokens in the order of falling
    p/q. That takes one sort and one scan, O(v log v) for i.i.d. draws. For draws without replacement it takes O(v k)
    for each of about 100 points of a numerical integral, and draws from a mass below 1e-290 of q do not count. For hub
    and opaque draws it is sum_x min(p(x), P(x among the draws)), O(v k). Any other law takes a linear program, to 1e-7.

    law, p, q: as for `acceptance`.

    Raises ForetokenError where a row is no distribution or a law is too large to enumerate.
    Source: Hu et al. 2025, Towards Optimal Multi-draft Speculative Decoding, arXiv:2502.18779.
    """
    p_rows, q_rows, shape = _pairs(p, q, scores=isinstance(law, Opaque))
    if isinstance(law, IID):
        found = iid_optimum(p_rows, q_rows, law)
    elif isinstance(law, WithoutReplacement):
        found = _distinct_optimum(p_rows, q_rows, law.k)
    elif isinstance(law, Hub | Opaque):
        found = torch.minimum(p_rows, law.marginals(q_rows)).sum(-1)
    else:
        each = [_by_linear_program(law, *pair) for pair in zip(p_rows, q_rows, strict=True)]
        found = torch.tensor(each, dtype=torch.float64)
    return found.reshape(shape)


def iid_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: IID) -> Float[Tensor, " m"]:
    """Return alpha* for i.i.d. draws [m]: 1 + min over suffixes H of the tokens in the order of falling p/q.

    With A the tokens before H and g = `law.hit`, p(H) - P(all draws are in H) = g(q(A)) - p(A).

    p, q: distributions of the target and of the drafter, float64 [m, v].
    law: the i.i.d. draws, of fixed or random number.
    """
    p, q = _by_falling_ratio(p, q)
    p_before, q_before = p.cumsum(-1), q.cumsum(-1).clamp(max=1)
    return 1 + (law.hit(q_before) - p_before).min(-1).values.clamp(max=0)


def _distinct_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], k: int) -> Float[Tensor, " m"]:
    if k == 0:
        return torch.zeros_like(p[:, 0])
    p, q = _by_falling_ratio(p, q)
    p_before = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(-1)[:, :-1]], -1)
    least = (1 - p_before - inside_suffixes(q, k)).min(-1).values
    return 1 + least.clamp(min=-1, max=0)  # H empty: p(H) = P(all in H) = 0


def _by_falling_ratio(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"]) -> tuple[Tensor, Tensor]:
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, descending=True)
    return p.gather(-1, order), q.gather(-1, order)


def _by_linear_program(law: Law, p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> float:
    """Return the optimum of the linear program in published/sets.py, which is alpha* for any law."""
    if find_spec("scipy") is None:
        raise ForetokenError(f"alpha_star for law {law.name} needs scipy: pip install -e '.[transport]'.")
    return float(flow_by_program(draw_sets(law, q.cpu().numpy()), p.cpu().numpy()).sum())


def _pairs(
    p: Float[Tensor, "..."], q: Float[Tensor, "..."], scores: bool
) -> tuple[Float[Tensor, "m v"], Float[Tensor, "m v"], torch.Size]:
    """Return p and q as rows [m, v], broadcast, float64 and normalised, and the shape of their leading dimensions.

    scores: whether q holds scores, which are not checked and not normalised.
    """
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
    """Return the rows in float64, each divided by its sum.

    rows: probabilities, each row of sum 1 within SUM_TOLERANCE [m, v].
    name: what messages call the rows, such as "p".

    Raises ForetokenError where a row is no distribution.
    """
    rows = rows.double()
    totals = rows.sum(-1, keepdim=True)
    bad = ~((rows >= 0).all(-1) & ((totals[:, 0] - 1).abs() <= SUM_TOLERANCE))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ForetokenError(
            f"{f'Row {i} of {name}' if len(rows) > 1 else name} is no distribution (least {float(rows[i].min()):g}, "
            f"sum {float(totals[i]):g}): give probabilities >= 0 that sum to 1."
        )
    return rows / totals
