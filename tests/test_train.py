"""Training heads: the losses' alignment, resuming, data, and the command; tiny models, a few steps."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from command import run
from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS
from foretoken.heads.checkpoint import load_head, load_to_train, save_head
from foretoken.heads.eagle import Eagle, Gumiho
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import Head, new_head
from foretoken.heads.layer import causal
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.parts import parts
from foretoken.train import losses
from foretoken.train.begin import Beginning, start_from_model, start_from_target
from foretoken.train.data import Batches, Record, Row, commonest, records, rows
from foretoken.train.evaluate import accuracy
from foretoken.train.loop import ADAMW, MUON, Plan, Report, Trainer, read_texts
from foretoken.train.losses import LOSSES, Texts, eagle_loss, gumiho_loss, medusa_loss, noisy
from foretoken.train.muon import Muon
from foretoken.train.states import StateCache

TEXTS = [Record("", f"def f{i}(x):\n    return x + {i * i}\n" * 3) for i in range(6)]


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny.llama(0, layers=6).requires_grad_(False))


def trainer(
    lm: CausalLM, kind: str, folder: Path, tokens: int = 960, optimizer: str = ADAMW, begin: Beginning | None = None
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
    [*((kind, ADAMW) for kind in HEADS), *((kind, MUON) for kind in ("eagle3", "gumiho", "hydra"))],
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
    other = Trainer(second.head, lm, second.batches, Plan(kind, 5, "other", "target"), tmp_path / "parts")
    with pytest.raises(ForetokenError, match="was made with another tokens, data"):
        other.resume()
    if kind == "gumiho":  # its MLPs read less in earlier versions
        path = tmp_path / "parts" / "checkpoint.pt"
        torch.save({key: value for key, value in torch.load(path).items() if key != "mlp_input"}, path)
        with pytest.raises(ForetokenError, match="is of Gumiho's head as it was before"):
            second.resume()
    (tmp_path / "parts" / "checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(ForetokenError, match="cannot be read"):
        other.resume()


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
    room = StateCache(tmp_path / "cache", lm).num_bytes(sum(len(row.ids) for row in data), tuple(layers))
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


@pytest.mark.parametrize("kind", HEADS)
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
        ("gumiho", lambda lm: CausalLM(tiny.llama(0, layers=1)), "has 1 layers to begin with, and the head 2"),
        ("eagle", lambda lm: CausalLM(tiny.llama(0, hidden=64)), "other sizes than the target's"),
        ("medusa", lambda lm: lm, "Head medusa has no layers"),
        ("eagle", lambda lm: new_head("gumiho", parts(lm)), "is of kind gumiho: --begin needs one of kind eagle"),
        ("gumiho", lambda lm: new_head("gumiho", parts(lm), levels=4), "cannot be gone on from: its .* is"),
        ("eagle3", lambda lm: other_norm(new_head("eagle3", parts(lm))), "its norm_output is"),
    ],
)
def test_what_a_head_cannot_begin_as_is_refused(
    kind: str, source: Callable[[CausalLM], CausalLM | Head], message: str, lm: CausalLM
) -> None:
    with pytest.raises(ForetokenError, match=message):
        Beginning("other", source(lm)).fill(new_head(kind, parts(lm)))


def other_norm(head: Head) -> Head:
    """Weights of the same sizes that mean something else."""
    assert isinstance(head, Eagle3)
    head.norm_output = not head.norm_output
    return head


@pytest.mark.parametrize("kind", HEADS)
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


class Perfect(Gumiho):
    """Knows every state in advance: what it returns is right at the positions that the losses should look at."""

    truth: Tensor

    def step(self, embedded: Tensor, *_: object) -> Tensor:
        return self.enter(self.truth[:, 1:])

    def parallel(self, both: Tensor) -> Tensor:
        n = both.shape[1]
        padded = torch.nn.functional.pad(self.truth, (0, 0, 0, 10))
        return torch.stack([self.enter(padded[:, 3 + j : 3 + j + n]) for j in range(len(self.mlp))], 2)


def test_alignment(lm: CausalLM) -> None:
    """With the true states everywhere the regression is 0 and the cross-entropy is the target's entropy."""
    target = parts(lm)
    ids, mask = torch.randint(257, (2, 20)), torch.ones(2, 20, dtype=torch.bool)
    like = new_head("gumiho", target)
    assert isinstance(like, Gumiho)
    head = Perfect(target, like.shape)
    texts = read_texts(head, lm, ids, mask)
    head.truth, head.feature_scale = texts.states, 0.7
    log_p = target.logits(texts.states).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    rng = torch.Generator().manual_seed(0)
    want = 0.1 * float(entropy[:, 1:].mean())
    assert float(eagle_loss(head, texts, rng).detach()) == pytest.approx(want, rel=1e-5)
    assert float(gumiho_loss(head, texts, rng, regress_only=True).detach()) == pytest.approx(want, rel=1e-5)
    want += sum(0.8 ** (j + 1) * 0.1 * float(entropy[:, 3 + j :].mean()) for j in range(5)) / 9
    assert float(gumiho_loss(head, texts, rng).detach()) == pytest.approx(want, rel=1e-5)
    head.truth = texts.states.roll(1, 1)
    assert float(gumiho_loss(head, texts, rng).detach()) > 2 * want


