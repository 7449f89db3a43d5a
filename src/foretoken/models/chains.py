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
    """A chain in torch, as it is drawn level by level. At temperature 0 its tokens stay on their device until all of
    them are drawn, so that the next forward is started before the token that it reads is known.

    scores: after the text. below: called with the number of a level, and with the token of the level above.
    """
    likeliest = draws.likeliest or draws.temperature == 0
    temperature, truncation = (draws.temperature, draws.truncation) if draws.temperature else (1.0, ALL)
    tokens, rows, sure, u = [], [], [], draws.u.to(scores.device)
    for level in range(len(u)):
        if level > 0:
            scores = below(level, tokens[-1].clamp(min=0))
        row = scores.float()
        if draws.floors or not likeliest:
            row = softmax(row, temperature, truncation)
        drawn = draw_likeliest(row, 1) if likeliest else draw_iid(row, u[level : level + 1])
        tokens.append(drawn[0])
        rows.append(row)
        if draws.floors:
            sure.append((sure[-1] if sure else 1.0) * float(row[0, drawn[0]]))
            if level + 1 < len(draws.floors) and sure[-1] < draws.floors[level + 1]:
                break
    found = torch.cat(tokens).tolist()
    done = found.index(NONE) if NONE in found else len(found)
    q = torch.cat(rows[:done]) if done and not likeliest else rows[0][:0]
    return DrawnChain(found[:done], q, sure[:done] or [1.0] * done)
