"""Fixed shapes and torch.compile change no score: recorded on every family, traced on one, the rest marked slow.

`pytest -m slow tests/test_models_static.py` makes machine code of every family and every bucket, for many minutes.
"""

import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foretoken
import test_features
from foretoken.core.errors import ForetokenError
from foretoken.core.tree import path_to
from foretoken.models import static
from foretoken.models.cache import Place
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import pack
from foretoken.models.rows import Rows
from foretoken.models.static import NODES, PlaneTensors, StaticForward, StaticRows, power_of_two
from models_zoo import FAMILIES, assert_close, random_parents, text, tiny
from raising import raising
from thinning import one_in
from tiny import tokenizer

# inductor's own, on importing its parts
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


IN_THE_KERNEL = ("phi3", "qwen3")  # which runs these as they are in models_zoo, once they are packed


def traced(model: PreTrainedModel) -> tuple[CausalLM, StaticForward]:
    lm = CausalLM(model, traced=True)
    assert isinstance(lm.backend, StaticForward)
    assert lm.backend.compiling
    return lm, lm.backend


def plain_rows(model: PreTrainedModel, batch: int, slots: int) -> Rows:
    return CausalLM(model).open(batch, slots)


def compare(fast: Rows, slow: Rows, batch: int, steps: int, most: int, seed: int = 0) -> None:
    """Ragged batches of trees, rows that join, are kept and leave, through both; every logit is compared."""
    rng = random.Random(seed)
    for _ in range(batch):
        ids = text(rng, rng.randint(1, 12))
        for rows in (fast, slow):
            rows.extend(rows.join(), ids)
    for step in range(steps):
        counts = [rng.randint(0, most) for _ in fast.lengths]
        counts[rng.randrange(len(counts))] = most
        tokens = [text(rng, n) for n in counts]
        parents = [random_parents(rng, 0, n) for n in counts]
        for got, want in zip(fast.score(tokens, parents), slow.score(tokens, parents), strict=True):
            assert got.shape == want.shape
            assert_close(got, want, torch.float32)
        paths = [path_to(above, rng.randrange(-1, len(above))) for above in parents]
        for rows in (fast, slow):
            rows.keep(paths)
        if step == 1 and batch > 1:
            for rows in (fast, slow):
                rows.leave(0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_padded_equals_generic(family: str, not_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST_SLOTS", 8)  # so that the slots grow
    model = tiny(family)
    lm, forward = traced(model)
    fast = lm.open(3, 60)
    compare(fast, plain_rows(model, 3, 60), 3, 4, 5)
    assert fast.cache.capacity > 8
    assert forward.compiling
    for _, rows, nodes, slots in forward.ready:
        assert rows in (1, 2, 4)
        assert nodes in NODES
        assert slots == power_of_two(slots) <= 64


def test_the_smallest_bucket_is_taken(not_compiled: None) -> None:
    model = tiny("llama")
    lm, forward = traced(model)
    for n in (1, 3, 8, 9, 30, 49, 64, 65):
        rows = lm.open(1, 100)
        rows.extend(rows.join(), [1, 2, 3])
        rows.score([[5] * n], [[-1] * n])
    assert [nodes for _, _, nodes, _ in sorted(forward.ready)] == [1, 4, 8, 16, 32, 64]  # 65 nodes run plainly
    assert {(rows, slots) for _, rows, _, slots in forward.ready} == {(1, 128)}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_hidden_states(family: str, not_compiled: None) -> None:
    model = tiny(family)
    lm, forward = traced(model)
    test_features.check(model, lm.open(3, 60, test_features.LAYERS), 3)
    assert {layers for layers, *_ in forward.ready} == {tuple(sorted(test_features.LAYERS))}


def test_a_wrong_place_is_seen(not_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where padded nodes are written over the text."""
    place = StaticRows.place

    def wrong(self: StaticRows, at: Place) -> None:
        place(self, at._replace(start=(at.slots * 0).tolist()))

    model = tiny("llama")
    fast, slow = traced(model)[0].open(3, 60), plain_rows(model, 3, 60)
    monkeypatch.setattr(StaticRows, "place", wrong)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare(fast, slow, 3, 2, 5)


def one_layer(packed: bool = True) -> PreTrainedModel:
    model = tiny("gpt2", random_weights=True, n_layer=1)
    if packed:
        pack(model)
    return model


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's code of this test alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield tmp_path
    torch._dynamo.reset()


def check_fallback(model: PreTrainedModel, lm: CausalLM, forward: StaticForward, words: str) -> None:
    """One warning, the same scores, and no further try."""
    with pytest.warns(UserWarning, match=f"runs without torch.compile: .*{words}") as warned:
        compare(lm.open(1, 60), plain_rows(model, 1, 60), 1, 1, 2)
    assert [w.category for w in warned if w.category is not DeprecationWarning] == [UserWarning]
    assert not forward.compiling
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(lm.open(1, 60), plain_rows(model, 1, 60), 1, 2, 3)


def test_a_failure_is_told_once_and_changes_no_score() -> None:
    model = one_layer()
    lm, forward = traced(model)
    forward._compiled = raising(RuntimeError("no\n  compiler"))
    check_fallback(model, lm, forward, "no compiler")


def test_wrong_code_is_not_used() -> None:
    model = tiny("gpt2")
    lm, forward = traced(model)
    forward._compiled = lambda *inputs: tuple(x + 1 for x in forward._step(*inputs))
    with pytest.warns(UserWarning, match="logits are wrong"):
        compare(lm.open(1, 60), plain_rows(model, 1, 60), 1, 2, 3)
    assert not forward.compiling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gpt2")
    tiny("gpt2", random_weights=True, n_layer=1, vocab_size=257, n_positions=128).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_scores_and_greedy_texts_equal_plain_ones(
    folder: str, cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Traced by torch.compile, and run as the graph that was found or as the machine code that inductor makes of it."""
    if backend != "inductor":
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda step, options, **more: compile(step, backend=backend, **more))
    engines = {compile: foretoken.load(folder, compile=compile) for compile in ("off", "auto", "on")}
    lms = {compile: engine.target.lm for compile, engine in engines.items()}
    assert [lm.execution for lm in lms.values()] == ["modules", "panels", "torch.compile"]
    caplog.set_level(logging.INFO, "foretoken")
    texts = {engine.generate("def main():", max_new_tokens=20, temperature=0.0).text for engine in engines.values()}
    assert len(texts) == 1
    assert "for 1 rows, 1 nodes, 128 slots" in caplog.text
    assert bool(list(cache_folder.rglob("*.so"))) == (backend == "inductor")
    compare(lms["on"].open(1, 60), lms["off"].open(1, 60), 1, 4, 1)
    forward = lms["on"].backend
    assert forward.compiling  # nothing failed
    assert forward.ready == {((), 1, 1, 128)}


def test_off_is_plain_torch_and_the_kernel_needs_no_on(tmp_path: Path) -> None:
    tiny("llama", random_weights=True, head_dim=16, vocab_size=257).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    engines = [foretoken.load(str(tmp_path), compile=compile) for compile in ("off", "auto", "on")]
    assert [engine.target.lm.execution for engine in engines] == ["modules", "kernel", "kernel"]
    texts = {engine.generate("a = 1", max_new_tokens=20, temperature=0.0).text for engine in engines}
    assert len(texts) == 1
    with pytest.raises(ForetokenError, match="Unknown compile fast: choose one of auto, on, off"):
        foretoken.load(str(tmp_path), compile="fast")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "packed"),
    [(family, packed) for family in FAMILIES for packed in (False, True) if not (packed and family in IN_THE_KERNEL)],
)
def test_every_family_compiles(family: str, packed: bool) -> None:
    model = tiny(family)
    if packed:
        pack(model)
    lm, forward = traced(model)
    compare(lm.open(2, 60), plain_rows(model, 2, 60), 2, 3, 4)
    assert forward.compiling
    assert ((), 2, 4, 128) in forward.ready


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(), (-1, 0)])
def test_every_bucket_compiles(layers: tuple[int, ...]) -> None:
    model = one_layer()
    lm, forward = traced(model)
    for n in NODES:
        compare(lm.open(1, 120, layers), plain_rows(model, 1, 120), 1, 1, n, seed=n)
    assert forward.compiling
    assert forward.ready == {(layers, 1, n, 128) for n in NODES}


