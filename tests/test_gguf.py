"""GGUF files become Hugging Face folders with the same weights, logits, tokens and chat prompts."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import gguf_zoo
from foretoken.core.errors import ForetokenError
from foretoken.gguf import stored, tensors
from foretoken.gguf.config import gguf_config
from foretoken.gguf.folder import write_folder
from foretoken.gguf.reader import open_gguf
from foretoken.gguf.stored import Stored, in_bfloat16, packed, write_stored
from foretoken.gguf.tensors import Weight
from foretoken.kernel.packing import to_panels
from foretoken.models.load import load_model
from thinning import one_in

Q8 = gguf.GGMLQuantizationType.Q8_0


def converted(tmp_path: Path, architecture: str, tied: bool = True, **how) -> tuple[torch.nn.Module, Path]:
    made = gguf_zoo.model(architecture, gguf_zoo.VOCAB_SIZES[architecture], tied)
    gguf_zoo.save(made, architecture, tmp_path / "model.gguf", **how)
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    return made, tmp_path / "folder"


@pytest.mark.parametrize(
    ("architecture", "tied"),
    one_in(2, [*product(gguf_zoo.ARCHITECTURES, [True]), *product(gguf_zoo.UNTIED, [False])]),
)
def test_model_is_the_same(tmp_path: Path, architecture: str, tied: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors, "CHUNK", 1000)  # so that matrices come in several chunks, the last one shorter
    made, path = converted(tmp_path, architecture, tied)
    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert type(read) is type(made)
    assert read.config.tie_word_embeddings == tied
    weights = read.state_dict()
    assert weights.keys() == made.state_dict().keys()
    for name, value in made.state_dict().items():
        assert torch.equal(weights[name], value), name
    ids = torch.randint(0, gguf_zoo.VOCAB_SIZES[architecture], (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, made(ids).logits, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("smollm3", {"attention_bias": True}),
        ("granite", {"attention_bias": True}),
        ("gemma", {}),
        ("seed_oss", {}),
        ("seed_oss", {"attention_bias": False}),
    ],
)
def test_queries_keys_and_values_in_one_matrix(tmp_path: Path, architecture: str, how: dict[str, Any]):
    made = gguf_zoo.model(architecture, **how)
    gguf_zoo.save(made, architecture, tmp_path / "model.gguf", fused=True)
    assert any(tensor.name == "blk.1.attn_qkv.weight" for tensor in open_gguf(tmp_path / "model.gguf").tensors)
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    assert read.state_dict().keys() == made.state_dict().keys()
    for name, value in made.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def test_packed_queries_keys_and_values_in_one_matrix(tmp_path: Path):
    made = gguf_zoo.wide("llama")
    models = []
    for fused in (False, True):
        gguf_zoo.save(made, "llama", tmp_path / f"{fused}.gguf", Q8, fused=fused)
        models.append(load_model(str(tmp_path / f"{fused}.gguf"), torch.device("cpu")))
    apart, together = (model.model(torch.arange(24)[None]).logits for model in models)
    assert models[1].execution == "kernel"
    assert torch.equal(apart, together)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_quantised_weights_stay_what_they_were(tmp_path: Path, architecture: str):
    """Rows are put in order before they are dequantised: a block of numbers never spans two rows."""
    made, path = converted(tmp_path, architecture, kind=Q8)
    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, value in read.state_dict().items():
        original = made.state_dict()[name]
        if value.ndim == 2:
            value, original = value.flatten(), original.flatten()
            rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(original.numpy(), Q8), Q8))
            assert torch.equal(value, rounded.bfloat16().float()), name
        else:
            assert torch.equal(value, original), name


def in_bfloat16_each(weights: list[Weight]) -> list[Stored]:
    return [in_bfloat16(weight) for weight in weights]


@pytest.mark.parametrize("form", [in_bfloat16_each, packed])
def test_memory_stays_small(tmp_path: Path, form: Callable[[list[Weight]], list[Stored]], monkeypatch):
    """No tensor is dequantised or laid out whole."""
    for module in tensors, stored:
        monkeypatch.setattr(module, "CHUNK", 1 << 12)
    made = gguf_zoo.model("llama", 305)
    large = torch.zeros(20_000, 64)
    made.get_input_embeddings().weight.data = large
    gguf_zoo.save(made, "llama", tmp_path / "model.gguf", kind=Q8)
    weights = tensors.gguf_weights(open_gguf(tmp_path / "model.gguf"))
    write_stored(form(weights), tmp_path / "first.safetensors")  # loads what is compiled
    tracemalloc.start()
    write_stored(form(weights), tmp_path / "model.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < large.numel()  # a fourth of the matrix in float32


def test_a_matrix_that_is_laid_out_in_parts_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With 200 rows in parts of two panels, the last one of one panel that is not full."""
    made = gguf_zoo.model("llama", 200, tied=False)
    gguf_zoo.save(made, "llama", tmp_path / "model.gguf", kind=Q8)
    weights = {weight.name: weight for weight in tensors.gguf_weights(open_gguf(tmp_path / "model.gguf"))}
    head = weights[tensors.HEAD]
    monkeypatch.setattr(stored, "CHUNK", 130 * head.shape[1])
    (made_parts,) = [tensor for tensor in packed([*weights.values()]) if tensor.name == tensors.HEAD]
    parts = [*made_parts.make()]
    assert len(parts) == 2
    assert np.array_equal(np.concatenate(parts), to_panels("q8_0", head.raw()))


