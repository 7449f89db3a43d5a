"""Training heads: it learns, goes on where it stopped, and begins as another model or head; a few steps each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS
from foretoken.heads.checkpoint import load_head, load_to_train, save_head
from foretoken.heads.eagle import Gumiho
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import PublishedHead, new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.parts import parts
from foretoken.train.begin import Beginning, start_from_model, start_from_target
from foretoken.train.data import Batches, Record, Row, commonest, rows
from foretoken.train.evaluate import accuracy
from foretoken.train.loop import ADAMW, MUON, Plan, Report, Trainer, read_texts
from foretoken.train.losses import LOSSES, Texts, gumiho_loss
from foretoken.train.muon import Muon
from foretoken.train.states import StateCache
from models_zoo import random_medusa
from thinning import one_in

TEXTS = [Record("", f"def f{i}(x):\n    return x + {i * i}\n" * 3) for i in range(6)]


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny.llama(0, layers=6).requires_grad_(False))


def trainer(
    lm: CausalLM, kind: str, folder: Path, tokens: int = 880, optimizer: str = ADAMW, begin: Beginning | None = None
) -> Trainer:
    torch.manual_seed(0)
    data = rows(TEXTS, tiny.tokenizer(), 48)
    plan = Plan(
        kind, tokens, "data", "target", batch=2, length=48, lr=1e-2 if optimizer == ADAMW else 5e-2, optimizer=optimizer
    )
    made = Trainer(new_head(kind, parts(lm)), lm, Batches(data, 2, 0), plan, folder, begin=begin)
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    one_in(2, [*((kind, ADAMW) for kind in HEADS), *((kind, MUON) for kind in ("eagle3", "gumiho", "hydra"))]),
)
def test_training_learns(kind: str, optimizer: str, lm: CausalLM, tmp_path: Path) -> None:
    made = trainer(lm, kind, tmp_path, optimizer=optimizer)
    texts = read_texts(made.head, lm, *made.batches[0])
    rng = torch.Generator().manual_seed(0)
    before = float(LOSSES[kind](made.head, texts, rng).detach())
    reports = []
    made.run(reports.append, every=5)
    after = float(LOSSES[kind](made.head, texts, torch.Generator().manual_seed(0)).detach())
    assert after < 0.9 * before
    assert reports[-1].step == reports[-1].steps == made.steps == 10
    measured = accuracy(made.head, lm, made.batches.data, num_roots=6)
    assert len(measured.greedy) == min(7, made.head.depth or 7)
    assert all(0 <= x <= 1.000001 for x in (*measured.greedy, *measured.shared))


def test_a_run_reads_as_many_tokens_as_its_plan_says(lm: CausalLM, tmp_path: Path) -> None:
    """Texts of unequal lengths: one is fifty times as long as the others."""
    data = [Row(np.arange(n, dtype=np.int64) % 200, 0) for n in [20] * 60 + [1000]]
    batches = Batches(data, 4, 0)
    made = Trainer(new_head("medusa", parts(lm)), lm, batches, Plan("medusa", 22_000, batch=4), tmp_path)
    read = sum(int(batches[step][1].sum()) for step in range(made.steps))
    assert read == pytest.approx(22_000, rel=0.1)


@torch.no_grad()
def test_accuracy_place_by_place(lm: CausalLM) -> None:
    """Of Medusa, whose level j at h_t drafts x_{t+2+j}: t + 2 tokens are committed."""
    head = random_medusa(lm, 1)
    data, num_roots = rows(TEXTS, tiny.tokenizer(), 48), 70
    data = [Row(row.ids, skipped) for row, skipped in zip(data, (0, 20, 40, 44, *[0] * len(data)), strict=False)]
    # A text's first place is behind its first learnt token, or where there is just room for three levels.
    both = [
        (row.ids, start)
        for row in data
        for start in range(max(2, min(row.skipped + 1, len(row.ids) - 4)), len(row.ids) - 3)
    ]
    chosen = [both[i] for i in np.random.default_rng(0).integers(len(both), size=num_roots)]
    texts, starts = zip(*chosen, strict=True)
    same, shared = torch.zeros(3), torch.zeros(3)
    for ids, start in zip(texts, starts, strict=True):
        states = lm.states(torch.from_numpy(ids[None]), (FINAL,))[0]
        p = head.target.logits(states[start - 1 : start + 2]).softmax(-1)
        scores = head.levels(states[start - 2])
        same += scores.argmax(-1) == p.argmax(-1)
        shared += torch.minimum(scores.softmax(-1), p).sum(-1)
    found = accuracy(head, lm, data, num_roots)
    assert found.greedy == pytest.approx((same / num_roots).tolist(), abs=1e-9)
    assert found.shared == pytest.approx((shared / num_roots).tolist(), rel=1e-5)
    assert accuracy(head, lm, data, num_roots) == found


@pytest.mark.parametrize(("kind", "optimizer"), [("gumiho", MUON), ("hydra", ADAMW)])
def test_a_stopped_run_goes_on_as_if_unbroken(kind: str, optimizer: str, lm: CausalLM, tmp_path: Path) -> None:
    whole = trainer(lm, kind, tmp_path / "whole", optimizer=optimizer)
    (tmp_path / "whole").mkdir()
    whole.run(lambda _: None)
    (tmp_path / "parts").mkdir()
    first = trainer(lm, kind, tmp_path / "parts", optimizer=optimizer)

    def stop(report: Report) -> None:
        if report.step == 5:  # the checkpoint is of the step before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop, every=1, save_s=-1.0)
    second = trainer(lm, kind, tmp_path / "parts", optimizer=optimizer)
    assert second.resume()
    assert second.step == 4
    second.run(lambda _: None)
    for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(a, b)


NEEDED = ("head", "optimizers", "feature_scale", "feature_sizes", "step", "tokens", "smooth")


@pytest.mark.parametrize("kind", ["eagle3", "gumiho"])
def test_a_checkpoint_that_is_damaged_or_lacks_something_is_refused(kind: str, lm: CausalLM, tmp_path: Path) -> None:
    made = trainer(lm, kind, tmp_path)
    made.save()
    path = tmp_path / "checkpoint.pt"
    state, whole = torch.load(path), path.read_bytes()
    lacking = {
        "steps": "made by an earlier version, which took another number of steps",
        **{key: f"checkpoint.pt lacks its {key}: remove it to start again" for key in NEEDED},
    }
    if kind == "gumiho":  # its MLPs read less in earlier versions
        lacking["mlp_input"] = "is of the head as an earlier version had it"
    for key, message in lacking.items():
        torch.save({name: value for name, value in state.items() if name != key}, path)
        with pytest.raises(ForetokenError, match=message):
            made.resume()
    for damaged in (b"broken", whole[: len(whole) // 2] + bytes(4096) + whole[len(whole) // 2 + 4096 :]):
        path.write_bytes(damaged)
        with pytest.raises(ForetokenError, match="cannot be read"):
            made.resume()
    path.write_bytes(whole)
    made.plan = Plan(kind, 5, "other", "target")
    with pytest.raises(ForetokenError, match="was made with another tokens, data"):
        made.resume()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_cached_states_train_the_same_head(kind: str, lm: CausalLM, tmp_path: Path) -> None:
    """Texts of several lengths: cached row by row, read again in another order and by another head."""
    data = rows([*TEXTS, Record("abc", "x" * 30)], tiny.tokenizer(), 48)
    plan = Plan(kind, 960, "data", "target", batch=2, length=48, lr=1e-2)
    heads = []
    for cache in (None, StateCache(tmp_path / "cache", lm), StateCache(tmp_path / "cache", lm)):
        torch.manual_seed(0)
        made = Trainer(new_head(kind, parts(lm)), lm, Batches(data, 2, 0), plan, tmp_path, cache)
        made.prepare()
        made.run(lambda _: None)
        heads.append(made.head)
    layers = {*made.head.feature_layers, FINAL}
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == len(layers) * len(data)
    room = StateCache(tmp_path / "cache", lm).check_room(sum(len(row.ids) for row in data), tuple(layers))
    assert room < sum(path.stat().st_size for path in files) < room + 200 * len(files)
    for plain, *cached in zip(*(head.parameters() for head in heads), strict=True):
        torch.testing.assert_close(cached[0], plain, rtol=0, atol=1e-4)  # padding moves the last bits
        assert torch.equal(*cached)


def test_a_cache_is_of_one_target_and_of_whole_files(lm: CausalLM, tmp_path: Path, monkeypatch) -> None:
    ids, mask = torch.randint(257, (1, 20)), torch.ones(1, 20, dtype=torch.bool)
    cache = StateCache(tmp_path, lm)
    assert torch.equal(cache(ids, mask, (FINAL, 2)), lm.states(ids, (FINAL, 2)))
    other = CausalLM(tiny.llama(1, layers=6).requires_grad_(False))
    assert torch.equal(StateCache(tmp_path, other)(ids, mask, (FINAL,)), other.states(ids, (FINAL,)))
    (file,) = (cache.folder / "2").iterdir()
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ForetokenError, match="of the cache"):
        cache(ids, mask, (2,))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    cache.check_room(1, (2,))
    with pytest.raises(ForetokenError, match=r"0\.0 GB are free"):
        cache.check_room(10**6, (2,))


def test_muon_moves_a_matrix_by_an_orthogonal_one() -> None:
    """Every singular value of a step is near the rate, whatever the gradient's; wide and tall matrices side by side."""
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((12, 20), (20, 12), (12, 20))]
    before = [0.9 * matrix.detach() for matrix in matrices]  # less rate times decay, 0.5 times 0.2
    unreached = torch.nn.Parameter(torch.ones(12, 20))
    optimizer = Muon([*matrices, unreached])
    optimizer.param_groups[0]["lr"] = 0.5
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape) @ torch.diag(torch.logspace(-1, 1, matrix.shape[1]))
    optimizer.step()
    assert torch.equal(unreached, torch.ones(12, 20))
    for matrix, old in zip(matrices, before, strict=True):
        sizes = torch.linalg.svdvals(matrix.detach() - old) / (0.5 * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5)
        assert (sizes > 0.6).all()
        assert (sizes < 1.3).all()


