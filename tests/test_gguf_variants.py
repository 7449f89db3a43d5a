"""GGUF files as they are found: keys left out or under old names, ids that are no tokens, values that make no sense."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import gguf_zoo
from foretoken.catalogue.kept import kept
from foretoken.core.errors import ForetokenError
from foretoken.gguf.config import gguf_config, gguf_generation_config
from foretoken.gguf.folder import contents, write_folder
from foretoken.gguf.reader import Reader, open_gguf
from foretoken.gguf.tokenizer import gguf_tokenizer
from foretoken.models.named import located
from foretoken.models.packed import stored_tokenizer

MESSAGES = [{"role": "user", "content": "the cat"}]


def written(path: Path, architecture: str = "llama", sizes: dict[str, Any] | None = None, **how: Any) -> Reader:
    """A small file, opened; sizes: of the model's configuration. how: as for `gguf_zoo.save`."""
    gguf_zoo.save(gguf_zoo.model(architecture, **sizes or {}), architecture, path / "model.gguf", **how)
    return open_gguf(path / "model.gguf")


def written_path(path: Path, architecture: str = "llama", **how: Any) -> Path:
    written(path, architecture, **how)
    return path / "model.gguf"


LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
UNSCALED = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling.type": "none", "scaling.factor": 4.0}, UNSCALED),
        ({"scaling.type": "linear"}, UNSCALED),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, UNSCALED),
        ({"scale_linear": 1.0}, UNSCALED),
    ],
)
def test_linear_scaling_of_positions(tmp_path: Path, keys: dict[str, Any], parameters: dict[str, Any]) -> None:
    """As llama.cpp reads them: the type is linear where none is named, and factors of 0 and 1 scale nothing."""
    reader = written(tmp_path, **{f"llama.rope.{key}": value for key, value in keys.items()})
    assert gguf_config(reader).rope_parameters == parameters


def layer_types(period: int, layers: int = 7) -> list[str]:
    """Those of Gemma 3, of which the last of each `period` layers is global."""
    return ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(layers)]


