"""Block verification as one compiled pass over rows in CPU memory; `block.plain_decision` is what it computes."""

import numpy as np
from torch import Tensor

from foretoken.core import laws
from foretoken.core.compiled import compiled


def fast_decision(p: Tensor, q: Tensor, drafts: tuple[int, ...], u: Tensor) -> tuple[int, int] | None:
    """plain_decision, None where the compiled loop does not serve: other devices or dtypes, or two dtypes."""
    from foretoken.verify.block_loop import block_loop

    # Asked of `laws`, where the audit sets compiled draws aside to take every way.
    if not (laws.on_cpu(p) and laws.on_cpu(q) and p.dtype == q.dtype):
        return None
    arrays = p.detach().numpy(), q.detach().numpy(), np.array(drafts), u.numpy()
    return compiled(block_loop, reorder_sums=True)(*arrays)
