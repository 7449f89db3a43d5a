"""The published losses of the draft heads, on whole texts with their true tokens.

x_i is the text's token at position i, h_i the target's state there, p_i the target's distribution of x_{i+1}. A mean
over positions is over those where `mask` is true for the token that is predicted; in the losses of EAGLE and Gumiho,
which compare states, for the token at the position of the state.

All losses have the arguments head, texts and rng, and return a scalar:
head: the head that is trained.
texts: a batch of texts, with the target's states.
rng: the generator on the CPU from which noise and choices of positions are drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.shapes import Bool, Float, Int
from foretoken.heads.dflash import DFlash
from foretoken.heads.eagle import Eagle, Gumiho
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import Attend, Unrolled, causal

DECAY = 0.8  # factor of a level's weight from one level to the next
CLASSIFICATION = 0.1  # weight of the cross-entropy beside the regression (EAGLE, Gumiho)
MLPS = 9  # what the sum over Gumiho's MLPs is divided by
UNROLLED = 7  # levels drafted in EAGLE-3's training
ANCHORS = 6  # positions of a text per block of DFlash's training: 512 blocks in 3,072 tokens, as released


@dataclass(frozen=True)
class Texts:
    """A batch of b texts, padded on the right to t tokens.

    ids: the tokens [b, t].
    mask: which tokens are learnt; false for padding [b, t].
    features: the target's states that the head reads, those of its `feature_layers` side by side [b, t, f].
    states: the target's final states, which its LM head reads [b, t, d].
    """

    ids: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    features: Float[Tensor, "b t f"]
    states: Float[Tensor, "b t d"]

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """The number of tokens of each text up to the last one that is learnt, behind which there is only padding."""
        return self.ids.shape[1] - self.mask.flip(1).int().argmax(1)


def noisy(states: Float[Tensor, "b n d"], lengths: Int[Tensor, " b"], rng: torch.Generator) -> Float[Tensor, "b n d"]:
    """Return states with uniform noise, as in EAGLE's training: within +-0.1 * 512 / t for texts of t tokens.

    states: the states, of mean square about 1 [b, n, d].
    lengths: the number of tokens of each text [b].
    rng: the generator of the noise, on the CPU.
    """
    u = torch.rand(states.shape, generator=rng, dtype=states.dtype).to(states.device)
    return states + (u - 0.5) * 0.2 * 512 / lengths[:, None, None]


def drawn_places(learnt: Bool[Tensor, " n"], reach: int, share: float, rng: torch.Generator) -> Int[Tensor, " m"]:
    """Return random places from which drafts reach something that is learnt, in ascending order [m].

    learnt: which of the n places of a text are learnt [n].
    reach: how many places after its own a draft has.
    share: the share of these places that is drawn; at least one is, place 0 where there are none.
    rng: the generator of the choice, on the CPU.
    """
    up_to = learnt.cumsum(0)  # how many places are learnt up to each one
    ends = (torch.arange(len(learnt), device=learnt.device) + reach).clamp(max=len(learnt) - 1)
    places = torch.nonzero(up_to[ends] > up_to).flatten()
    if not len(places):
        return places.new_zeros(1)
    order = torch.randperm(len(places), generator=rng)[: max(1, round(share * len(places)))]
    return places[order.sort().values.to(places.device)]


def mean(values: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Tensor:
    """Return the mean of those values [b, n] where mask [b, n] is true; 0 where it is nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Float[Tensor, "b n v"], p: Float[Tensor, "b n v"]) -> Float[Tensor, "b n"]:
    """Return the cross-entropy of the softmax of logits [b, n, v] against the target's whole distribution p [b, n, v].

    It is in nats, per position [b, n].
    """
    return -(p * logits.float().log_softmax(-1)).sum(-1)


def regression(head: Eagle, states: Tensor, wanted: Tensor, p: Tensor, mask: Tensor, alone: bool = False) -> Tensor:
    """Return the mean SmoothL1 distance of states, plus CLASSIFICATION times the cross-entropy of what they predict.

    head: the head, whose `logits` makes the prediction.
    states, wanted: states that the head has made, and the target's in their place [b, n, d].
    p: the target's distribution of the token that follows [b, n, v].
    mask: positions that count [b, n].
    alone: whether the cross-entropy is left out.
    """
    distance = F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)
    return mean(distance if alone else distance + CLASSIFICATION * cross_entropy(head.logits(states), p), mask)


