"""The settings and the result of a call that draws a whole chain of tokens, and such a call in torch."""

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
    """How the tokens of a chain are drawn. Its level i is the draft token i, from 0 on.

    u: uniforms in [0, 1), one per level [levels, 1]; their number is the largest number of tokens.
    temperature: that of q. At 0 the likeliest tokens are taken, and the q that is compared with `floors` is that of
        temperature 1.
    truncation: top_k, top_p and min_p of q; without effect at temperature 0.
    likeliest: whether the likeliest tokens are taken at any temperature.
    floors: per level the least product of q over the tokens before it. The chain ends in front of the first level
        whose floor is not reached; empty: there are none.
    """

    u: Float[Tensor, "levels 1"]
    temperature: float
    truncation: Truncation = ALL
    likeliest: bool = False
    floors: Sequence[float] = ()


@dataclass(frozen=True)
class DrawnChain:
    """The tokens of a chain; the kernel returns none where some logits are not finite.

    tokens: their ids, in order.
    q: the distribution that each was drawn from [tokens, v]; no rows where the likeliest were taken.
    sure: per token the product of q from the first token to it; without `floors` it may be 1 instead.
    """

    tokens: list[int]
    q: Float[Tensor, "_ v"]
    sure: list[float]


Level = Callable[[int, Int[Tensor, " 1"]], Float[Tensor, "1 v"]]  # (level from 1 on, token before it) -> its logits


def draw_levels(scores: Float[Tensor, "1 v"], below: Level, draws: ChainDraws) -> DrawnChain:
    """Draw a chain in torch, level by level, and return it.

    Where the likeliest tokens are taken and there are no floors, they stay on their device until the chain ends, so
    that each forward is started before the token that it reads has been computed.

    scores: the drafter's logits after the text [1, v].
    below: runs the forward of a level: called with the level's number, from 1 on, and the token of the level before
        [1], it returns the logits after that token [1, v].
    draws: how the tokens are drawn.
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
