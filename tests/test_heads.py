"""Draft heads: cached tree drafting equals forwards over the whole text."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from foretoken.core.tree import path_to
from foretoken.heads import HEADS
from foretoken.heads.dflash import DFlash
from foretoken.heads.eagle import Gumiho
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.head import PublishedHead, new_head
from foretoken.heads.layer import Unrolled, causal
from foretoken.heads.lm import HeadLM, ready
from foretoken.heads.rows import HeadRows
from foretoken.heads.serial import Serial
from foretoken.models import static
from foretoken.models.causal_lm import CausalLM
from foretoken.models.fused_rows import FusedRows
from foretoken.models.panels import pack
from foretoken.models.parts import TargetParts, parts
from models_zoo import FAMILIES
from models_zoo import tiny as zoo
from thinning import one_in

TOLERANCE = 2e-5  # float32, two orders of summation, logits of size ~1


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny.llama(0, layers=6))


@pytest.fixture(scope="module")
def target(lm: CausalLM) -> TargetParts:
    return parts(lm)


@pytest.fixture(scope="module")
def wide() -> CausalLM:
    """A target with attention heads of 16, which the kernel takes."""
    return CausalLM(tiny.llama(0, hidden=64, layers=6))


def made(kind: str, target: TargetParts, seed: int = 1) -> PublishedHead:
    torch.manual_seed(seed)
    head = new_head(kind, target)
    for parameter in head.parameters():
        if parameter.ndim == 2:  # zeros would hide what a block does
            torch.nn.init.normal_(parameter, std=0.3 / parameter.shape[1] ** 0.5)
    head.feature_scale = 1.5
    return head.eval()


def logits_of(head: Serial, state: Tensor) -> Tensor:
    """Logits over the target's vocabulary after one node, -inf for tokens that the head cannot draft."""
    own = head.logits(state)
    if head.columns is None:
        return own
    scores = torch.full((head.target.vocab_size,), float("-inf"))
    scores[head.columns] = own
    return scores


@torch.no_grad()
def equations(head: Gumiho, features: Tensor, ids: list[int], drafted: list[int]) -> Tensor:
    """What `plain` gives, by equations 7 to 10 and Table 5 of Li et al. 2025, Gumiho, with the paper's letters.

    Of the head only its weights and its decoder layers (M_T) are used.
    """
    weights, t = head.state_dict(), head.target

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def fc(y: list[int], h: Tensor) -> Tensor:  # equation 7: FC(cat(e(y), h))
        return linear("fc", torch.cat((t.embed(torch.tensor(y)), h), -1))

    def transformer(o: Tensor) -> Tensor:  # M_T without a cache: the whole text each time, its last output
        x = o[None]
        for layer in head.layers:
            x = layer(x, *head.rotary.angles(torch.arange(len(o))[None]), causal)
        return x[0, -1:]

    def mlp(i: int, x: Tensor) -> Tensor:  # M_M^i of Table 5: [2d, d] x 1 -> [d, d] x 5, SiLU and sums as released
        x = torch.nn.functional.silu(linear(f"mlp.{i - 1}.0.linear", x))
        for block in range(1, 6):
            x = x + torch.nn.functional.silu(linear(f"mlp.{i - 1}.{block}.linear", x))
        return x

    def lm_head(h: Tensor) -> Tensor:
        return t.logits(h[0] * head.feature_scale)

    o_t = fc(ids[1:], features / head.feature_scale)
    h_1 = transformer(o_t)
    if not drafted:
        return lm_head(h_1)
    o_1 = fc(drafted[:1], h_1)  # equation 8
    h_2 = transformer(torch.cat((o_t, o_1)))
    if len(drafted) == 1:
        return lm_head(h_2)
    o_2 = fc(drafted[1:2], h_2)  # equation 9
    return lm_head(mlp(len(drafted) - 1, torch.cat((o_1, o_2), -1)))  # equation 10: h_{t + 2 + i}