def _forward(head: Eagle, texts: Texts, rng: torch.Generator) -> Float[Tensor, "b n d"]:
    """Return the head's states o_i for i = 0 .. t - 2, from h_i with noise and x_{i+1} [b, t - 1, d]."""
    n = texts.ids.shape[1] - 1
    states = noisy(head.enter(texts.features[:, :-1]), texts.lengths, rng)
    cos, sin = head.rotary.angles(torch.arange(n, device=states.device)[None])
    return head.step(head.embed(texts.ids[:, 1:]), states, cos, sin, [causal] * head.num_layers)


def eagle_loss(head: Eagle, texts: Texts, rng: torch.Generator) -> Tensor:
    """Return the `regression` of o_i, the state made from h_i and x_{i+1}, to h_{i+1}.

    head, texts, rng: see the module's docstring. Source: EAGLE (Li et al. 2024), equations 3-5.
    """
    out = _forward(head, texts, rng)
    p = head.target.logits(texts.states[:, 1:]).float().softmax(-1)
    return regression(head, out, head.enter(texts.states[:, 1:]), p, texts.mask[:, 1:])


def gumiho_loss(head: Gumiho, texts: Texts, rng: torch.Generator, regress_only: bool = False) -> Tensor:
    """Return EAGLE's loss of the decoder layers, plus a ninth of the MLPs' sum: of MLP j to h_{i+3+j}, times 0.8^(j+1).

    The text's own x_{i+2} and x_{i+3} stand for the two draft tokens that the MLPs read. Source: Li et al. 2025,
    Gumiho, appendix C; the weights of the MLPs as in its released training code.

    head, texts, rng: see the module's docstring.
    regress_only: whether the MLPs' cross-entropy is left out, as it is at the beginning of the training.
    """
    out = _forward(head, texts, rng)
    p = head.target.logits(texts.states[:, 1:]).float().softmax(-1)
    wanted, mask = head.enter(texts.states[:, 1:]), texts.mask[:, 1:]
    total = regression(head, out, wanted, p, mask)
    joined = head.joined(head.embed(texts.ids[:, 2:]), out[:, :-1])
    parallel = head.parallel(torch.cat((joined[:, :-1], joined[:, 1:]), -1))
    for j in range(parallel.shape[2]):
        after = 2 + j  # h_{i+3+j} stands at index i + 2 + j of `wanted`
        got = parallel[:, : max(out.shape[1] - after, 0), j]
        if got.shape[1]:
            loss = regression(head, got, wanted[:, after:], p[:, after:], mask[:, after:], regress_only)
            total = total + DECAY ** (j + 1) / MLPS * loss
    return total


