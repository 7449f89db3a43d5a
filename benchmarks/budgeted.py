"""Budgeted drafting at single nodes, as the rules are compared by it; core/budgeted.py says what it is."""

import numpy as np
from torch import Tensor

from foretoken.core.budgeted import law_with, number
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import IID
from foretoken.core.shapes import Float

MOST = 64  # draws at one node: where q is nearly one-hot no number of draws reaches the budget


def budgeted_laws(q: Float[Tensor, "m v"], budget: float | int, most: int = MOST) -> list[IID]:
    """The law of each row's draws, with E[distinct tokens] = budget, or `most` draws where that is out of reach."""
    if budget < 1:
        raise ForetokenError(f"budget is {budget}: it must be at least 1 distinct token.")
    rows = np.ascontiguousarray(q.detach().cpu().numpy())
    found = [number(row, float(budget), most) for row in rows]
    return [law_with(n, one_more) for n, one_more, _ in found]
