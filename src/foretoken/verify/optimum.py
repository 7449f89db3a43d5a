"""The best acceptance that any lossless rule can have."""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Hub, Law, Opaque, WithoutReplacement, outcomes
from foretoken.core.shapes import Float
from foretoken.verify.rows import rows
from foretoken.verify.successive import inside_suffixes


def alpha_star(law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The largest P(the emitted token is among the draws) of any lossless rule for `law`, for every pair of rows p, q.

        alpha* = 1 + min over token sets H of  p(H) - P(all draws are in H)             (Hu et al. 2025)

    For i.i.d. draws and for draws without replacement the best H is a suffix of the tokens in the order of falling
    p/q: one sort and one scan, in O(v log v) and in O(v k) for each of about 700 nodes of an integral. For hub and
    opaque draws sum_x min(p(x), P(x among the draws)), O(v k). Any other law: a linear program over its draws, to 1e-7.
    p, q: distributions [..., v]; leading dimensions broadcast; for the opaque law q is any score, its best k tokens the
    children. Returns float64 [...]. Raises ForetokenError where a row is no distribution or a law is too large to
    enumerate.
    """
    p_rows, q_rows, shape = rows(p, q, scores=isinstance(law, Opaque))
    return _optimum(law)(p_rows, q_rows).reshape(shape)


def _optimum(law: Law) -> Callable[[Float[Tensor, "m v"], Float[Tensor, "m v"]], Float[Tensor, " m"]]:
    if isinstance(law, IID):
        return lambda p, q: iid_optimum(p, q, law)
    if isinstance(law, WithoutReplacement):
        return lambda p, q: _distinct_optimum(p, q, law.k)
    if isinstance(law, Hub | Opaque):
        return lambda p, q: torch.minimum(p, law.marginals(q)).sum(-1)
    return lambda p, q: torch.tensor([_by_linear_program(law, *pair) for pair in zip(p, q, strict=True)]).double()


def _by_linear_program(law: Law, p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> float:
    """max sum S(i, draws), sum_i S <= P(draws), sum over draws of S <= p(i), i among the draws."""
    if find_spec("scipy") is None:
        raise ForetokenError(f"alpha_star for law {law.name} needs scipy: pip install 'foretoken[transport]'.")
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    weighed = list(outcomes(law, q))
    cells = [(row, token) for row, (draws, _) in enumerate(weighed) for token in set(draws)]
    if not cells:
        return 0.0
    by_draws, tokens = np.array(cells).T
    where = np.concatenate([by_draws, len(weighed) + tokens]), np.tile(np.arange(len(cells)), 2)
    limits = csr_array((np.ones(2 * len(cells)), where), shape=(len(weighed) + len(p), len(cells)))
    bounds = np.array([*(prob for _, prob in weighed), *p.tolist()])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    return -float(linprog(-np.ones(len(cells)), limits, bounds, method="highs", options=tight).fun)


def iid_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: IID) -> Float[Tensor, " m"]:
    """1 + min over suffixes H: with A the tokens before H, p(H) - P(all in H) = g(q(A)) - p(A)."""
    p, q = _by_falling_ratio(p, q)
    p_before, q_before = p.cumsum(-1), q.cumsum(-1).clamp(max=1)
    return 1 + (law.hit(q_before) - p_before).min(-1).values.clamp(max=0)


def _by_falling_ratio(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"]) -> tuple[Tensor, Tensor]:
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, descending=True)
    return p.gather(-1, order), q.gather(-1, order)


def _distinct_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], k: int) -> Float[Tensor, " m"]:
    if k == 0:
        return torch.zeros_like(p[:, 0])
    p, q = _by_falling_ratio(p, q)
    p_before = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(-1)[:, :-1]], -1)
    least = (1 - p_before - inside_suffixes(q, k)).min(-1).values
    return 1 + least.clamp(max=0)  # H empty: p(H) = P(all in H) = 0