def recorded(model: PreTrainedModel) -> tuple[CausalLM, StaticForward]:
    lm, forward = traced(model)
    forward.on_gpu = True
    return lm, forward


def planes_of(rows: Rows) -> PlaneTensors:
    return rows.cache._planes


def check_recorded(model: PreTrainedModel, lm: CausalLM, forward: StaticForward) -> None:
    """Two batches, one after the other, whose slots grow; `lm` records the forwards of `model`."""
    for seed in range(2):
        fast = lm.open(3, 60)
        compare(fast, plain_rows(model, 3, 60), 3, 5, 5, seed)
        assert planes_of(fast).graphs
        del fast
    assert forward.compiling  # nothing failed
    assert forward.ready
    assert len(forward._free) > 1  # the slots grew
    assert {len(planes) for planes in forward._free.values()} == {1}  # all given back, and taken again by the second


def check_planes_taken_again(model: PreTrainedModel, lm: CausalLM) -> None:
    """Planes serve the next batch, with what was recorded over them; `lm` records the forwards of `model`."""
    first = lm.open(1, 60)
    compare(first, plain_rows(model, 1, 60), 1, 2, 3)
    planes = planes_of(first)
    graphs = dict(planes.graphs)
    assert graphs
    with torch.inference_mode():
        for plane in planes.tensors:
            plane.fill_(torch.nan)  # as a text that went wrong leaves them
    del first
    second, third = lm.open(1, 60), lm.open(1, 60)
    assert planes_of(second) is planes
    assert planes_of(third) is not planes
    for rows in (second, third):
        compare(rows, plain_rows(model, 1, 60), 1, 2, 3)
    assert graphs.items() <= planes.graphs.items()


