"""Folders whose weights do not fit their configuration are refused by name, and how models come into memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.models.load import choose_device, load_model
from models_zoo import one_thread, tiny

__all__ = ["one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = Path(__file__).parent.parent / "models"
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama", tie_word_embeddings=True, random_weights=True, head_dim=16).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, change: Callable[[Weights], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def refused(folder: Path) -> str:
    with pytest.raises(ForetokenError) as caught:
        load_model(str(folder), CPU, torch.float32)
    return str(caught.value)


QUERIES = "model.layers.1.self_attn.q_proj.weight"


def test_a_tied_lm_head_is_not_missing(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_model(str(folder), CPU, torch.float32)


def test_a_missing_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(QUERIES))
    assert f"lack {QUERIES}, which" in refused(folder)


def test_too_many_layers(folder: Path) -> None:
    change_config(folder, num_hidden_layers=99, layer_types=None)
    message = refused(folder)
    assert "model.layers.10." in message
    assert "more, which its config.json asks for" in message


def test_too_few_layers(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2, layer_types=None)
    assert "model.layers.2." in refused(folder)


def test_no_layers(folder: Path) -> None:
    change_config(folder, num_hidden_layers=0, layer_types=None)
    change_weights(folder, lambda weights: [weights.pop(key) for key in list(weights) if ".layers." in key])
    assert "has no layers" in refused(folder)


def test_a_weight_of_another_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({QUERIES: weights[QUERIES][:-3].clone()}))
    assert f"{QUERIES} is [61, 32], not [64, 32]" in refused(folder)


def test_a_vocabulary_of_another_size(folder: Path) -> None:
    change_config(folder, vocab_size=200)
    assert "model.embed_tokens.weight is [101, 32], not [200, 32]" in refused(folder)


def test_weights_without_a_use_are_let_pass(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.0.rotary.inv_freq": torch.ones(8)}))
    load_model(str(folder), CPU, torch.float32)


def test_a_device_without_memory() -> None:
    with pytest.raises(ForetokenError, match="Device meta cannot be used"):
        choose_device("meta")


def test_paths_are_taken_as_text(tmp_path: Path) -> None:
    engine = foretoken.load(
        MODELS / "target",
        drafter=MODELS / "drafter",
        tokenizer=MODELS / "target",
        drafter_tokenizer=MODELS / "drafter",
    )
    assert engine.target.name == str(MODELS / "target")
    assert engine.drafter.name == str(MODELS / "drafter")
    with pytest.raises(ForetokenError, match="nothing-here"):
        foretoken.load(MODELS / "target", profile=tmp_path / "nothing-here")
    with pytest.raises(ForetokenError, match="nothing-here"):
        foretoken.load(tmp_path / "nothing-here")


def test_a_drafter_with_a_missing_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(QUERIES))
    with pytest.raises(ForetokenError, match=QUERIES):
        foretoken.load(
            tiny("llama", random_weights=True, head_dim=16),
            drafter=folder,
            drafter_tokenizer=str(MODELS / "target"),
            tokenizer=str(MODELS / "target"),
        )
