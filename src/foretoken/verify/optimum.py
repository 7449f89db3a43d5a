"""The best acceptance that any lossless rule can have."""

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID, Law
from foretoken.core.shapes import Float
from foretoken.verify.rows import rows


def alpha_star(law: Law, p: Float[Tensor, "..."], q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The largest P(the emitted token is among the draws) of any lossless rule for `law`, for every pair of rows p, q.

        alpha* = 1 + min over token sets H of  p(H) - P(all draws are in H)             (Hu et al. 2025)

    For i.i.d. draws the best H is a suffix of the tokens in the order of falling p/q: one sort and one scan.
    p, q: distributions [..., v]; leading dimensions broadcast. Returns float64 [...].
    """
    if not isinstance(law, IID):
        raise ForetokenError(f"alpha_star does not know law {law.name}: give an iid law.")
    p_rows, q_rows, shape = rows(p, q)
    return iid_optimum(p_rows, q_rows, law).reshape(shape)


def iid_optimum(p: Float[Tensor, "m v"], q: Float[Tensor, "m v"], law: IID) -> Float[Tensor, " m"]:
    """1 + min over suffixes H: with A the tokens before H, p(H) - P(all in H) = g(q(A)) - p(A)."""
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, descending=True)
    p_before, q_before = p.gather(-1, order).cumsum(-1), q.gather(-1, order).cumsum(-1).clamp(max=1)
    return 1 + (law.hit(q_before) - p_before).min(-1).values.clamp(max=0)
