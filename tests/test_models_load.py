"""Folders whose weights do not fit their configuration are refused by name, and how models come into memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.models.load import choose_device, load_frozen, load_model
from models_zoo import assert_close, change_config, plain, tiny, tiny_with_images

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


QUERIES = "model.layers.1.self_attn.q_proj.weight"


def test_a_tied_lm_head_is_not_missing_and_weights_without_a_use_are_let_pass(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    change_weights(folder, lambda weights: weights.update({"model.layers.0.rotary.inv_freq": torch.ones(8)}))
    load_model(str(folder), CPU, torch.float32)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        ({}, lambda weights: weights.pop(QUERIES), f"lack {QUERIES}, which"),
        ({"num_hidden_layers": 99}, None, r"model\.layers\.10\..*more, which its config.json asks for"),
        ({"num_hidden_layers": 2}, None, r"model\.layers\.2\."),
        (
            {"num_hidden_layers": 0},
            lambda weights: [weights.pop(x) for x in list(weights) if ".layers." in x],
            "no layers",
        ),
        (
            {},
            lambda weights: weights.update({QUERIES: weights[QUERIES][:-3].clone()}),
            r"is \[61, 32\], not \[64, 32\]",
        ),
        ({"vocab_size": 200}, None, r"embed_tokens.weight is \[101, 32\], not \[200, 32\]"),
    ],
)
def test_weights_that_do_not_fit(
    folder: Path, config: dict[str, Any], change: Callable[[Weights], Any] | None, says: str
) -> None:
    change_config(folder, **config, **({"layer_types": None} if "num_hidden_layers" in config else {}))
    if change is not None:
        change_weights(folder, change)
    with pytest.raises(ForetokenError, match=says):
        load_model(str(folder), CPU, torch.float32)


@pytest.mark.usefixtures("home")
def test_a_model_for_images_continues_text(tmp_path: Path) -> None:
    """Transformers has another class for it than for models of text; its state is keys and values all the same."""
    model = tiny_with_images()
    model.save_pretrained(tmp_path)
    rows = load_model(str(tmp_path), CPU, torch.float32).open(1, 20)
    rows.extend(rows.join(), [1, 2, 3])
    (logits,) = rows.score([[4, 5, 6]], [[-1, -1, 1]])
    assert_close(logits[2], plain(model, [1, 2, 3, 5, 6]), torch.float32)
    assert load_model(str(tmp_path), CPU, quantise="q8_0").quantised


def test_a_device_without_memory() -> None:
    with pytest.raises(ForetokenError, match="Device meta cannot be used"):
        choose_device("meta")


def test_paths_are_taken_as_text(tmp_path: Path) -> None:
    engine = foretoken.load(
        MODELS / "target", drafter=MODELS / "drafter", tokenizer=MODELS / "target", drafter_tokenizer=MODELS / "drafter"
    )
    assert engine.target.name == str(MODELS / "target")
    assert engine.drafter.name == str(MODELS / "drafter")
    with pytest.raises(ForetokenError, match="nothing-here"):
        foretoken.load(MODELS / "target", profile=tmp_path / "nothing-here")
    with pytest.raises(ForetokenError, match="nothing-here"):
        foretoken.load(tmp_path / "nothing-here")


@pytest.mark.parametrize(
    ("stored", "asked", "runs"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_dtypes(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None, runs: torch.dtype, compile: str
) -> None:
    model = tiny("qwen2", random_weights=True, head_dim=16)
    torch.nn.Module.to(model, stored).save_pretrained(tmp_path)
    lm = load_model(str(tmp_path), CPU, asked, compile=compile)
    assert lm.dtype == runs
    if compile == "auto" and runs != torch.float16:
        assert lm.execution == "kernel"
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for parameter in reference.parameters():
        parameter.data = parameter.to(runs).float()
    want = plain(reference, [1, 2, 3])
    rows = lm.open(1, 8)
    rows.join()
    (logits,) = rows.score([[1, 2, 3]], [[-1, 0, 1]])
    torch.testing.assert_close(logits[-1].float(), want, rtol=0, atol=2e-5 if runs == torch.float32 else 0.05)


def test_frozen_models_are_plain_and_in_float32(tmp_path: Path) -> None:
    torch.nn.Module.to(tiny("llama", random_weights=True), torch.bfloat16).save_pretrained(tmp_path)
    lm = load_frozen(str(tmp_path), CPU)
    assert lm.dtype == torch.float32
    assert lm.execution == "modules"
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


PEAKS = """
import os, sys, torch
from foretoken.models.load import load_model
small, folder = sys.argv[1:]
cpu = torch.device("cpu")
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
torch.set_num_threads(1)  # a forked process has none of the others, and would wait for them
dtypes = torch.bfloat16, torch.float32
for asked in dtypes:
    load_model(small, cpu, asked)  # compiles, and loads what is imported late
for asked in dtypes:
    if not os.fork():  # each peak in a process of its own
        before = peak()
        lm = load_model(folder, cpu, asked)
        assert lm.execution == "kernel"
        print(peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """The peak beyond what Python and its libraries take before. 30 million weights in layers, 4 million in a tied
    embedding."""
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16}
    model = tiny(
        "llama", random_weights=True, tie_word_embeddings=True, num_key_value_heads=4, vocab_size=4096, **sizes
    )
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(tmp_path)
    small = tmp_path / "small"
    torch.nn.Module.to(tiny("llama", random_weights=True, head_dim=16), torch.bfloat16).save_pretrained(small)
    run = [sys.executable, "-c", PEAKS, str(small), str(tmp_path)]
    grown = [int(line) for line in subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()]
    packed = 2 * sum(p.numel() for p in model.parameters())
    # Beside the LM head's panels few rows of the embedding are read, from the file if it has the dtype asked for.
    for peak, table in zip(grown, (0, 4096 * 1024 * 4), strict=True):
        assert packed < peak < 1.25 * (packed + table)
