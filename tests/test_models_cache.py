"""The slot cache and tree attention equal plain forwards, for every model family, on tiny random models."""

import random
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.layout import layout
from leaks import leak
from models_zoo import FAMILIES, MIXED, PECULIAR, TOLERANCE, VOCAB, assert_close, check_random_steps, plain, text, tiny
from thinning import one_in

CASES = [(family, kind) for family in FAMILIES for kind in ("sdpa", "eager") if (family, kind) != ("gemma2", "sdpa")]


@pytest.mark.parametrize(("family", "attention"), one_in(3, CASES))
def test_trees_equal_plain_forwards(family: str, attention: str) -> None:
    check_random_steps(tiny(family, attention), seed=1, steps=6)


@pytest.mark.parametrize(
    ("family", "attention"), one_in(3, product(["llama", "gemma3", "gpt2", "opt"], ["sdpa", "eager"]))
)
def test_trees_equal_plain_forwards_in_bfloat16(family: str, attention: str) -> None:
    model = tiny(family, attention)
    torch.nn.Module.to(model, torch.bfloat16)
    check_random_steps(model, seed=2, steps=4, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_equals_each_row_alone(family: str) -> None:
    check_random_steps(tiny(family), seed=3, steps=8, batch=4)


@pytest.mark.parametrize("family", PECULIAR)
def test_ragged_batches_of_families_with_a_peculiarity(family: str) -> None:
    """Experts, latent attention, layers without positions, a hybrid class whose layers all are attention."""
    check_random_steps(tiny(family, "eager"), seed=4, steps=5, batch=3)


def test_batch_of_equal_rows_equals_each_row_alone() -> None:
    """Equal lengths take the slice copy rather than index_put, and single nodes no mask at all."""
    model = tiny("llama")
    rows = CausalLM(model).open(3, 40)
    texts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for t in texts:
        rows.extend(rows.join(), t)
    for token in range(20, 25):
        logits = rows.score([[token]] * 3, [[-1]] * 3)
        rows.keep([[0]] * 3)
        for r, t in enumerate(texts):
            t.append(token)
            assert_close(logits[r][0], plain(model, t), torch.float32)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_prefill_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.rows.CHUNK", 7)
    model = tiny(family)
    tokens = text(random.Random(4), 24)
    rows = CausalLM(model).open(1, 40)
    row = rows.join()
    rows.extend(row, tokens[:20])
    rows.extend(row, [])
    rows.extend(row, tokens[20:23])
    (logits,) = rows.score([tokens[23:]], [[-1]])
    assert_close(logits[0], plain(model, tokens), torch.float32)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_wrong_mask_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests fails when a node sees one sibling too many."""
    model = tiny(family)
    rows = CausalLM(model).open(1, 20)
    rows.extend(rows.join(), [1, 2, 3])
    (good,) = rows.score([[4, 5, 6]], [[-1, 0, 0]])
    rows.keep([[]])
    leak(monkeypatch, 2, 1)
    (bad,) = rows.score([[4, 5, 6]], [[-1, 0, 0]])
    want = plain(model, [1, 2, 3, 4, 6])
    assert_close(good[2], want, torch.float32)
    assert float((bad[2] - want).abs().max()) > 50 * TOLERANCE[torch.float32]


def test_wrong_window_is_seen() -> None:
    """The sliding-window models of the zoo really lose sight of early tokens within these texts."""
    for family in ("mistral", "gemma3", "qwen2_sliding"):
        model = tiny(family)
        rng = random.Random(5)
        a = text(rng, 24)
        b = [(a[0] + 1) % VOCAB, *a[1:]]
        full = tiny(family, sliding_window=64)
        difference = float((plain(model, a) - plain(full, a)).abs().max())
        assert difference > 50 * TOLERANCE[torch.float32], family
        assert float((plain(full, a) - plain(full, b)).abs().max()) > 50 * TOLERANCE[torch.float32]


def test_memory_stands_still() -> None:
    """No step allocates: the stores keep their place, and the views that a forward reads point into them."""
    rows = CausalLM(tiny("llama")).open(2, 400)
    rows.extend(rows.join(), [1, 2, 3])
    rows.extend(rows.join(), [1, 2])
    before = [(s.data_ptr(), s.shape) for s in rows.cache.stores]
    rng = random.Random(6)
    for _ in range(60):
        rows.score([[1, 2, 3], [4, 5]], [[-1, 0, 0], [-1, 0]])
        start = rows.cache.stores[0]
        end = start.data_ptr() + start.numel() * start.element_size()
        assert all(start.data_ptr() <= v.data_ptr() < end for v in rows.cache._reads)
        rows.keep([rng.choice([[0], [0, 2]]), [0]])
    assert before == [(s.data_ptr(), s.shape) for s in rows.cache.stores]


def test_keep_in_place_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CausalLM(tiny("llama")).open(1, 40)
    rows.extend(rows.join(), [1, 2, 3])
    rows.score([[4, 5, 6, 7]], [[-1, 0, 0, 2]])
    moved = []
    monkeypatch.setattr(rows.cache, "move", lambda row, start, nodes: moved.append((row, start, nodes)))
    rows.keep([[0, 1]])
    assert not moved
    assert rows.lengths == [5]
    rows.score([[4, 5, 6, 7]], [[-1, 0, 0, 2]])
    rows.keep([[0, 2, 3]])  # node 0 stands in its place; nodes 2, 3 go to where 1, 2 stood
    assert moved == [(0, 6, [1, 2])]
    assert rows.lengths == [8]


def test_full_rows_are_refused_and_stay_usable() -> None:
    model = tiny("llama")
    rows = CausalLM(model).open(1, 8)
    rows.extend(rows.join(), [1, 2, 3, 4, 5])
    with pytest.raises(ForetokenError, match="8 slots, 5 of them taken"):
        rows.score([[1, 2, 3, 4]], [[-1, 0, 1, 2]])
    with pytest.raises(ForetokenError, match="slots"):
        rows.extend(0, [1, 2, 3, 4])
    (logits,) = rows.score([[6, 7, 8]], [[-1, 0, 1]])
    assert_close(logits[2], plain(model, [1, 2, 3, 4, 5, 6, 7, 8]), torch.float32)
    with pytest.raises(ForetokenError, match="slots"):
        rows.score([[1]], [[-1]])
    with pytest.raises(ForetokenError, match="All 1 rows"):
        rows.join()


def test_wrong_calls_are_refused() -> None:
    rows = CausalLM(tiny("llama")).open(2, 20)
    rows.extend(rows.join(), [1, 2])
    with pytest.raises(ForetokenError, match="parent"):
        rows.score([[1, 2]], [[-1, 1]])
    with pytest.raises(ForetokenError, match="parents"):
        rows.score([[1, 2]], [[-1]])
    with pytest.raises(ForetokenError, match="rows"):
        rows.score([[1], [2]], [[-1], [-1]])
    rows.score([[1, 2, 3]], [[-1, 0, 0]])
    with pytest.raises(ForetokenError, match="chain"):
        rows.keep([[0, 1, 2]])
    with pytest.raises(ForetokenError, match="keep a path"):
        rows.extend(0, [1])
    with pytest.raises(ForetokenError, match="no row 1"):
        rows.leave(1)
    with pytest.raises(ForetokenError, match="at least 1"):
        CausalLM(tiny("llama")).open(0, 20)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(("family", "changes"), [("gpt2", {}), ("opt", {}), ("llama", DYNAMIC)])
def test_positions_that_end(family: str, changes: dict[str, Any]) -> None:
    """A table of positions ends, and dynamic frequencies change; other rotary models may go on."""
    model = tiny(family, **changes)
    lm = CausalLM(model)
    assert lm.context == 64
    rows = lm.open(1, 100)
    rows.extend(rows.join(), [1] * 63)
    (logits,) = rows.score([[2, 3]], [[-1, -1]])
    assert_close(logits[1], plain(model, [1] * 63 + [3]), torch.float32)
    with pytest.raises(ForetokenError, match="context"):
        rows.score([[4]], [[0]])


@pytest.mark.parametrize("family", ["moshi", "olmoe", "llama", "granite", "olmo2"])
def test_a_window_that_the_code_of_a_model_does_not_mask_by_is_none(family: str) -> None:
    """Texts beyond it are those of transformers' forwards of the whole text, which see all of it."""
    model = tiny(family, sliding_window=8)
    check_random_steps(model, seed=8, steps=3)
    prompt = text(random.Random(8), 12)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(plain(model, ids).argmax()))
    result = foretoken.load(model, drafter="ngram").generate(prompt, max_new_tokens=12, temperature=0.0)
    assert result.token_ids == ids[12:]


@pytest.mark.parametrize("layer_types", [["sliding_attention"] * 3, MIXED])
def test_a_window_by_layers_that_the_code_of_a_model_does_not_mask_by_is_none(layer_types: list[str]) -> None:
    check_random_steps(tiny("llama", sliding_window=8, layer_types=layer_types), seed=8, steps=3)


@pytest.mark.parametrize(
    "family", ["mistral", "phi3", "starcoder2_sliding", "qwen2_sliding", "gemma3", "exaone4", "doge", "gpt_oss"]
)
def test_a_window_that_the_code_of_a_model_masks_by_is_kept(family: str) -> None:
    model = tiny(family, "eager" if family == "gpt_oss" else "sdpa")
    assert 9 in layout(model).windows.values()
    check_random_steps(model, seed=9, steps=3)


def test_a_window_of_code_that_is_not_of_transformers_is_kept() -> None:
    """Nothing tells whether code that comes with a checkpoint masks by it."""

    class Own(hf.LlamaModel):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    model = tiny("llama", sliding_window=9)
    model.model = Own(model.config)
    assert layout(model.eval()).windows == {"sliding_attention": 9}