@pytest.mark.parametrize("words", ["smollm", "qwen2", "gpt-2", "llama-bpe", "smaug-bpe", "tekken", "lfm2"])
def test_byte_level_tokens(tmp_path: Path, words: str):
    vocabulary = partial(gguf_zoo.byte_level, words=words)
    _, path = converted(tmp_path, "qwen2", vocabulary=vocabulary)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    described = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert set(described["added_tokens_decoder"]) == {str(index) for index in tokenizer.added_tokens_decoder}
    text = "the cat sat on 2024  hats; don't <think>x</think> é 😀\n\n\tdef f(x):\n    return x"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    # The texts of Llama 3, Mistral and LFM2 begin with a token, unless the file says that they do not.
    begins = words in ("llama-bpe", "tekken", "lfm2")
    assert (tokenizer(text).input_ids[0] == 1) == begins
    threes = ["202", "4"]  # how digits stand
    whole = {"gpt-2": ["Ġ2024"], **dict.fromkeys(("llama-bpe", "smaug-bpe", "lfm2"), threes)}.get(words, list("2024"))
    cut = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2024")]
    assert [word for word in cut if word not in ("in", "Ġ")] == whole
    assert tokenizer.tokenize("<think>") == ["<think>"]
    assert "<think>" not in tokenizer.all_special_tokens
    assert len(tokenizer) == gguf_zoo.VOCAB_SIZES["qwen2"] - 1  # what only fills the matrix is no token
    if words == "qwen2":
        assert tokenizer("e\u0301").input_ids == tokenizer("é").input_ids
    messages = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert [ids.count(i) for i in (1, 2)] == [2, 1]  # each special token is one id
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert GenerationConfig.from_pretrained(path).eos_token_id == [2, 0]


