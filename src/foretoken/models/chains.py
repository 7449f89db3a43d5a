"""What a call that draws a whole chain of tokens is asked for, and what it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.draws import draw_iid, draw_likeliest
from foretoken.core.sampling import Truncation, softmax
from foretoken.core.shapes import Float, Int
from foretoken.kernel.sizes import ALL, NONE


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


Level = Callable[[int, Int[Tensor, " 1"]], Float[Tensor, "1 v"]]  # scores after the token of a level, from 1 on


def draw_levels(scores: Float[Tensor, "1 v"], below: Level, draws: ChainDraws) -> DrawnChain:
    """A chain in torch, drawn as it is level by level. Its tokens stay on their device until all of them are drawn, so
    that the next forward is started before the token that it reads is known.

    scores: after the text. below: called with the number of a level, and with the token of the level above.
    """
    likeliest = draws.likeliest or draws.temperature == 0
    temperature, truncation = (draws.temperature, draws.truncation) if draws.temperature else (1.0, ALL)
    tokens, rows, shares = [], [], []
    for level in range(len(draws.u)):
        if level > 0:
            scores = below(level, tokens[-1].clamp(min=0))
        rows.append(scores.float() if likeliest and not draws.floors else softmax(scores, temperature, truncation))
        drawn = draw_likeliest(rows[-1], 1) if likeliest else draw_iid(rows[-1], draws.u[level : level + 1])
        tokens.append(drawn[0])
        shares.append(rows[-1][0, drawn[0]])
    found = torch.cat(tokens).tolist()
    sure = torch.cat(shares).double().cumprod(0).tolist() if draws.floors else [1.0] * len(found)
    done = found.index(NONE) if NONE in found else len(found)
    for level in range(1, min(done, len(draws.floors))):
        if sure[level - 1] < draws.floors[level]:
            done = level
            break
    q = torch.cat(rows[:done]) if done and not likeliest else scores.new_empty(0, scores.shape[-1])
    return DrawnChain(found[:done], q, sure[:done])