def test_muon_leaves_lm_heads_norms_and_biases_to_adamw(lm: CausalLM, tmp_path: Path) -> None:
    made = trainer(lm, "medusa", tmp_path, optimizer=MUON)
    (muon, _), (adam, share) = made.optimizers
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    of_adam = {id(p) for group in adam.param_groups for p in group["params"]}
    lm_heads = {id(linear.weight) for linear in made.head.own_lm_heads()}
    assert lm_heads <= of_adam
    assert of_muon == {id(p) for p in made.head.parameters() if p.ndim == 2} - lm_heads
    assert len(of_adam) + len(of_muon) == len(list(made.head.parameters()))
    assert share < 1


@pytest.mark.parametrize("kind", one_in(3, HEADS))
def test_a_target_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Heads are trained in float32 and measured as they will draft."""
    lm = CausalLM(tiny.llama(0, layers=6).bfloat16().requires_grad_(False))
    made = trainer(lm, kind, tmp_path, tokens=200)
    made.run(lambda _: None)
    assert all(p.dtype == torch.float32 for p in made.head.parameters())
    measured = accuracy(made.head, lm, made.batches.data, num_roots=4)
    assert made.head.training
    assert all(0 <= x <= 1.01 for x in (*measured.greedy, *measured.shared))


@pytest.mark.parametrize("kind", ["eagle", "gumiho"])
def test_a_head_begins_with_the_layers_of_a_model(kind: str, lm: CausalLM) -> None:
    """With states of zero its first layer turns an embedding into what the model's layer makes of it, but for scale."""
    model: Any = tiny.llama(3, layers=2).requires_grad_(False)
    model.model.embed_tokens.weight.copy_(lm.model.get_input_embeddings().weight)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 2.0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    head = new_head(kind, parts(lm))
    start_from_model(head, CausalLM(model))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    first = model.model.layers[-head.num_layers]
    embedded = head.target.embed(torch.arange(6)[None])
    size = float(head.target.embedding.weight.square().mean().sqrt())
    read = head.fc(torch.cat((embedded, torch.zeros_like(embedded)), -1))
    torch.testing.assert_close(read, embedded / size)
    normed = first.input_layernorm.weight * read
    for name in ("q_proj", "k_proj", "v_proj"):
        got = getattr(head.layers[0].self_attn, name)(read)
        torch.testing.assert_close(got, getattr(first.self_attn, name)(normed))
    states = torch.randn_like(embedded)
    torch.testing.assert_close(head.fc(torch.cat((embedded, states), -1)), embedded / size + 0.3 * states)
    layer, x = head.layers[0], torch.randn(3, embedded.shape[-1])
    torch.testing.assert_close(layer.mlp(x), first.mlp(x) / size)
    torch.testing.assert_close(layer.self_attn.o_proj(x), first.self_attn.o_proj(x) / size)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (
            "gumiho",
            lambda lm: CausalLM(tiny.llama(0, layers=1)),
            "has 1 layers, fewer than the 2 of the head: lower --layers",
        ),
        ("eagle", lambda lm: CausalLM(tiny.llama(0, hidden=64)), "other sizes than the target's"),
        ("medusa", lambda lm: lm, "Head medusa has no layers.*: leave --begin out"),
        ("eagle", lambda lm: new_head("gumiho", parts(lm)), "is of kind gumiho: --begin needs one of kind eagle"),
        ("gumiho", lambda lm: new_head("gumiho", parts(lm), levels=4), "cannot be gone on from: its .* is"),
        ("gumiho", lambda lm: other(lm, "gumiho", "heads"), "its num_attention_heads is 8, here it is 4"),
        ("gumiho", lambda lm: other(lm, "gumiho", "positions"), "its rotary is {.*}, here it is {}"),
        ("eagle3", lambda lm: other(lm, "eagle3", "output"), "its norm_output is True, here it is False"),
        ("eagle3", lambda lm: other(lm, "eagle3", "residual"), "its norm_before_residual is True, here"),
    ],
)
def test_what_a_head_cannot_begin_as_is_refused(
    kind: str, source: Callable[[CausalLM], CausalLM | PublishedHead], message: str, lm: CausalLM
) -> None:
    with pytest.raises(ForetokenError, match=message):
        Beginning("other", source(lm)).fill(new_head(kind, parts(lm)))