def test_tokens_that_end_a_turn_or_a_message_end_a_text(tmp_path: Path):
    _, path = converted(tmp_path, "qwen2", **{"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9})
    assert GenerationConfig.from_pretrained(path).eos_token_id == [2, 7, 9, 0]


def test_sentencepiece_tokens(tmp_path: Path):
    _, path = converted(tmp_path, "gemma3")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("on the   hat\n\n sat é").input_ids)
    assert tokens == ["<bos>", "o", "n", "▁the", "▁▁▁", "h", "at", "\n\n", "▁sat", "▁", "<0xC3>", "<0xA9>"]
    text = "the  cat sat\n\non   that; 2024 é 😀\n"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert GenerationConfig.from_pretrained(path).eos_token_id == [1, 4]
    # `at` comes before `▁sat` can: what merges first is the pair whose union scores best, as in SentencePiece.
    assert tokenizer.tokenize(" sat") == ["▁sat"]
    assert tokenizer.tokenize("the") == ["t", "he"]  # `▁the` needs its space


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_cut_off_files_are_refused(tmp_path: Path, share: float):
    gguf_zoo.save(gguf_zoo.model("llama", 305), "llama", tmp_path / "model.gguf")
    raw = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(ForetokenError, match=r"model\.gguf as a GGUF file"):
        write_folder(tmp_path / "model.gguf", tmp_path / "folder")


PLAIN = {"rope_theta": 50_000.0, "factor": 8.0}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear"} | PLAIN,
    "yarn": {"rope_type": "yarn", "original_max_position_embeddings": 8} | PLAIN,
    **{
        f"llama3 from {context}": {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        | PLAIN
        for context in (64, 1000, 8192)
    },
}


@pytest.mark.parametrize("rotary", SCALED)
def test_scaled_rotary_positions(tmp_path: Path, rotary: str):
    parameters = SCALED[rotary]
    made = gguf_zoo.model("llama", rope_parameters=parameters)
    gguf_zoo.save(made, "llama", tmp_path / "model.gguf")
    assert gguf_config(open_gguf(tmp_path / "model.gguf")).rope_parameters == parameters


@pytest.mark.parametrize("key", ["attn_factor", "yarn_ext_factor"])
def test_numbers_of_yarn_without_a_place_in_transformers_are_refused(tmp_path: Path, key: str):
    keys: dict[str, Any] = {"type": "yarn", "factor": 4.0, key: 0.7}
    more = {f"llama.rope.scaling.{name}": value for name, value in keys.items()}
    gguf_zoo.save(gguf_zoo.model("llama"), "llama", tmp_path / "model.gguf", **more)
    with pytest.raises(ForetokenError, match=f"has its own {key} for yarn"):
        gguf_config(open_gguf(tmp_path / "model.gguf"))


def test_what_a_file_says_of_yarn(tmp_path: Path):
    """Without a context before scaling it is that of the model, as in llama.cpp."""
    keys = {"type": "yarn", "factor": 4.0, "yarn_attn_factor": 0.9, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    more: dict[str, Any] = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    gguf_zoo.save(gguf_zoo.model("llama"), "llama", tmp_path / "model.gguf", **more)
    assert gguf_config(open_gguf(tmp_path / "model.gguf")).rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }


def test_longrope(tmp_path: Path):
    """Scores are the model's, in its context before scaling, to which it keeps."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    }
    made = gguf_zoo.model("phi3", rope_parameters=parameters, original_max_position_embeddings=32)
    gguf_zoo.save(made, "phi3", tmp_path / "model.gguf", **{"phi3.rope.dimension_count": 12})
    assert gguf_config(open_gguf(tmp_path / "model.gguf")).rope_parameters == parameters
    lm = load_model(str(tmp_path / "model.gguf"), torch.device("cpu"), torch.float32)
    assert lm.context == 32
    ids = torch.arange(100, 132)[None]
    with torch.no_grad():
        assert torch.allclose(lm.model(ids).logits, made(ids).logits, atol=1e-5)


def test_text_of_a_tokenizer_with_a_space_prefix(tmp_path: Path):
    """As llama.cpp has it: a text starts with a space more than it shows, also behind a special token."""
    _, path = converted(tmp_path, "phi3")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.tokenize("the cat") == ["▁the", "▁", "c", "at"]
    # Phi-3's special tokens take the white space behind them.
    assert tokenizer.convert_ids_to_tokens(tokenizer("<end_of_turn>  the").input_ids)[1:] == ["<end_of_turn>", "▁the"]
    text = "the cat sat; 2024 é 😀"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
