"""Rows of probabilities that a caller hands in: checked, broadcast and normalised."""

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float

SUM_TOLERANCE = 1e-3  # a float16 softmax over a large vocabulary is off by about that


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


def distribution(row: Float[Tensor, "..."], name: str) -> None:
    """ForetokenError where the row is not one distribution [v]."""
    if row.ndim != 1 or len(row) == 0:
        raise ForetokenError(f"{name} must be one row over the vocabulary, but its shape is {tuple(row.shape)}.")
    distributions(row[None], name)


def distributions(rows: Float[Tensor, "m v"], name: str) -> Float[Tensor, "m v"]:
    """The rows in float64, normalised; ForetokenError where one is no distribution."""
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