@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_recorded_forwards_equal_plain_ones(family: str, recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to the same sizes as those that are compiled."""
    monkeypatch.setattr(static, "LEAST_SLOTS", 8)
    model = tiny(family)
    check_recorded(model, *recorded(model))


def test_planes_serve_the_next_batch_with_what_was_recorded_over_them(recording: None) -> None:
    model = tiny("llama")
    check_planes_taken_again(model, recorded(model)[0])


def test_scores_that_are_not_finite_give_no_recording_up(recording: None) -> None:
    model = tiny("llama")
    lm, forward = recorded(model)
    output: Any = model.get_output_embeddings()
    weight = output.weight
    kept = weight.detach().clone()
    rows = lm.open(1, 60)
    rows.extend(rows.join(), [1, 2, 3])
    with torch.no_grad():
        weight[:] = torch.nan
    rows.score([[5]], [[-1]])
    rows.keep([[0]])
    assert forward.compiling
    assert not forward.ready
    with torch.no_grad():
        weight[:] = kept
    rows.score([[5]], [[-1]])
    assert {nodes for _, _, nodes, _ in forward.ready} == {1}


def test_a_recording_that_fails_for_later_planes_changes_no_score(
    recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    lm, forward = recorded(model)
    first = lm.open(1, 60)
    compare(first, plain_rows(model, 1, 60), 1, 1, 2)
    monkeypatch.setattr(static, "Graph", raising(RuntimeError("out of memory")))
    with pytest.warns(UserWarning, match="out of memory"):
        compare(lm.open(1, 60), plain_rows(model, 1, 60), 1, 1, 2)
    assert not forward.compiling
