"""What the rules share: a base class, and questions about laws that several rules ask."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draws import on_cpu
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings

TINY = 1e-290  # masses below it are rounding, and 1 / TINY is still finite
Kinds = tuple[type[IID] | type[WithoutReplacement] | type[Hub], ...]  # kinds of laws


@dataclass(frozen=True)
class Rule:
    """What most rules share: they accept every law of the kinds in `laws`, and a single draw by any law but opaque.

    name: the name by which users choose the rule.
    laws: the kinds of laws that the rule is made for, the best first.
    """

    name: str
    laws: Kinds = (IID,)

    def accepts(self, law: Law) -> bool:
        return isinstance(law, self.laws) or is_single(law)


def is_single(law: Law) -> bool:
    """Whether `law` makes at most one draw, and makes it from q: for one draw all laws but the opaque one are alike."""
    return isinstance(law, IID | WithoutReplacement | Hub) and law.k <= 1


def draws_one(law: Law) -> bool:
    """Whether `law` always makes exactly one draw from q, so that every rule may decide as the standard one does."""
    return is_single(law) and law.k == 1 and not (isinstance(law, IID) and law.counts is not None)


def is_one_draw(siblings: Siblings) -> bool:
    """Whether `siblings` record one draw by a law for which `draws_one` is true."""
    return draws_one(siblings.law) and len(siblings.draws) == 1


def loops_take(p: Tensor, q: Tensor) -> bool:
    """Whether the compiled loops can work on p and q [v]: both are in CPU memory and of one dtype."""
    return on_cpu(p) and on_cpu(q) and p.dtype == q.dtype


def as_numpy(row: Float[Tensor, " v"]) -> np.ndarray:
    """Return `row` [v] as a contiguous array in CPU memory, half precision as float32."""
    row = row.detach()
    if not on_cpu(row):
        row = row.to("cpu", torch.promote_types(row.dtype, torch.float32))
    return np.ascontiguousarray(row.numpy())


def count_chances(law: Law) -> tuple[float, ...]:
    """Return P(N = 0), ..., P(N = k) for the number N of draws that `law` makes at a node."""
    return law.chances if isinstance(law, IID) else (0.0,) * law.k + (1.0,)