@torch.no_grad()
def of_block(head: DFlash, features: Tensor, root: int) -> Tensor:
    """Scores of all levels of a block, as the released model computes them, written down anew: one forward over the
    states of the whole text and the block, keys and values of both side by side in every layer."""
    w, t, size = head.state_dict(), head.target, head.shape
    n, total = len(features), len(features) + head.block

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + size.eps) * w[name]

    def turned(x: Tensor, first: int) -> Tensor:  # [places, heads, dim]
        angle = torch.arange(first, first + len(x))[:, None].float() * head.rotary.inv_freq
        cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    context = norm(features / head.feature_scale @ w["fc.weight"].T, "hidden_norm.weight")
    x = t.embed(torch.tensor([root] + [head.mask_token] * (head.block - 1)))
    for i in range(len(head.layers)):
        a = f"layers.{i}.self_attn."
        read = norm(x, f"layers.{i}.input_layernorm.weight")
        both = torch.cat((context, read))
        q = (read @ w[a + "q_proj.weight"].T).view(head.block, -1, size.head_dim)
        k, v = ((both @ w[f"{a}{name}_proj.weight"].T).view(total, -1, size.head_dim) for name in "kv")
        q, k = turned(norm(q, a + "q_norm.weight"), n), turned(norm(k, a + "k_norm.weight"), 0)
        shared = size.heads // size.kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / size.head_dim**0.5
        if head.causal:
            later = torch.arange(total)[None] > n + torch.arange(head.block)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + y @ w[a + "o_proj.weight"].T
        read = norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate, up = (read @ w[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return t.logits(norm(x[1:], "norm.weight"))


@torch.no_grad()
def plain(head: PublishedHead, features: Tensor, ids: list[int], drafted: list[int]) -> Tensor:
    """Scores after `drafted`, which follow the text `ids`, whose states but the last are `features`; no cache."""
    t, root = head.target, len(ids) - 1
    tokens = torch.tensor([ids + drafted])
    if isinstance(head, Medusa):
        return head.levels(features[-1])[len(drafted)]
    if isinstance(head, DFlash):
        return of_block(head, features, ids[-1])[len(drafted)]
    if isinstance(head, Gumiho):
        return equations(head, features, ids, drafted)
    cos, sin = head.rotary.angles(torch.arange(len(ids) + len(drafted))[None])
    if isinstance(head, Hydra):
        prefix = head.prefix_states(features[None], cos[:, :root], sin[:, :root], causal)[0, -1]
        given = t.embed(tokens[0, root:])
        return head.level(len(drafted), prefix, list(given.unbind(0)))
    states = head.enter(features[None])
    for step in range(len(drafted) + 1):
        n = root + step
        out = head.step(head.embed(tokens[:, 1 : n + 1]), states, cos[:, :n], sin[:, :n], [causal] * head.num_layers)
        states = torch.cat([states, out[:, -1:]], 1)
    return logits_of(head, states[0, -1])


def check_tree(
    head: PublishedHead, rows: HeadRows, texts: list[list[int]], states: list[Tensor], rng: random.Random
) -> None:
    """Random level-by-level trees on every row; every score is compared with a forward without a cache."""
    rows.learn([s[: len(ids) - 1] for s, ids in zip(states, texts, strict=True)])
    for row, ids in enumerate(texts):
        if len(ids) - rows.lengths[row] > 4:
            rows.extend(row, ids[rows.lengths[row] : -1])
    pending = [ids[rows.lengths[row] :] for row, ids in enumerate(texts)]
    scores = rows.score(pending, [range(-1, len(p) - 1) for p in pending])
    tokens, parents = [list(p) for p in pending], [list(range(-1, len(p) - 1)) for p in pending]
    frontiers = [[len(p) - 1] for p in pending]
    for depth in range(4):
        for row, ids in enumerate(texts):
            for node, got in zip(frontiers[row], scores[row][-len(frontiers[row]) :], strict=True):
                drafted = [tokens[row][i] for i in path_to(parents[row], node)][len(pending[row]) :]
                assert len(drafted) == depth
                want = plain(head, states[row][: len(ids) - 1], ids, drafted)
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        if depth == 3:
            break
        new, above = [], []
        for row in range(len(texts)):
            chosen = [rng.choice(frontiers[row]) for _ in range(rng.randint(1, 3))]
            above.append(chosen)
            new.append([rng.randrange(257) for _ in chosen])
            frontiers[row] = list(range(len(tokens[row]), len(tokens[row]) + len(chosen)))
            tokens[row] += new[row]
            parents[row] += chosen
        scores = rows.score(new, above)
    rows.keep([path_to(above, rng.choice(f)) for above, f in zip(parents, frontiers, strict=True)])
    assert rows.lengths == [len(ids) for ids in texts]


@pytest.mark.parametrize(
    ("kind", "packed"),
    one_in(2, [(kind, way) for i, kind in enumerate(HEADS) for way in ([False, True] if i % 2 else [True, False])]),
)
def test_drafting_equals_plain_forwards(kind: str, packed: bool, wide: CausalLM) -> None:
    head = made(kind, parts(wide))
    drafting = ready(alone(head), kind) if packed else HeadLM(head, kind)
    assert (drafting.backend is not None) == (packed and kind in ("eagle", "gumiho", "eagle3"))
    check_steps(wide, head, drafting.open(3, 60))


@pytest.mark.parametrize("kind", ["eagle", "gumiho", "eagle3"])
def test_recorded_heads_draft_as_plain_ones(
    kind: str, wide: CausalLM, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "LEAST_SLOTS", 8)  # so that the slots grow
    head = made(kind, parts(wide))
    forward = head.forward_of(kind)
    forward.on_gpu = forward.compiling = True
    check_steps(wide, head, HeadLM(head, kind, forward).open(3, 60))
    assert forward.compiling  # nothing failed
    assert {nodes for _, _, nodes, _ in forward.ready} >= {1, 2, 4}


@pytest.mark.parametrize("kind", HEADS)
def test_no_score_is_memory_that_nobody_wrote(kind: str, lm: CausalLM, target: TargetParts) -> None:
    """Also after committed tokens before the last one, from which nothing is drafted."""
    head = made(kind, target)
    ids, head_lm = list(range(3, 12)), HeadLM(head, kind)
    features = lm.states(torch.tensor([ids[:-1]]), head.feature_layers)[0]
    rows = head_lm.open(1, 40)
    rows.join()
    rows.learn([features])
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        (scores,) = rows.score([ids[1:]], [range(-1, len(ids) - 2)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not scores.isnan().any()


def alone(head: PublishedHead) -> PublishedHead:
    """A copy that can be packed; its target stays as it is."""
    return copy.deepcopy(head, {id(head.target): head.target})


def check_steps(lm: CausalLM, head: PublishedHead, rows: HeadRows) -> None:
    """Three steps of a batch of three, of which one leaves."""
    rng = random.Random(0)
    texts = [[rng.randrange(257) for _ in range(n)] for n in (9, 14, 5)]
    for _ in texts:
        rows.join()
    for step in range(3):
        states = [lm.states(torch.tensor([ids]), head.feature_layers)[0] for ids in texts]
        check_tree(head, rows, texts, states, rng)
        for ids in texts:
            ids += [rng.randrange(257) for _ in range(rng.randint(1, 3))]
        if step == 0:
            rows.leave(0)
            texts[0] = texts.pop()


@pytest.mark.parametrize(
    ("norm_before_residual", "norm_output", "vocabulary"),
    [(False, False, "shuffled"), (False, True, "trimmed"), (True, False, "shuffled"), (True, True, "whole")],
)
def test_eagle3_in_the_kernel(norm_before_residual: bool, norm_output: bool, vocabulary: str, wide: CausalLM) -> None:
    """Every form of the head drafts as its torch module computes; what is not in its vocabulary scores -inf."""
    torch.manual_seed(4)
    target, tokens = parts(wide), None if vocabulary == "whole" else torch.randperm(257)[:100]
    if tokens is not None and vocabulary == "trimmed":
        tokens = tokens.sort().values
    flags = {"norm_before_residual": norm_before_residual, "norm_output": norm_output}
    head = Eagle3(target, replace(target.shape, width=2 * target.hidden), tokens, **flags).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3 / parameter.shape[-1] ** 0.5)
    drafting = ready(alone(head), "eagle3")
    assert drafting.backend is not None
    check_steps(wide, head, drafting.open(3, 60))


@pytest.mark.parametrize("kind", ["eagle", "gumiho"])
def test_a_wrong_state_is_seen(kind: str, lm: CausalLM, target: TargetParts) -> None:
    """The comparison above can fail: states one position late move the scores a hundred times further."""
    head, ids = made(kind, target), [5, 9, 2, 77, 31, 8]
    states = lm.states(torch.tensor([[*ids, 1]]), head.feature_layers)[0]
    right, late = (plain(head, states[i : i + 5], ids, []) for i in (0, 1))
    assert float((right - late).abs().max()) > 100 * TOLERANCE


def test_unrolled_steps_are_what_drafting_does(lm: CausalLM, target: TargetParts) -> None:
    """EAGLE-3's training attention, step by step, against drafting along the true tokens."""
    head = made("eagle3", target)
    ids = [random.Random(1).randrange(257) for _ in range(12)]
    states = lm.states(torch.tensor([ids]), head.feature_layers)[0]
    n, attend = len(ids) - 1, Unrolled()
    embedded, own = target.embed(torch.tensor([ids])), head.enter(states[None, :-1])
    for step in range(4):
        given = torch.nn.functional.pad(embedded[:, 1 + step :], (0, 0, 0, step))
        own = head.step(given, own, *head.rotary.angles(torch.arange(n)[None] + step), [attend])
        for root in (0, 3, n - 1 - step):
            want = plain(head, states[: root + 1], ids[: root + 2], ids[root + 2 : root + 2 + step])
            torch.testing.assert_close(logits_of(head, own[0, root]), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_borrowed_lm_head(family: str) -> None:
    lm = CausalLM(zoo(family))
    borrowed, ids = parts(lm), torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.inference_mode():
        out = lm.model(input_ids=ids, output_hidden_states=True)
        torch.testing.assert_close(borrowed.logits(lm.states(ids, (-1,))), out.logits, rtol=0, atol=TOLERANCE)
        if family not in ("gpt2", "opt"):  # those add positions to the embedding
            torch.testing.assert_close(borrowed.embed(ids), out.hidden_states[0], rtol=0, atol=TOLERANCE)


def test_the_kernel_keeps_what_it_points_into(wide: CausalLM) -> None:
    """A head that is cut after it was made ready still drafts with the MLPs of before."""
    head = made("gumiho", parts(wide))
    embedded, states = torch.randn(2, 3, 2, 64).unbind(0)
    with torch.no_grad():
        wanted = head.parallel(head.joined(embedded, states).flatten(-2))
    rows = ready(head, "gumiho").open(1, 8)
    head.cut(3)
    torch.testing.assert_close(rows.kernel.parallel(embedded, states), wanted, rtol=0, atol=TOLERANCE)


def test_a_table_shorter_than_the_lm_head_drafts_no_chains_in_one_call() -> None:
    """The compiled loop reads embeddings without looking."""
    model = tiny.llama(0, hidden=64)
    model.lm_head = torch.nn.Linear(64, 300, bias=False)
    pack(model)
    lm = CausalLM(model)
    rows = ready(made("eagle", parts(lm)), "eagle").open(1, 8)
    rows.join()
    assert not rows.drafts_chains(0, 3)
    assert not isinstance(lm.open(1, 8), FusedRows)