@pytest.mark.parametrize(("layers", "scalar"), [(62, 64 // 4), (26, 32)])
def test_the_query_scale_of_gemma(tmp_path: Path, layers: int, scalar: int) -> None:
    """It is that of a head's width, but in the largest model, of 62 layers, of the width of states per head."""
    config: Any = gguf_config(written(tmp_path, "gemma3", {"num_hidden_layers": layers}))
    assert config.query_pre_attn_scalar == scalar
    assert config.layer_types == layer_types(6, layers)


GEMMA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "capped": ({"final_logit_softcapping": 3.0}, {"gemma3.final_logit_softcapping": 3.0}),
    "local or not": (
        {"layer_types": ["full_attention", *["sliding_attention"] * 6]},
        {"gemma3.attention.sliding_window_pattern": [False, *[True] * 6]},
    ),
    "all local": ({"layer_types": ["sliding_attention"] * 7}, {"gemma3.attention.sliding_window_pattern": [True] * 7}),
    "every second": ({"layer_types": layer_types(2)}, {"gemma3.attention.sliding_window_pattern": 2}),
    "all global": ({"layer_types": layer_types(1)}, {"gemma3.attention.sliding_window": 0}),
}


@pytest.mark.parametrize("case", GEMMA)
def test_gemmas_with_other_settings(tmp_path: Path, case: str) -> None:
    settings, keys = GEMMA[case]
    made = gguf_zoo.model("gemma3", **settings)
    gguf_zoo.save(made, "gemma3", tmp_path / "model.gguf", **keys)
    write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    ids = torch.arange(100, 124)[None]
    usual = gguf_zoo.model("gemma3")
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, made(ids).logits, atol=1e-5)
        assert not torch.allclose(usual(ids).logits, made(ids).logits, atol=1e-2)


def test_a_window_of_0_is_none(tmp_path: Path) -> None:
    config: Any = gguf_config(written(tmp_path, "phi3", {"sliding_window": None}))
    assert config.sliding_window is None
    config = gguf_config(written(tmp_path, "phi3", **{"phi3.attention.sliding_window": [0, 0]}))
    assert config.sliding_window is None


def test_values_per_layer_that_are_all_the_same(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    found = contents(written_path(tmp_path, **{f"llama.{key}": value for key, value in keys.items()}))
    assert (found.config.num_key_value_heads, found.config.intermediate_size) == (2, 96)
    with pytest.raises(ForetokenError, match=r"differ in attention\.key_length"):
        contents(written_path(tmp_path, **{"llama.attention.key_length": [16, 32]}))
    with pytest.raises(ForetokenError, match="differ in feed_forward_length"):
        contents(written_path(tmp_path, **{"llama.feed_forward_length": [96, 64]}))


@pytest.mark.parametrize("architecture", ["llama", "smollm3", "granite"])
def test_biases_of_the_mlp(tmp_path: Path, architecture: str) -> None:
    made = gguf_zoo.model(architecture, mlp_bias=True)
    gguf_zoo.save(made, architecture, tmp_path / "model.gguf")
    found = contents(tmp_path / "model.gguf")
    assert {weight.name for weight in found.weights} == made.state_dict().keys() - {"lm_head.weight"}


def test_the_numbers_of_granite(tmp_path: Path) -> None:
    """A file without one of them multiplies by nothing, and attends like other models."""
    keys = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    config: Any = gguf_config(written(tmp_path, "granite"))
    assert [getattr(config, key) for key in keys] == [0.3, 12.0, 0.25, 0.75]
    more = {f"granite.{key}": 0.0 for key in ("attention.scale", "embedding_scale", "residual_scale")}
    config = gguf_config(written(tmp_path, "granite", **more))
    assert [getattr(config, key) for key in keys] == [0.25, 1.0, 1.0, 0.75]
    granite_4 = {"granite.rope.scaling.finetuned": False}
    with pytest.raises(ForetokenError, match="rotates no queries and keys"):
        gguf_config(written(tmp_path, "granite", **granite_4))


def byte_level_with(changes: dict[str, TokenType | None], writer: gguf.GGUFWriter) -> None:
    """gguf_zoo's vocabulary with other types of some tokens, None: of a token that is not listed any more."""
    gguf_zoo.byte_level(writer)
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    types = writer.kv_data[0].pop("tokenizer.ggml.token_type").value
    if changes:
        writer.add_token_types([changes.get(token, type_) or type_ for token, type_ in zip(tokens, types, strict=True)])


@pytest.mark.parametrize("type_", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
def test_the_end_of_a_turn_ends_a_text_whatever_its_type(tmp_path: Path, type_: TokenType) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 0}
    reader = written(tmp_path, vocabulary=partial(byte_level_with, {"<|im_end|>": type_}), **ends)
    assert gguf_generation_config(reader).eos_token_id == [0, 2]
    tokenizer = gguf_tokenizer(reader)
    assert tokenizer("cat<|im_end|>").input_ids[-1] == 2
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


@pytest.mark.parametrize("token", ["<|eom_id|>", "<end_of_utterance>"])
def test_tokens_that_end_texts_of_other_models(tmp_path: Path, token: str) -> None:
    """Llama 3.1's end of a message with a tool call, which converters do not name, and SmolVLM's end of a turn."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_zoo.byte_level(writer)
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[-2] = token

    assert gguf_generation_config(written(tmp_path, vocabulary=vocabulary)).eos_token_id == [2, 0, 303]


def test_without_types_all_tokens_are_ordinary_but_those_that_end_turns(tmp_path: Path) -> None:
    reader = written(tmp_path, vocabulary=partial(byte_level_with, {}))
    assert gguf_generation_config(reader).eos_token_id == [2, 0]
    assert gguf_tokenizer(reader).convert_tokens_to_ids("<|im_start|>") == 1


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "unknown", "padding"])
@pytest.mark.parametrize("number", [305, 2**32 - 1])  # the number of tokens; -1 without a sign
def test_ids_that_are_no_tokens_are_left_out(tmp_path: Path, name: str, number: int) -> None:
    write_folder(written_path(tmp_path, **{f"tokenizer.ggml.{name}_token_id": number}), tmp_path / "folder")
    AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    AutoTokenizer.from_pretrained(tmp_path / "folder")
    generation = GenerationConfig.from_pretrained(tmp_path / "folder")
    assert number not in (generation.bos_token_id, generation.pad_token_id, *generation.eos_token_id)


def test_a_sentencepiece_vocabulary_that_names_no_special_tokens(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_zoo.sentencepiece(writer)
        for name in ("bos", "eos", "unknown"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    tokenizer = gguf_tokenizer(written(tmp_path, "gemma3", vocabulary=vocabulary))
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    wrong = {"tokenizer.ggml.eos_token_id": 2**32 - 1}
    assert gguf_tokenizer(written(tmp_path, "gemma3", **wrong)).eos_token_id == 2


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_a_prompt_does_not_end_in_the_token_that_ends_texts(tmp_path: Path, architecture: str) -> None:
    """Some files ask for that, of embedding models or as they were trained: what followed would be another text."""
    reader = written(tmp_path, architecture, **{"tokenizer.ggml.add_eos_token": True})
    tokenizer = gguf_tokenizer(reader)
    assert tokenizer.eos_token_id not in tokenizer("the cat").input_ids


@pytest.mark.parametrize("words", ["llama3", "llama-v3"])
def test_other_names_for_llama_3s_words(tmp_path: Path, words: str) -> None:
    reader = written(tmp_path, vocabulary=partial(gguf_zoo.byte_level, words=words))
    cut: Any = gguf_tokenizer(reader).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in cut.pre_tokenize_str("1234567")] == ["123", "456", "7"]


@pytest.mark.parametrize(
    ("words", "whole", "text", "cut"),
    [
        ("dbrx", False, "don'T 1234/\n", ["don", "'T", "Ġ", "123", "4", "/Ċ"]),
        ("gpt-4o", False, "don'T HelloWORLD 1234/\n", ["don'T", "ĠHello", "WORLD", "Ġ", "123", "4", "/Ċ"]),
        ("seed-coder", False, "don'T a;\n12", ["don", "'T", "Ġa", ";", "Ċ", "1", "2"]),
        ("tekken", True, "don'T HelloWORLD 12/\n", ["don", "'T", "ĠHello", "WORLD", "Ġ", "1", "2", "/Ċ"]),
        ("deepseek-coder", False, "don'T, a+b  12\n", ["don", "'", "T", ",", "Ġa", "+", "b", "ĠĠ", "1", "2", "Ċ"]),
        ("refact", False, "don'T, a+b 12\n", ["don", "'", "T", ",", "Ġa", "+", "b", "Ġ", "1", "2", "Ċ"]),
        ("starcoder", False, "don't 12", ["don", "'t", "Ġ", "1", "2"]),
    ],
)
def test_more_ways_to_cut_words(tmp_path: Path, words: str, whole: bool, text: str, cut: list[str]) -> None:
    """Those of Phi-4, Phi-4-mini, Mistral Nemo, DeepSeek Coder, Granite Code and StarCoder."""
    reader = written(tmp_path, vocabulary=partial(gguf_zoo.byte_level, words=words))
    backend: Any = gguf_tokenizer(reader).backend_tokenizer
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == cut
    assert backend.model.ignore_merges == whole


def test_named_templates(tmp_path: Path, home: Path) -> None:
    """The one for tools is used where tools are offered, as from a folder of Hugging Face's; also at a later start."""
    named = {"tokenizer.chat_template.tool_use": "{{ tools | length }} tools", "tokenizer.chat_template./../x": "bad"}
    path = written_path(tmp_path, **named)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    for tokenizer in (gguf_tokenizer(open_gguf(path)), stored_tokenizer(str(path)), stored_tokenizer(str(path))):
        assert set(tokenizer.chat_template) == {"default", "tool_use"}
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).startswith("<|im_start|>user")
        assert tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == "1 tools"
    (folder,) = [path for path in (home / "gguf").iterdir() if path.is_dir()]
    assert (folder / "additional_chat_templates" / "tool_use.jinja").exists()


def test_a_default_template_by_name(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_zoo.byte_level(writer)
        writer.kv_data[0]["tokenizer.chat_template.default"] = writer.kv_data[0].pop("tokenizer.chat_template")

    assert gguf_tokenizer(written(tmp_path, vocabulary=vocabulary)).chat_template == gguf_zoo.TEMPLATE


def damaged(before: bytes, after: bytes, architecture: str = "llama") -> Callable[[Path], None]:
    """A function that writes a small file in which some bytes are others."""

    def write(path: Path) -> None:
        gguf_zoo.save(gguf_zoo.model(architecture), architecture, path)
        raw = path.read_bytes()
        assert before in raw
        path.write_bytes(raw.replace(before, after))

    return write


def bare(path: Path, architecture: str = "llama", **how: Any) -> None:
    writer = gguf.GGUFWriter(path, architecture, **how)
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def saved(path: Path, **how: Any) -> None:
    gguf_zoo.save(gguf_zoo.model("llama"), "llama", path, **how)


def experts_of_two_types(path: Path) -> None:
    """As some publishers' files may be whose types were chosen tensor by tensor."""
    made = gguf_zoo.model("qwen3moe")
    add = gguf.GGUFWriter.add_tensor

    def other(writer: gguf.GGUFWriter, name: str, values: np.ndarray, raw_dtype: Any = None) -> None:
        if "up_exps" in name:
            values, raw_dtype = values.astype(np.float16), gguf.GGMLQuantizationType.F16
        add(writer, name, values, raw_dtype=raw_dtype)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "add_tensor", other)
        gguf_zoo.save(made, "qwen3moe", path)


NOT_READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "no text": (damaged(b"<think>", b"<th\xffnk>"), "model.gguf.* is damaged .*utf-8"),
    "heads": (partial(saved, **{"llama.attention.head_count": 7}), "model.gguf: .* is damaged"),
    "part": (partial(saved, **{"split.count": 3}), "is one of 3 parts of a model, and its name does not say which"),
    "parts": (partial(saved, **{"split.count": "two"}), "model.gguf as a GGUF file"),
    "rotary": (partial(saved, **{"llama.rope.scaling.type": "dynamic"}), r"scales its rotary positions \(dynamic\)"),
    "no factors": (partial(saved, **{"llama.rope.scaling.type": "longrope"}), r"scales its rotary .* \(longrope\)"),
    "types": (partial(saved, **{"tokenizer.ggml.token_type": [1] * 304}), "has 305 tokens and the types of 304"),
    "words": (partial(saved, vocabulary=partial(gguf_zoo.byte_level, words="other")), r"in a way \(other\)"),
    "old words": (
        damaged(b"tokenizer.ggml.pre", b"tokenizer.ggml.qre"),
        "does not say how it cuts text into words, like files of before May 2024",
    ),
    "order": (
        partial(bare, endianess=gguf.GGUFEndian.BIG),
        "model.gguf is a GGUF file with the byte order of other processors",
    ),
    "architecture": (partial(bare, architecture="mamba"), "architecture is mamba"),
    "no architecture": (damaged(b"general.architecture", b"general.architectura"), "names no architecture: it holds"),
    "both directions": (partial(saved, **{"llama.attention.causal": False}), "reads texts in both directions"),
    "scores": (
        damaged(b"tokenizer.ggml.scores", b"tokenizer.ggml.stores", "gemma3"),
        r"describe its tokenizer \(it has no scores\)",
    ),
    "merges": (
        damaged(b"tokenizer.ggml.merges", b"tokenizer.ggml.nerges"),
        r"describe its tokenizer \(it has no merges\)",
    ),
    "tokenizer": (damaged(b"tokenizer.ggml.model", b"tokenizer.ggml.nodel"), "has no tokenizer"),
    "layer": (
        damaged(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"),
        r"model\.layers\.1\.mlp\.up_proj\.weight has shape none and should have \(96, 64\)",
    ),
    "tensor": (damaged(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"), r"tensor blk\.1\.attn_x\."),
    "no layers": (damaged(b"llama.block_count", b"llama.glock_count"), "does not tell num_hidden_layers"),
    "many layers": (
        damaged(b"block_count\4\0\0\0\2\0\0\0", b"block_count\4\0\0\0\0\0\0\4"),
        "configuration 67108864 layers",
    ),
    "kind": (
        partial(gguf_zoo.save_wide, kind=gguf.GGMLQuantizationType.Q8_K),
        "has a tensor .* of type Q8_K, which is not supported",
    ),
    "experts": (
        experts_of_two_types,
        r"blk\.0\.ffn_up_exps\.weight is of another type \(F16\) than blk\.0\.ffn_gate_ex",
    ),
    "no ups": (damaged(b"blk.1.ffn_up_exps.", b"blk.1.ffn_no_exps.", "qwen3moe"), r"tensor blk\.1\.ffn_no_exps\."),
    "no experts": (
        damaged(b"qwen3moe.expert_used_count", b"qwen3moe.expert_user_count", "qwen3moe"),
        "does not tell num_experts_per_tok",
    ),
    "longrope": (damaged(b"blk.1.ffn_norm.weight", b"rope_factors_long.wei"), r"\(longrope\)"),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_what_is_not_read_is_one_sentence(tmp_path: Path, case: str) -> None:
    make, message = NOT_READ[case]
    make(tmp_path / "model.gguf")
    with pytest.raises(ForetokenError, match=message):
        write_folder(tmp_path / "model.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_with_a_file(tmp_path: Path) -> None:
    """Some publishers put a config.json beside it; the file is the model unless the folder has other weights."""
    path = written_path(tmp_path)
    assert located(str(tmp_path)) == str(path)
    other = path.rename(tmp_path / "other.gguf")
    written_path(tmp_path)
    with pytest.raises(ForetokenError, match=r"2 GGUF files: name one of .*model\.gguf, .*other\.gguf"):
        located(str(tmp_path))
    other.unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert located(str(tmp_path)) == str(path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert located(str(tmp_path)) == str(tmp_path)


def test_two_names_of_one_file_are_kept_once(tmp_path: Path, home: Path) -> None:
    (tmp_path / "blob").write_bytes(b"some bytes")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()

    folders = {kept(path, "gguf", make) for path in [tmp_path / "blob", tmp_path / "model.gguf"] * 2}
    assert len(folders) == len(made) == 1


def test_lfm2_has_layers_of_two_sorts(tmp_path: Path) -> None:
    """Short convolutions have no key heads, and the file says how many tokens they weigh."""
    types = ["full_attention", "conv", "conv"]
    config: Any = gguf_config(written(tmp_path, "lfm2", {"layer_types": types}))
    assert (config.layer_types, config.conv_L_cache, config.num_key_value_heads) == (types, 3, 2)
    config = gguf_config(written(tmp_path, "lfm2", {"conv_L_cache": 4}))
    assert config.conv_L_cache == 4
    with pytest.raises(ForetokenError, match="sliding windows"):
        gguf_config(written(tmp_path, "lfm2", **{"lfm2.attention.sliding_window": 9}))
    with pytest.raises(ForetokenError, match=r"differ in attention\.head_count_kv"):
        gguf_config(written(tmp_path, "lfm2", **{"lfm2.attention.head_count_kv": [0, 2, 1]}))
