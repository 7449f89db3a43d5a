"""Nodes of at most one draw in `tree_block`, as compiled passes over rows in CPU memory; `TreeBlock.law` is what they
compute, without writing the row of a child that is accepted after all."""

import numpy as np
from torch import Tensor

from foretoken.core import laws
from foretoken.core.compiled import compiled


def serves(p: Tensor, q: Tensor | None) -> bool:
    """Whether the loops take these rows."""
    # Asked of `laws`, where the audit sets compiled draws aside to take every way.
    return laws.on_cpu(p) and (q is None or (laws.on_cpu(q) and p.dtype == q.dtype))


def fast_share(p: Tensor, q: Tensor, token: int, weight: float) -> float:
    """min(1, weight p(token) / q(token)), of rows of any sum."""
    from foretoken.verify.tree_block_loop import share_loop

    return compiled(share_loop, reorder_sums=True)(p.numpy(), q.numpy(), token, weight)


def fast_end(p: Tensor, q: Tensor | None, weight: float, u: float) -> int:
    """The token drawn by u from ((weight p - q)+, 1 - weight), from (weight p, 1 - weight) without a q; v: rejected."""
    from foretoken.verify.tree_block_loop import end_loop

    drafted = np.empty(0, p.numpy().dtype) if q is None else q.numpy()
    return compiled(end_loop, reorder_sums=True)(p.numpy(), drafted, weight, u)
