"""What a compiled call that draws a whole chain of tokens is asked for, and what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.sampling import Truncation
from foretoken.core.shapes import Float
from foretoken.kernel.sizes import ALL


@dataclass(frozen=True)
class ChainDraws:
    """How the tokens of a chain are taken.

    u: uniforms in [0, 1), one per level.
    temperature: of q. At 0 the likeliest tokens are taken, and what `floors` asks for is of temperature 1.
    truncation: of q.
    likeliest: whether the likeliest tokens are taken at any temperature.
    floors: the chain ends in front of a level down to which the product of q is less; empty where nobody asks.
    """

    u: Float[Tensor, "levels 1"]
    temperature: float
    truncation: Truncation = ALL
    likeliest: bool = False
    floors: Sequence[float] = ()


@dataclass(frozen=True)
class DrawnChain:
    """What was drawn; nothing where some logits were not finite.

    tokens: by level. q: what each was drawn from; no rows where the likeliest were taken. sure: the product of q down
    to each token; of likeliest ones 1 where nobody asked for it.
    """

    tokens: list[int]
    q: Float[Tensor, "_ v"]
    sure: list[float]
