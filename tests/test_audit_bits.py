"""The guarantee of our kernel: the same bits alone, in a chain and in a batch; the same greedy text in every way."""

import pytest
import torch
from transformers import PreTrainedModel

import foretoken
from foretoken.audit.bits import bit_exact
from foretoken.audit.report import FAILED, NONE, OK
from foretoken.models.causal_lm import CausalLM
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.panels import pack
from models_zoo import tiny
from outliers import outlier_llama
from thinning import one_in

REAL = {  # the shape of SmolLM2 with fewer of everything but heads
    "vocab_size": 3001,
    "hidden_size": 576,
    "intermediate_size": 256,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TEXTS = [[17, 4, 900], [2500, 3, 77, 1200, 8, 41], [5] * 30, [1, 2]]


def real_shape(dtype: torch.dtype, noise: float = 0.0, tied: bool = True) -> PreTrainedModel:
    """noise: standard deviation of what the matrices are multiplied by. tied: whether the LM head is the embedding."""
    model = outlier_llama(dtype, **{**REAL, "tie_word_embeddings": tied})
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if noise and weight.ndim > 1:
                weight *= 1 + noise * torch.randn_like(weight)
    pack(model)
    return model


@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.bfloat16]))
def test_scores_and_greedy_texts(dtype: torch.dtype) -> None:
    """The drafter is often wrong, and the texts are not one token over and over, as with a tied LM head of noise."""
    lm = CausalLM(real_shape(dtype, tied=False))
    section = bit_exact(lm, TEXTS, 0)
    assert [check.outcome for check in section.checks] == [OK, OK]
    assert all("kernel" in check.detail for check in section.checks)
    drafting = real_shape(dtype, noise=0.05, tied=False)
    texts: dict[str, list[list[int]]] = {}
    for drafter, tree in [
        ("none", "chain:5"),
        ("ngram", "chain:4"),
        (drafting, "chain:3"),
        (drafting, "kary:2x3"),
        (drafting, "budget:8"),
        (drafting, "dynamic:8"),
    ]:
        engine = foretoken.load(lm.model, drafter=drafter, tree=tree, max_batch=len(TEXTS))
        for batch in (1, len(TEXTS)):
            prompts = TEXTS if batch > 1 else TEXTS[:2]
            found = [engine.generate(p, max_new_tokens=24, temperature=0.0) for p in prompts] if batch == 1 else None
            results = found or engine.generate(prompts, max_new_tokens=24, temperature=0.0)
            texts[f"{drafter is drafting} {drafter == 'ngram'} {tree} {batch}"] = [r.token_ids for r in results]
            if drafter is drafting:
                accepted, drafted = (sum(getattr(r.stats, n) for r in results) for n in ("num_accepted", "num_drafted"))
                assert 0 < accepted < drafted
    want = next(ids for key, ids in texts.items() if key.endswith(f" {len(TEXTS)}"))
    assert all(ids == want[: len(ids)] for ids in texts.values()), texts
    assert sorted(len(set(ids)) for ids in want)[1:] >= [12] * 3


@pytest.mark.parametrize(
    "settings",
    one_in(
        2, [{"temperature": 4.0, "top_p": 0.99}, {"temperature": 4.0}, {"temperature": 4.0, "presence_penalty": 1e6}]
    ),
)
def test_with_exact_match_a_seed_gives_plain_decodings_text_at_any_temperature(settings: dict[str, float]) -> None:
    """One uniform for each token, from the same p: docs/theory.md, section 3. Other rules differ."""
    model, drafting = real_shape(torch.bfloat16), real_shape(torch.bfloat16)
    texts: dict[str, list[list[int]]] = {}
    for name, options in {
        "plain": {},
        "n-gram": {"drafter": "ngram", "tree": "chain:4"},
        "n-gram, auto": {"drafter": "ngram"},
        "chain": {"drafter": drafting, "tree": "chain:3", "verifier": "exact-match"},
        "k-ary tree, auto": {"drafter": drafting, "tree": "kary:2x3", "verifier": "exact-match", "method": "auto"},
        "dynamic tree": {"drafter": drafting, "tree": "dynamic:8"},
        "block": {"drafter": drafting, "tree": "chain:3", "verifier": "block"},
    }.items():
        engine = foretoken.load(model, max_batch=len(TEXTS), **options)
        results = engine.generate(TEXTS, max_new_tokens=24, seed=11, **settings)
        texts[name] = [result.token_ids for result in results]
    assert texts.pop("block") != texts["plain"]
    assert all(ids == texts["plain"] for ids in texts.values()), texts


def test_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, right = CausalLM(real_shape(torch.float32)), KernelRows.__call__

    def wrong(self: KernelRows, ids: list[list[int]], *rest: object) -> torch.Tensor:
        out = right(self, ids, *rest)
        if len(ids) > 1:
            out[1, 2, 5] = torch.nextafter(out[1, 2, 5], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(KernelRows, "__call__", wrong)
    assert [check.outcome for check in bit_exact(lm, TEXTS, 0).checks] == [FAILED, FAILED]


def test_other_executions_promise_nothing() -> None:
    (check,) = bit_exact(CausalLM(tiny("llama")), [[1, 2]], 0).checks
    assert check.outcome == NONE
    assert "does not apply" in check.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_trees_of_other_families(family: str, dtype: torch.dtype) -> None:
    """Mistral's layers see a window of 9 tokens here, so that a tree's paths leave it."""
    model = tiny(family, random_weights=True, head_dim=16)
    torch.nn.Module.to(model, dtype)
    pack(model)
    texts = [[id % 100 for id in text] for text in TEXTS]
    assert [check.outcome for check in bit_exact(CausalLM(model), texts, 1).checks] == [OK, OK]
