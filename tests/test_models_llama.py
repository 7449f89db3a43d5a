"""The hand-written Llama forward equals the generic path, and knows when to stand back."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from foretoken.models import llama
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows
from models_zoo import TOLERANCE, assert_close, check_random_steps, one_thread, plain, tiny

__all__ = ["one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rms_norm_eps": 0.1}),
    ("qwen2", {}),
    ("qwen2_sliding", {}),
    ("qwen3", {}),
    ("mistral", {}),
]
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True}),
]


def generic(lm: CausalLM, batch: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> Rows:
    with monkeypatch.context() as patch:
        patch.setattr("foretoken.models.rows.llama_forward", lambda *_: None)
        rows = lm.open(batch, slots)
    assert rows._fast is None
    return rows


def random_model(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """As tiny, for changes that alter the shapes; biases and norms are random too."""
    model = tiny(family, random_weights=True, **changes)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.2)
    return model


def assert_equal_paths(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, ragged batches, trees and kept paths, step by step through both paths."""
    lm = CausalLM(model)
    both = [lm.open(3, 80), generic(lm, 3, 80, monkeypatch)]
    assert isinstance(both[0]._fast, llama.LlamaForward)
    for rows in both:
        rows.extend(rows.join(), list(range(1, 40)))  # more nodes than are grouped, beyond the windows
        rows.extend(rows.join(), [5, 6, 7])
        rows.join()
    tokens = [[1, 2, 3, 4], [5, 6], [7]]
    parents = [[-1, 0, 0, 2], [-1, -1], [-1]]
    steps: list[tuple[Any, Any, Any]] = [
        (tokens, parents, [[0, 2, 3], [1], [0]]),
        ([[1], [2], [3]], [[-1]] * 3, [[0]] * 3),
        ([[], [4, 5], []], [[], [-1, 0], []], [[], [0, 1], []]),
    ]
    for new, above, paths in steps:
        fast, slow = (rows.score(new, above) for rows in both)
        for x, y in zip(fast, slow, strict=True):
            assert x.shape == y.shape
            assert_close(x, y, torch.float32)
        for rows in both:
            rows.keep(paths)
    alone = [lm.open(1, 40), generic(lm, 1, 40, monkeypatch)]
    for rows in alone:
        rows.extend(rows.join(), [3, 1, 4])
    for _ in range(3):
        (x,), (y,) = (rows.score([[9]], [[-1]]) for rows in alone)
        assert_close(x, y, torch.float32)
        for rows in alone:
            rows.keep([[0]])


@pytest.mark.parametrize(("family", "changes"), VARIANTS + CHANGED)
def test_equals_the_generic_path(family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal_paths(random_model(family, changes), monkeypatch)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_sliding", "qwen3", "mistral"])
def test_generic_path_of_the_llama_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.rows.llama_forward", lambda *_: None)
    check_random_steps(tiny(family), seed=8, steps=4)


def test_a_wrong_product_is_seen() -> None:
    """The comparison fails where the rotation goes the wrong way."""
    model = tiny("llama")
    lm = CausalLM(model)
    rows = lm.open(1, 40)
    assert isinstance(rows._fast, llama.LlamaForward)
    rows._fast.sin = -rows._fast.sin
    rows.extend(rows.join(), [1, 2, 3, 4])
    (x,) = rows.score([[5]], [[-1]])
    assert float((x[0] - plain(model, [1, 2, 3, 4, 5])).abs().max()) > 50 * TOLERANCE[torch.float32]


def test_a_callers_model_is_not_changed() -> None:
    model = tiny("llama")
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    rows = CausalLM(model).open(1, 20)
    rows.extend(rows.join(), [1, 2])
    rows.score([[1, 2]], [[-1, 0]])
    assert kinds == [type(m) for m in model.modules()]
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


class Adapter(nn.Linear):
    """Stands for LoRA and quantised layers: a linear layer with a forward of its own."""


def test_stands_back() -> None:
    def found(model: PreTrainedModel) -> bool:
        return llama.llama_forward(model, 10) is not None

    model = tiny("llama")
    assert found(model)
    inner: Any = model.model
    handle = inner.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not found(model)
    handle.remove()
    assert found(model)
    inner.layers[0].self_attn.o_proj = Adapter(32, 32)
    assert not found(model)
    model = tiny("llama")
    inner = model.model
    inner.layers[0].mlp.forward = inner.layers[0].mlp.forward
    assert not found(model)
    assert not found(tiny("llama", hidden_act="gelu"))
    assert not found(tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    model = tiny("llama")
    nn.Module.to(model, torch.bfloat16)
    assert not found(model)
    assert not found(tiny("granite"))