@pytest.mark.parametrize("regress_only", [False, True])
@torch.no_grad()
def test_gumiho_loss_place_by_place(regress_only: bool, lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each MLP at each place by itself, from equations 8 to 10 with the text's own tokens as the drafted ones."""
    monkeypatch.setattr(losses, "noisy", lambda states, _: states)
    torch.manual_seed(2)
    head, t = new_head("gumiho", parts(lm)), 11
    assert isinstance(head, Gumiho)
    for parameter in head.mlp.parameters():
        parameter *= 3
    ids, mask = torch.randint(257, (1, t)), torch.rand(1, t) < 0.7
    texts = read_texts(head, lm, ids, mask)
    head.feature_scale = float(texts.states.square().mean().sqrt())
    h, e = texts.states[0] / head.feature_scale, head.target.embed(ids[0])
    x = head.fc(torch.cat((e[1:], h[:-1]), -1))[None]
    for layer in head.layers:
        x = layer(x, *head.target.angles(torch.arange(t - 1)[None]), causal)
    made = x[0]  # of place i, for h_{i+1}

    def distance(state: Tensor, i: int, share: float) -> float:
        p, log_q = (head.target.logits(y * head.feature_scale).log_softmax(-1) for y in (h[i], state))
        return float(torch.nn.functional.smooth_l1_loss(state, h[i]) - share * (p.exp() * log_q).sum())

    def mean(of: dict[int, float]) -> float:
        learnt = [loss for i, loss in of.items() if mask[0, i]]
        return sum(learnt) / len(learnt)

    want = mean({i + 1: distance(made[i], i + 1, 0.1) for i in range(t - 1)})
    for j, mlp in enumerate(head.mlp):
        of_mlp = {}
        for i in range(t - 3 - j):
            first, second = (head.fc(torch.cat((e[i + 2 + k], made[i + k]))) for k in (0, 1))
            of_mlp[i + 3 + j] = distance(mlp(torch.cat((first, second))), i + 3 + j, 0.0 if regress_only else 0.1)
        want += 0.8 ** (j + 1) * mean(of_mlp) / 9
    got = gumiho_loss(head, texts, torch.Generator(), regress_only)
    assert float(got) == pytest.approx(want, rel=1e-5)


def test_gumihos_mlps_learn_classes_late(lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first fifth of the steps, which are two of the ten epochs that are usual, they learn the states alone."""
    seen: list[bool] = []

    def loss(head: Gumiho, texts: Texts, rng: torch.Generator, regress_only: bool) -> Tensor:
        seen.append(regress_only)
        return gumiho_loss(head, texts, rng, regress_only)

    monkeypatch.setitem(LOSSES, "gumiho", loss)
    trainer(lm, "gumiho", tmp_path).run(lambda _: None)
    assert seen == [True] * 2 + [False] * 8


def test_medusa_labels(lm: CausalLM) -> None:
    """Level i is held against x_{t+2+i}: scores that name that token cost nothing, those one off much."""
    head = new_head("medusa", parts(lm), levels=3)
    ids = torch.arange(30)[None]
    texts = read_texts(head, lm, ids, torch.ones(1, 30, dtype=torch.bool))

    def naming(shift: int) -> float:
        after = (ids[..., None] + 2 + torch.arange(3) + shift).clamp(max=256)
        head.levels = lambda states: 50.0 * torch.nn.functional.one_hot(after, 257).float()
        return float(medusa_loss(head, texts, torch.Generator()).detach())

    assert naming(0) < 1e-6
    assert naming(1) > 50


def test_masked_positions_teach_nothing(lm: CausalLM) -> None:
    for kind in HEADS:
        torch.manual_seed(0)
        head = new_head(kind, parts(lm))
        ids, mask = torch.randint(257, (1, 24)), torch.zeros(1, 24, dtype=torch.bool)
        loss = LOSSES[kind](head, read_texts(head, lm, ids, mask), torch.Generator())
        assert float(loss.detach()) == 0


def test_noise() -> None:
    noise = noisy(torch.zeros(4, 256, 100), torch.Generator().manual_seed(0))
    assert float(noise.abs().max()) == pytest.approx(0.2, rel=1e-2)  # +-0.1 on 512 tokens, twice that on 256
    assert float(noise.std()) == pytest.approx(0.4 / 12**0.5, rel=1e-2)


def test_data(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes " * 9}]},
        {"text": "some text of its own, long enough"},
        {"prompt": "given", "text": "learnt and learnt and learnt"},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plain.txt").write_text("x" * 100)
    found = list(records([str(path), str(tmp_path / "plain.txt")]))
    assert found[0] == Record("user: hi\nassistant: ", "yes " * 9)
    cut = rows(found, tiny.tokenizer(), 64)
    assert [len(row.ids) for row in cut] == [57, 34, 34, 64, 37]
    assert [row.skipped for row in cut] == [20, 0, 5, 0, 0]
    batches = Batches(cut, 2, seed=1)
    ids, mask = batches[0]
    assert ids.shape == mask.shape
    assert torch.equal(ids, batches[0][0])
    seen = [tuple(row) for step in range(2) for row in batches[step][0].tolist()]
    assert len(set(seen)) == 4  # no row twice in an epoch
    ids, mask = Batches([Row(np.arange(n, dtype=np.int64), 0) for n in (16, 40)], 2, 0)[0]
    assert ids.shape == (2, 40)
    assert sorted(mask.sum(1).tolist()) == [16, 40]  # no text is all padding
    for bad, message in (('{"x": 1}', "line 1 is no training text"), ("[", "line 1"), ('{"text": 3}', "strings")):
        path.write_text(bad + "\n")
        with pytest.raises(ForetokenError, match=message):
            list(records([str(path)]))
    with pytest.raises(ForetokenError, match="Cannot read"):
        list(records([str(tmp_path / "none.txt")]))
    with pytest.raises(ForetokenError, match="no text of 16 tokens"):
        rows([Record("", "short")], tiny.tokenizer(), 64)


def test_a_diverging_run_stops(lm: CausalLM, tmp_path: Path) -> None:
    made = trainer(lm, "eagle", tmp_path)
    assert isinstance(made.head, Eagle)
    torch.nn.init.constant_(made.head.fc.weight, float("nan"))
    with pytest.raises(ForetokenError, match="lower --lr"):
        made.run(lambda _: None)


def test_reports_come_when_they_are_asked_for(lm: CausalLM, tmp_path: Path) -> None:
    reports = []
    trainer(lm, "eagle", tmp_path).run(reports.append, every=4, also_every=3)
    assert [r.step for r in reports] == [3, 4, 6, 8, 9, 10]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    tiny.save(tiny.llama(0, layers=6), root / "target")
    (root / "data.jsonl").write_text("".join(json.dumps({"text": t.text}) + "\n" for t in TEXTS))
    return root


def arguments(root: Path, out: str, *more: str) -> list[str]:
    return ["train", "gumiho", "--target", str(root / "target"), "--data", str(root / "data.jsonl"), "--held-out",
            str(root / "data.jsonl"), "--out", str(root / out), "--batch", "2", "--length", "48", *more]  # fmt: skip


def test_command(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = arguments(workplace, "head", "--tokens", "400", "--evaluate-every", "2", "--json")
    code, out, err = run(monkeypatch, capsys, *options)
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["step"] == lines[-1]["steps"]
    assert len(lines[-1]["greedy"]) == 7
    folder = workplace / "head"
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["plan"]["kind"] == "gumiho"
    assert facts["argv"]
    assert facts["torch"]
    assert "Held-out" in (folder / "README.md").read_text()
    # Nothing is left to do; the log tells each step once, also after reports that came behind the last checkpoint.
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log + json.dumps({"step": 10_000}) + '\n{"step": 10_')
    code, _, err = run(monkeypatch, capsys, *options)
    assert code == 0, err
    assert (folder / "log.jsonl").read_text() == log
    tiny.save(tiny.llama(1, layers=6), workplace / "other")
    code, _, err = run(
        monkeypatch,
        capsys,
        *[str(workplace / "other") if x.endswith("target") and x != "--target" else x for x in options],
    )
    assert code == 2
    assert "made with another target" in err
    again = arguments(workplace, "again", "--tokens", "400", "--cache", str(workplace / "cache"), "--json")
    code, second, err = run(monkeypatch, capsys, *again)
    assert code == 0, err
    assert "will take up to 0.00 GB" in err
    assert json.loads(second.splitlines()[-1])["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-4)
    code, _, err = run(
        monkeypatch, capsys, "generate", "def f", "--target", workplace / "target", "--drafter", folder,
        "--max-new-tokens", 12, "--temperature", 0, "--json",
    )  # fmt: skip
    assert code == 0, err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--tokens", "0"], "at least 1"),
        (["--lr", "2"], "--lr is 2.0: it must lie between 0 and 1"),
        (["--levels", "2"], "needs at least"),
        (["--data", "/nowhere.txt"], "Cannot read data file"),
        (["--seed", "-1"], "seed is -1: it must be in 0..2**32 - 1"),
        (["--seed", "4294967296"], "seed is 4294967296: it must be in 0..2**32 - 1"),
    ],
)
def test_bad_input(
    workplace: Path,
    change: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(monkeypatch, capsys, *arguments(workplace, "bad", *change))
    assert code == 2
    assert message in err


def turns(*contents: object) -> dict[str, Any]:
    return {"conversations": [{"role": "assistant", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turns(None), "must hold strings, but its content of turn 1 is null: write it as one"),
        (turns(["a"], "b"), r'its content of turn 1 is \["a"\]'),
        (turns("a", {"text": "b"}), "its content of turn 2 is"),
        (
            {"conversations": [{"role": 7, "content": "a"}, {"role": "assistant", "content": "b"}]},
            "role of turn 1 is 7",
        ),
        ({"prompt": None, "text": "a"}, "its prompt is null"),
        ({"text": "a\ud83d"}, r"holds half a character, \\ud83d, in its text"),
        (turns("\ude00"), r"half a character, \\ude00, in its content of turn 1"),
    ],
)
def test_a_line_that_is_no_text_is_named(bad: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "good \U0001f600"}) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ForetokenError, match=f"d.jsonl, line 2 .*{message}"):
        list(records([str(path)]))


def test_json_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path, texts = tmp_path / "d.jsonl", [f"a{end}b" for end in ("\u2028", "\u2029", "\x85")]
    path.write_text("\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert [record.text for record in records([str(path)])] == texts


@pytest.mark.parametrize(("name", "content"), [("none.jsonl", ""), ("none.jsonl", " \n\n"), ("none.txt", "\n")])
def test_empty_files_are_named(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ForetokenError, match=f"There is no text at all in {path}"):
        list(records([str(path)]))


@pytest.mark.parametrize("option", ["--data", "--held-out"])
def test_the_command_names_empty_files(
    option: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workplace / "none.txt"
    path.write_text("")
    data = ["--data", str(workplace / "data.jsonl")] if option == "--held-out" else []
    code, _, err = run(
        monkeypatch, capsys, "train", "medusa", "--target", workplace / "target", "--out", workplace / "bad", *data,
        option, path,
    )  # fmt: skip
    assert code == 2
    assert f"There is no text at all in {path}" in " ".join(err.split())


def test_files_of_short_texts_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(ForetokenError, match=r"among the 1 from .*short\.txt: give"):
        rows(list(records([str(path)])), tiny.tokenizer(), 64)


def test_command_that_goes_on_from_a_head(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = workplace / "first"
    code, _, err = run(monkeypatch, capsys, *arguments(workplace, "first", "--tokens", "400"))
    assert code == 0, err
    held_out = []
    for begin in ([], ["--begin", first]):
        out = f"from-{len(begin)}"
        code, out, err = run(monkeypatch, capsys, *arguments(workplace, out, "--tokens", "48", "--json"), *begin)
        assert code == 0, err
        held_out.append(json.loads(out.splitlines()[-1])["loss"])
    assert held_out[1] < held_out[0]
    assert "the head `first` |" in (workplace / "from-2" / "README.md").read_text()
    code, _, err = run(monkeypatch, capsys, *arguments(workplace, "first", "--tokens", "48"), "--begin", first)
    assert code == 2
    assert "whose head would be overwritten" in " ".join(err.split())
    other = [x if x != "gumiho" else "eagle" for x in arguments(workplace, "other-kind", "--tokens", "48")]
    code, _, err = run(monkeypatch, capsys, *other, "--begin", first)
    assert code == 2
    assert "is of kind gumiho: --begin needs one of kind eagle" in " ".join(err.split())


def test_a_trimmed_vocabulary_is_learnt_from_the_commonest_tokens(lm: CausalLM, tmp_path: Path) -> None:
    """The head names the most frequent tokens alone, starts from the target's rows for them, and q is 0 elsewhere."""
    data = [Row(np.array([5, 5, 5, 9, 9, 7, 1, 1, 1, 1, 3, 8]), skipped=0), Row(np.array([2] * 9 + [3] * 3), skipped=9)]
    tokens = commonest(data, 4, lm.vocab_size)
    assert tokens.tolist() == [1, 3, 5, 9]
    head = new_head("eagle3", parts(lm), tokens=tokens)
    assert isinstance(head, Eagle3)
    start_from_target(head)
    torch.testing.assert_close(head.lm_head.weight, lm.model.get_output_embeddings().weight[tokens])
    q = head.logits(torch.randn(3, lm.hidden_size)).softmax(-1)
    assert torch.nonzero(q.sum(0)).flatten().tolist() == [1, 3, 5, 9]
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, parts(lm))
    assert isinstance(loaded, Eagle3)
    assert loaded.d2t is not None
    assert (loaded.d2t + torch.arange(4)).tolist() == [1, 3, 5, 9]
    with pytest.raises(ForetokenError, match="The draft vocabulary is 0"):
        commonest(data, 0, lm.vocab_size)
    with pytest.raises(ForetokenError, match="only eagle3 can have a trimmed draft vocabulary"):
        new_head("eagle", parts(lm), tokens=tokens)


def test_normalised_features_do_not_change_a_head(lm: CausalLM, tmp_path: Path) -> None:
    head = new_head("eagle3", parts(lm))
    assert isinstance(head, Eagle3)
    features = torch.randn(2, 5, 4 * lm.hidden_size) * torch.linspace(0.1, 100, 4 * lm.hidden_size)
    before = head.enter(features)
    head.normalise(features.square().mean((0, 1)).sqrt())
    torch.testing.assert_close(head.enter(features), before, rtol=1e-4, atol=1e-3)
    save_head(head, tmp_path, torch.float32)
    torch.testing.assert_close(load_to_train(tmp_path, parts(lm)).enter(features), before, rtol=1e-4, atol=1e-3)


def test_a_share_of_the_roots_estimates_the_whole_loss(lm: CausalLM) -> None:
    """Every root alone, averaged over the roots, is the loss of all roots: no root's steps see another's."""
    head = new_head("eagle3", parts(lm))
    ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    states = lm.states(ids, (*head.feature_layers, -1))
    d = lm.hidden_size
    texts = Texts(ids, torch.ones_like(ids, dtype=torch.bool), states[..., :-d], states[..., -d:])
    n = ids.shape[1] - 1
    whole = [step_losses(head, texts, None)[j] for j in range(3)]
    alone = [[step_losses(head, texts, root)[j] for root in range(n - 1 - j)] for j in range(3)]
    for j in range(1, 3):
        assert float(torch.stack(alone[j]).mean()) == pytest.approx(float(whole[j]), rel=1e-5)


def step_losses(head: Head, texts: Texts, root: int | None) -> list[torch.Tensor]:
    """The loss of each step, of every root or of one, by differences of sums that end one step earlier."""
    sums = []
    for steps in range(1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "UNROLLED", steps)
            if root is not None:
                n = texts.ids.shape[1] - 1
                order = torch.tensor([root, *(i for i in range(n) if i != root)])
                patch.setattr(torch, "randperm", lambda _, generator=None, order=order: order)
            share = 1.0 if root is None else 1e-9
            sums.append(losses.eagle3_loss(head, texts, torch.Generator(), share).detach())
    return [sums[0], *((b - a) / losses.DECAY ** (j + 1) for j, (a, b) in enumerate(pairwise(sums)))]


def test_records_may_be_token_ids(tmp_path: Path, lm: CausalLM) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"ids": list(range(20)), "given": 4}) + "\n")
    (row,) = rows(list(records([str(path)])), tiny.tokenizer(), 64)
    assert row.ids.tolist() == list(range(20))
    assert row.skipped == 4
    for bad, what in (({"ids": "abc"}, "no list of whole numbers"), ({"ids": [1], "given": 2}, "given 2")):
        path.write_text(json.dumps(bad) + "\n")
        with pytest.raises(ForetokenError, match=what):
            list(records([str(path)]))