def other(lm: CausalLM, kind: str, what: str) -> PublishedHead:
    """A head with weights of the same sizes that mean something else."""
    head: Any = new_head(kind, parts(lm))
    if what == "heads":
        of = head.shape
        head.shape = replace(of, heads=2 * of.heads, kv_heads=2 * of.kv_heads, head_dim=of.head_dim // 2)
    elif what == "positions":
        head.rotary = replace(head.rotary, config={"rope_parameters": {"rope_theta": 500.0}})
    elif what == "output":
        head.norm_output = not head.norm_output
    else:
        head.midlayer.norm_before_residual = not head.midlayer.norm_before_residual
    return head


def test_a_head_may_begin_as_one_that_read_other_layers(lm: CausalLM) -> None:
    """Those of a deeper target, say: the new head reads its own target's."""
    here, there = (new_head("eagle3", parts(lm)) for _ in range(2))
    there.feature_layers = (1, 2, 4, FINAL)
    Beginning("other", there).fill(here)
    assert here.feature_layers == (2, 3, 3, FINAL)
    for key, value in here.state_dict().items():
        assert torch.equal(value, there.state_dict()[key])


@pytest.mark.parametrize("kind", one_in(3, HEADS))
def test_a_head_goes_on_from_another(kind: str, lm: CausalLM, tmp_path: Path) -> None:
    """Of a target that has changed since: all that the head learnt, and the new target's scale of states."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = trainer(lm, kind, tmp_path / "first")
    first.run(lambda _: None)
    save_head(first.head, tmp_path / "first")
    changed = CausalLM(tiny.llama(1, layers=6).requires_grad_(False))
    with pytest.raises(ForetokenError, match="was trained for another target"):
        load_head(tmp_path / "first", parts(changed))
    begin = Beginning("first", load_to_train(tmp_path / "first", parts(changed)))
    made = trainer(changed, kind, tmp_path / "second", begin=begin)
    for head in (first.head, made.head):
        if isinstance(head, Eagle3):
            head.normalise(None)
    for key, value in made.head.state_dict().items():
        torch.testing.assert_close(value, first.head.state_dict()[key].bfloat16().float())
    assert made.head.feature_scale == pytest.approx(first.head.feature_scale, rel=1e-6)
    begun = {key: value.clone() for key, value in made.head.state_dict().items()}
    made.run(lambda _: None)
    assert any(not torch.equal(value, begun[key]) for key, value in made.head.state_dict().items())


def test_gumihos_mlps_learn_classes_late(lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first fifth of the steps, which are two of the ten epochs that are usual, they learn the states alone."""
    seen: list[bool] = []

    def loss(head: Gumiho, texts: Texts, rng: torch.Generator, regress_only: bool) -> Tensor:
        seen.append(regress_only)
        return gumiho_loss(head, texts, rng, regress_only)

    monkeypatch.setitem(LOSSES, "gumiho", loss)
    trainer(lm, "gumiho", tmp_path).run(lambda _: None)
    assert seen == [True] * 2 + [False] * 8


def test_a_diverging_run_stops(lm: CausalLM, tmp_path: Path) -> None:
    made = trainer(lm, "eagle", tmp_path)
    torch.nn.init.constant_(made.head.fc.weight, float("nan"))
    with pytest.raises(ForetokenError, match="lower --lr"):
        made.run(lambda _: None)


def test_reports_come_when_they_are_asked_for(lm: CausalLM, tmp_path: Path) -> None:
    reports = []
    trainer(lm, "eagle", tmp_path).run(reports.append, every=4, also_every=3)
    assert [r.step for r in reports] == [3, 4, 6, 8, 9, 10]


def test_a_trimmed_vocabulary_is_learnt_from_the_commonest_tokens(lm: CausalLM, tmp_path: Path) -> None:
    """The head names the most frequent tokens alone, starts from the target's rows for them, and q is 0 elsewhere."""
    data = [Row(np.array([5, 5, 5, 9, 9, 7, 1, 1, 1, 1, 3, 8]), skipped=0), Row(np.array([2] * 9 + [3] * 3), skipped=9)]
    tokens = commonest(data, 4, lm.vocab_size)
    assert tokens.tolist() == [1, 3, 5, 9]
    head = new_head("eagle3", parts(lm), tokens=tokens)
    start_from_target(head)
    torch.testing.assert_close(head.lm_head.weight, lm.model.get_output_embeddings().weight[tokens])
    save_head(head, tmp_path)
    for each in (head, load_head(tmp_path, parts(lm))):
        own = each.logits(torch.randn(3, lm.hidden_size)).detach()
        whole = each.open(1, 4, None).whole(own, float("-inf"))
        assert torch.equal(whole[:, tokens], own)
        assert torch.nonzero(whole.softmax(-1).sum(0)).flatten().tolist() == tokens.tolist()
        assert (each.d2t + torch.arange(4)).tolist() == tokens.tolist()
    with pytest.raises(ForetokenError, match="The draft vocabulary is 0"):
        commonest(data, 0, lm.vocab_size)
    with pytest.raises(ForetokenError, match="only eagle3 can have a trimmed draft vocabulary"):
        new_head("eagle", parts(lm), tokens=tokens)


def test_normalised_features_do_not_change_a_head(lm: CausalLM, tmp_path: Path) -> None:
    head = new_head("eagle3", parts(lm))
    features = torch.randn(2, 5, 4 * lm.hidden_size) * torch.linspace(0.1, 100, 4 * lm.hidden_size)
    before = head.enter(features)
    head.normalise(features.square().mean((0, 1)).sqrt())
    torch.testing.assert_close(head.enter(features), before, rtol=1e-4, atol=1e-3)
    save_head(head, tmp_path, torch.float32)
    torch.testing.assert_close(load_to_train(tmp_path, parts(lm)).enter(features), before, rtol=1e-4, atol=1e-3)
