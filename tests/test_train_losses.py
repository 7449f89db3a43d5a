"""The losses of heads: each place against its own position, and what teaches nothing."""

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from foretoken.heads import HEADS
from foretoken.heads.head import PublishedHead, new_head
from foretoken.heads.layer import causal
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts
from foretoken.train import losses
from foretoken.train.loop import read_texts
from foretoken.train.losses import LOSSES, Texts, dflash_loss, drawn_places, eagle_loss, gumiho_loss, medusa_loss, noisy
from models_zoo import random_medusa
from test_heads import of_block
from test_train import lm

__all__ = ["lm"]


@pytest.mark.parametrize("regress_only", [False, True])
@torch.no_grad()
def test_gumiho_loss_place_by_place(regress_only: bool, lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each MLP at each place of two texts by itself, from equations 8 to 10 with the texts' own tokens as drafted ones;
    the decoder layers alone are what EAGLE learns."""
    monkeypatch.setattr(losses, "noisy", lambda states, *_: states)
    torch.manual_seed(2)
    head, t = new_head("gumiho", parts(lm)), 11
    for parameter in head.mlp.parameters():
        parameter *= 3
    ids, mask = torch.randint(257, (2, t)), torch.rand(2, t) < 0.7
    texts = read_texts(head, lm, ids, mask)
    head.feature_scale = float(texts.states.square().mean().sqrt())
    h, e = texts.states / head.feature_scale, head.target.embed(ids)
    made = head.fc(torch.cat((e[:, 1:], h[:, :-1]), -1))
    for layer in head.layers:
        made = layer(made, *head.rotary.angles(torch.arange(t - 1)[None]), causal)  # of place i, for h_{i+1}

    def distance(state: Tensor, place: tuple[int, int], share: float) -> float:
        p, log_q = (head.target.logits(y * head.feature_scale).log_softmax(-1) for y in (h[place], state))
        return float(torch.nn.functional.smooth_l1_loss(state, h[place]) - share * (p.exp() * log_q).sum())

    def mean(of: dict[tuple[int, int], float]) -> float:
        learnt = [loss for place, loss in of.items() if mask[place]]
        return sum(learnt) / len(learnt)

    want = mean({(b, i + 1): distance(made[b, i], (b, i + 1), 0.1) for b in range(2) for i in range(t - 1)})
    assert float(eagle_loss(head, texts, torch.Generator())) == pytest.approx(want, rel=1e-5)
    for j, mlp in enumerate(head.mlp):
        of_mlp = {}
        for b, i in product(range(2), range(t - 3 - j)):
            first, second = (head.fc(torch.cat((e[b, i + 2 + k], made[b, i + k]))) for k in (0, 1))
            place = (b, i + 3 + j)
            of_mlp[place] = distance(mlp(torch.cat((first, second))), place, 0.0 if regress_only else 0.1)
        want += 0.8 ** (j + 1) * mean(of_mlp) / 9
    got = gumiho_loss(head, texts, torch.Generator(), regress_only)
    assert float(got) == pytest.approx(want, rel=1e-5)


@torch.no_grad()
def test_medusa_loss_place_by_place(lm: CausalLM) -> None:
    """Two texts of which not all tokens are learnt: -ln q of those, by level, weighted 0.8^i."""
    head = random_medusa(lm, 3)
    ids, mask = torch.randint(257, (2, 12)), torch.rand(2, 12) < 0.6
    texts = read_texts(head, lm, ids, mask)
    log_q = head.levels(texts.features).log_softmax(-1)
    want = 0.0
    for i in range(3):
        learnt = [(row, t) for row in range(2) for t in range(10 - i) if mask[row, t + 2 + i]]
        want += 0.8**i * sum(-float(log_q[row, t, i, ids[row, t + 2 + i]]) for row, t in learnt) / len(learnt)
    assert float(medusa_loss(head, texts, torch.Generator())) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "jetflow"])
def test_blocks_learn_the_tokens_behind_their_roots(kind: str, lm: CausalLM) -> None:
    """Block by block, as if each were drafted: the weighted mean of -ln q of the tokens that are to be learnt."""
    torch.manual_seed(0)
    head = new_head(kind, parts(lm), layers=2, levels=3)
    ids, mask = torch.randint(257, (2, 24)), torch.rand(2, 24) < 0.7
    texts = read_texts(head, lm, ids, mask)
    useful = [root for root in range(1, 24) if mask[:, root + 1 : root + 4].any()]
    order = torch.randperm(len(useful), generator=torch.Generator().manual_seed(1))
    roots = torch.tensor(useful)[order[: round(len(useful) / 6)]]
    total = weight = 0.0
    for b in range(2):
        for root in roots.tolist():
            q = of_block(head, texts.features[b, :root], int(ids[b, root])).log_softmax(-1)
            for i in range(3):
                at = root + 1 + i
                if at < 24 and mask[b, at]:
                    share = math.exp(-i / 2.5)  # (3 * 4 + 8) / 8
                    total, weight = total - share * float(q[i, ids[b, at]]), weight + share
    loss = dflash_loss(head, texts, torch.Generator().manual_seed(1))
    assert float(loss.detach()) == pytest.approx(total / weight, rel=1e-5)


def test_masked_positions_teach_nothing(lm: CausalLM) -> None:
    for kind in HEADS:
        torch.manual_seed(0)
        head = new_head(kind, parts(lm))
        ids, mask = torch.randint(257, (1, 24)), torch.zeros(1, 24, dtype=torch.bool)
        loss = LOSSES[kind](head, read_texts(head, lm, ids, mask), torch.Generator())
        assert float(loss.detach()) == 0


def test_noise() -> None:
    noise = noisy(torch.zeros(4, 256, 100), torch.tensor([256, 256, 256, 128]), torch.Generator().manual_seed(0))
    assert float(noise[3].abs().max()) == pytest.approx(0.4, rel=1e-2)  # by its own length, not the others'
    noise = noise[:3]
    assert float(noise.abs().max()) == pytest.approx(0.2, rel=1e-2)  # +-0.1 on 512 tokens, twice that on 256
    assert float(noise.std()) == pytest.approx(0.4 / 12**0.5, rel=1e-2)


def test_a_share_of_the_roots_estimates_the_whole_loss(lm: CausalLM) -> None:
    """Every root alone, averaged over the roots, is the loss of all roots: no root's steps see another's."""
    head = new_head("eagle3", parts(lm))
    ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    states = lm.states(ids, (*head.feature_layers, -1))
    d = lm.hidden_size
    texts = Texts(ids, torch.ones_like(ids, dtype=torch.bool), states[..., :-d], states[..., -d:])
    n = ids.shape[1] - 1
    whole = step_losses(head, texts, None)
    for j in range(1, 3):
        alone = [step_losses(head, texts, root)[j] for root in range(n - 1 - j)]
        assert float(torch.stack(alone).mean()) == pytest.approx(float(whole[j]), rel=1e-5)


def test_places_with_nothing_to_learn_behind_them_are_not_drawn() -> None:
    """So a chat whose answer is a quarter of it is not drafted from in its prompt."""
    learnt = torch.zeros(100, dtype=torch.bool)
    learnt[[70, 90]] = True
    assert drawn_places(learnt, 3, 1.0, torch.Generator()).tolist() == [67, 68, 69, 87, 88, 89]
    some = drawn_places(learnt, 3, 0.5, torch.Generator().manual_seed(0)).tolist()
    assert len(set(some)) == 3
    assert some == sorted(some)
    assert drawn_places(learnt[:60], 3, 0.5, torch.Generator()).tolist() == [0]


def test_the_length_of_a_text_is_without_its_padding() -> None:
    mask = torch.tensor([[False, True, True, False], [False, False, True, True]])
    assert Texts(mask.long(), mask, mask[..., None].float(), mask[..., None].float()).lengths.tolist() == [3, 4]


def step_losses(head: PublishedHead, texts: Texts, root: int | None) -> list[torch.Tensor]:
    """The loss of each step, of every root or of one, by differences of sums that end one step earlier."""
    sums = []
    for steps in range(1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "UNROLLED", steps)
            if root is not None:
                n = texts.ids.shape[1] - 1
                order = torch.tensor([root, *(i for i in range(n - 2) if i != root)])
                patch.setattr(torch, "randperm", lambda _, generator=None, order=order: order)
            share = 1.0 if root is None else 1e-9
            sums.append(losses.eagle3_loss(head, texts, torch.Generator(), share).detach())
    return [sums[0], *((b - a) / losses.DECAY ** (j + 1) for j, (a, b) in enumerate(pairwise(sums)))]


def test_a_trimmed_vocabulary_learns_the_targets_law_over_its_own_tokens(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first level, token by token: p over the chosen tokens, where the text's own token is one of them."""
    torch.manual_seed(0)
    chosen = torch.arange(3, 257, 5)
    head = new_head("eagle3", parts(lm), tokens=chosen)
    ids, mask = torch.randint(257, (2, 40)), torch.rand(2, 40) < 0.7
    ids[:, ::3] = chosen[torch.randint(len(chosen), (2, 14))]
    texts = read_texts(head, lm, ids, mask)
    monkeypatch.setattr(losses, "UNROLLED", 1)
    cos, sin = head.rotary.angles(torch.arange(39)[None])
    states = head.step(head.embed(ids[:, 1:]), head.enter(texts.features[:, :-1]), cos, sin, [causal])
    log_q = head.logits(states).log_softmax(-1).detach()
    p = head.target.logits(texts.states)[..., chosen].softmax(-1)
    want = [
        -float((p[b, i + 1] * log_q[b, i]).sum())  # h_{i+1} yields the law of x_{i+2}, and so does level 0 at i
        for b in range(2) for i in range(38) if mask[b, i + 2] and ids[b, i + 2] in chosen
    ]  # fmt: skip
    assert 5 < len(want) < 30
    loss = losses.eagle3_loss(head, texts, torch.Generator())
    assert float(loss.detach()) == pytest.approx(sum(want) / len(want), rel=1e-5)