def medusa_loss(head: Medusa, texts: Texts, rng: torch.Generator) -> Tensor:
    """Return the sum over levels i of 0.8^i times the cross-entropy of level i at h_t against the token x_{t+2+i}.

    head, texts: see the module's docstring. rng: not used. Source: Cai et al. 2024, Medusa, section 2.3.
    """
    scores, n = head.levels(texts.features), texts.ids.shape[1]
    total = scores.new_zeros(())
    for i in range(min(scores.shape[2], n - 2)):
        level, tokens = scores[:, : n - 2 - i, i], texts.ids[:, 2 + i :]
        loss = F.cross_entropy(level.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
        total = total + DECAY**i * mean(loss, texts.mask[:, 2 + i :])
    return total


def hydra_loss(head: Hydra, texts: Texts, rng: torch.Generator) -> Tensor:
    """Return Medusa's sum of cross-entropies, but given the tokens between and against the target's distributions.

    head, texts: see the module's docstring. rng: not used. Source: Ankner et al. 2024, Hydra++.
    """
    n = texts.ids.shape[1]
    cos, sin = head.rotary.angles(torch.arange(n, device=texts.ids.device)[None])
    prefix = head.prefix_states(texts.features, cos, sin, causal)
    embedded = head.target.embed(texts.ids)
    p = head.target.logits(texts.states).float().softmax(-1)
    total = prefix.new_zeros(())
    for i in range(min(len(head.hydra_mlp), n - 2)):
        given = [embedded[:, 1 + j : n - 1 - i + j] for j in range(i + 1)]
        scores = head.level(i, prefix[:, : n - 2 - i], given)
        # Level i at h_t predicts x_{t+2+i}, whose distribution is p_{t+1+i}.
        loss = cross_entropy(scores, p[:, 1 + i : n - 1])
        total = total + DECAY**i * mean(loss, texts.mask[:, 2 + i :])
    return total


def eagle3_loss(head: Eagle3, texts: Texts, rng: torch.Generator, roots: float = 1.0) -> Tensor:
    """Return the sum over levels j of 0.8^j times the cross-entropy of level j, drafted on the head's own states.

    A head with only some of the target's tokens learns the target's distribution over these, at the positions where the
    text's own token is one of them. If the target wrote the text, a position thus counts with the probability that the
    head can draft its token. Source: Li et al. 2025, EAGLE-3.

    head, texts, rng: see the module's docstring.
    roots: share of the positions from which the levels after the first are drafted, drawn anew for every batch among
        those where a level has something to learn; 1: all positions, as published. A third makes a step of training
        twice as fast.
    """
    n = texts.ids.shape[1] - 1
    if head.t2d is None:
        p = head.target.logits(texts.states[:, 1:]).float().softmax(-1)
        named = texts.mask[:, 2:]
    else:
        p = head.target.logits_of(texts.states[:, 1:], torch.nonzero(head.t2d).flatten()).float().softmax(-1)
        named = texts.mask[:, 2:] & head.t2d[texts.ids[:, 2:]]
    follows = F.pad(named, (0, 1), value=False)  # the token after the text's last one is in no text
    embedded = head.embed(texts.ids[:, 1:])
    states = head.enter(texts.features[:, :-1])
    everywhere = torch.arange(n, device=states.device)
    chosen = everywhere if roots == 1 else drawn_places(follows.any(0), UNROLLED - 1, roots, rng)
    attend, total = Unrolled(chosen), states.new_zeros(())
    for j in range(min(UNROLLED, n)):
        # Level j below position r stands at r + j, reads x_{r+j+1}, and predicts x_{r+j+2}, whose p is p[r + j].
        if j == 1:
            states = states[:, chosen]
        at = (everywhere if j == 0 else chosen) + j
        inside = at < n  # below positions too near the end of the text there is no token at this level, but padding
        place = at.clamp(max=n - 1)
        cos, sin = head.rotary.angles(at[None])
        states = head.step(embedded[:, place], states, cos, sin, [attend])
        loss = cross_entropy(head.logits(states), p[:, place])
        total = total + DECAY**j * mean(loss, follows[:, place] & inside)
    return total


def dflash_loss(head: DFlash, texts: Texts, rng: torch.Generator) -> Tensor:
    """Return the cross-entropy, against the text's tokens, of blocks at random positions where there is some to learn.

    The weight at mask i + 1 is e^(-i / gamma). gamma is linear in the size of a block: 7 for 16 tokens and 4 for 8, as
    released. Source: Chen, Liang, Liu 2026, DFlash.

    head, texts, rng: see the module's docstring.
    """
    (b, n), size, device = texts.ids.shape, head.block, texts.ids.device
    text = torch.arange(n, device=device)
    roots = 1 + drawn_places(texts.mask[:, 1:].any(0), size - 1, 1 / ANCHORS, rng)
    at = (roots[:, None] + torch.arange(size, device=device)).flatten()  # positions, one block behind the other
    of_block = torch.arange(len(roots), device=device).repeat_interleave(size)
    seen = of_block[:, None] == of_block
    if head.causal:
        seen = seen & (at[:, None] >= at)
    mask = torch.cat((text < roots[of_block][:, None], seen), 1)
    context, of_text = head.context(texts.features), head.rotary.angles(text[None])

    def attend_in(layer: Any) -> Attend:
        keys, values = layer.self_attn.keys_values(context, *of_text)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = torch.cat((keys, k), 2), torch.cat((values, v), 2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

        return attend

    blocks = head.blocks(texts.ids[:, roots]).to(context.dtype)
    states = head.run(blocks, *head.rotary.angles(at[None]), [attend_in(layer) for layer in head.layers])
    levels = torch.arange(size - 1, device=device)
    place = roots[:, None] + 1 + levels  # the position of the token that each mask stands for
    inside, place = place < n, place.clamp(max=n - 1)
    scores = head.target.logits(states.view(b, len(roots), size, -1)[:, :, 1:]).float()
    loss = F.cross_entropy(scores.flatten(0, 2), texts.ids[:, place].flatten(), reduction="none").view(b, *place.shape)
    weights = torch.exp(-levels / ((3 * size + 8) / 8)) * (texts.mask[:, place] & inside)
    return (loss * weights).sum() / weights.sum().clamp(min=1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "eagle": eagle_loss,
    "gumiho": gumiho_loss,
    "medusa": medusa_loss,
    "hydra": hydra_loss,
    "eagle3": eagle3_loss,
    "dflash": dflash_loss,
    "jetflow": dflash_loss,
}
RATES = {  # learning rates of AdamW, as published
    "gumiho": 2e-4, "eagle": 3e-5, "eagle3": 5e-5, "medusa": 1e-3, "hydra": 1e-3, "dflash": 6e-4, "jetflow": 6e-4,
}  # fmt: skip
