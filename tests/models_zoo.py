"""Tiny random models of many families, and the comparison of their trees with plain forwards.

3 layers, 101 tokens, 64 positions; weights large enough that a wrong mask or position shows in the logits.

Tolerances: in float32 two orders of summation differ by a few units in the last place per layer, here < 1e-5 with
logits of size ~1; the nearest wrong mask (one sibling visible) moves logits by > 1e-3 (`test_wrong_mask_is_seen`).
bfloat16 has 8 bits, so 2**-8 per rounding and a few roundings per layer: 0.05 for logits of size ~1.
"""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.tree import path_to
from foretoken.heads.head import PublishedHead, new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts
from foretoken.models.rows import Rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
VOCAB = 101
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GQA = {**SMALL, "num_key_value_heads": 2}
MULTIPLIERS = {  # of Granite
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.75,
    "attention_multiplier": 0.3,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA),
    "qwen2_sliding": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "mistral": ("Mistral", {**GQA, "sliding_window": 9}),
    "gemma": ("Gemma", {**GQA, "head_dim": 8}),
    "gemma2": ("Gemma2", {**GQA, "head_dim": 8, "sliding_window": 9, "layer_types": MIXED}),
    "gemma3": ("Gemma3Text", {**GQA, "head_dim": 8, "sliding_window": 9, "layer_types": MIXED}),
    "phi3": ("Phi3", {**SMALL, "head_dim": 16, "intermediate_size": 64, "sliding_window": 9}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoX", SMALL),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("Phi", SMALL),
    "starcoder2": ("Starcoder2", GQA),
    "starcoder2_sliding": ("Starcoder2", {**GQA, "sliding_window": 9}),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**GQA, "sliding_window": 9, "layer_types": MIXED}),
    "granite": ("Granite", {**GQA, **MULTIPLIERS}),
}
HEADS = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
LATENT = {**HEADS, "q_lora_rank": 16, "kv_lora_rank": 16}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16}
ROUTED = {"expert_ffn_hidden_size": 16, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2}
# Families with a peculiarity: experts, latent attention, layers without positions, kinds of layers.
PECULIAR: dict[str, tuple[str, dict[str, Any]]] = {
    "longcat_flash": ("LongcatFlash", {**SMALL, **LATENT, **ROUTED, "num_layers": 2, "num_hidden_layers": 4}),
    "qwen3_moe": ("Qwen3Moe", {**GQA, **EXPERTS, "head_dim": 8, "num_experts": 4}),
    "mixtral": ("Mixtral", {**GQA, "head_dim": 8, "num_local_experts": 4, "sliding_window": 9}),
    "granite_moe": ("GraniteMoe", {**GQA, **MULTIPLIERS, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", {**SMALL, **LATENT, **EXPERTS, **GROUPS, "num_key_value_heads": 4}),
    "gemma4": (
        "Gemma4Text",
        {**GQA, **PER_LAYER, "head_dim": 8, "sliding_window": 9, "layer_types": [*MIXED[:1], *MIXED[:2]]},
    ),
    "glm4": ("Glm4", {**GQA, "head_dim": 8}),
    "smollm3": ("SmolLM3", {**GQA, "no_rope_layers": [1, 1, 0]}),
    "seed_oss": ("SeedOss", {**GQA, "head_dim": 8}),
    "ministral": ("Ministral", {**GQA, "head_dim": 8, "sliding_window": 9, "layer_types": MIXED}),
    "nemotron": ("Nemotron", {**GQA, "head_dim": 8}),
    "aria": ("AriaText", {**GQA, "intermediate_size": 16, "moe_num_experts": 4, "moe_topk": 2}),
    "dbrx": (
        "Dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "moshi": ("Moshi", {**SMALL, "ffn_dim": 48, "audio_vocab_size": 50, "sliding_window": 9}),
    "olmoe": ("Olmoe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            **GQA,
            **MULTIPLIERS,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
        },
    ),
    "granite_experts": (
        "GraniteMoeHybrid",
        {**GQA, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "mamba_n_heads": 8},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {**GQA, "head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "olmo2": ("Olmo2", GQA),
    "exaone4": ("Exaone4", {**GQA, "sliding_window": 9, "layer_types": MIXED}),
    "doge": ("Doge", {**GQA, "sliding_window": 9}),
    "gpt_oss": ("GptOss", {**GQA, "head_dim": 8, "num_local_experts": 4, "sliding_window": 9, "layer_types": MIXED}),
}

DELTA = {  # of gated linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1}
STATES = ["linear_attention", "full_attention", "linear_attention"]
# Of Mamba's second version; time steps are bounded from below only where several tokens are read.
MIXER = {"n_groups": 1, "chunk_size": 4, "time_step_min": 1e-9}
# Families that keep recurrent states.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text", {**GQA, **DELTA, "head_dim": 16, "layer_types": STATES}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **GQA,
            **DELTA,
            **EXPERTS,
            "head_dim": 8,
            "layer_types": STATES,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", {**GQA, **DELTA, "layer_types": STATES}),
    "kimi_linear": (
        "KimiLinear",
        {
            **SMALL,
            **LATENT,
            "q_lora_rank": None,
            "layer_types": STATES,
            "mlp_layer_types": ["dense"] * 3,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_key_value_heads": 4,
        },
    ),
    "lfm2": ("Lfm2", {**GQA, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm3": ("Lfm3", {**GQA, "layer_types": ["conv", *MIXED[:2]], "sliding_window": 9}),
    "falcon_h1": ("FalconH1", {**GQA, **MAMBA, "head_dim": 8, "mamba_d_ssm": 64}),
    "bamba": ("Bamba", {**GQA, **MAMBA, "attn_layer_indices": [1]}),
    "granite_mamba": (
        "GraniteMoeHybrid",
        {
            **GQA,
            **MAMBA,
            **MULTIPLIERS,
            "layer_types": STATES,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **GQA,
            **MIXER,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "num_hidden_layers": 4,
            "layers_block_type": [*STATES, "mlp"],
        },
    ),
    "zamba2": (
        "Zamba2",
        {**GQA, **MIXER, "n_mamba_heads": 8, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    ),
    "zaya": (
        "Zaya",
        {
            **GQA,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "head_dim": 8,
            "attention_bias": True,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "sliding_window": 9,
        },
    ),
}


@cache
def _weights(family: str) -> dict[str, torch.Tensor]:
    return _build(family, "eager").state_dict()


def _build(family: str, attention: str, **changes: Any) -> PreTrainedModel:
    name, arguments = {**FAMILIES, **PECULIAR, **RECURRENT}[family]
    config = getattr(hf, f"{name}Config")(**{**arguments, **changes})
    config._attn_implementation = "eager" if name == "Gemma2" else attention  # sdpa has no softcap for the scores
    torch.manual_seed(0)
    kind = name.removesuffix("Text") if name.startswith(("Gemma", "Qwen3_5")) else name
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(hf, kind + head)(config).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if name == "Zaya":  # some of its scales are zeros in new models, and so are its biases
                parameter.normal_(std=0.3)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.15)
            elif family in RECURRENT and "conv" in part:  # else states change the logits by less than rounding does
                parameter.normal_(std=0.5)
            elif part.endswith("A_log"):  # states last for more than a token
                parameter.sub_(3.0)
    return model


def tiny(family: str, attention: str = "sdpa", random_weights: bool = False, **changes: Any) -> PreTrainedModel:
    """A fresh model in eval mode, float32, with the same weights on every call (random_weights: of its own)."""
    model = _build(family, attention, **changes)
    if not random_weights:
        model.load_state_dict(_weights(family))
    return model


def tiny_with_images() -> PreTrainedModel:
    """A model of images and text."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 16}
    text = {**SMALL, **sizes, "model_type": "mistral", "num_key_value_heads": 1, "head_dim": 16}
    config = hf.Mistral3Config(text_config=text, vision_config=vision, image_token_id=100)
    torch.manual_seed(0)
    return hf.Mistral3ForConditionalGeneration(config).eval()


def random_medusa(lm: CausalLM, seed: int) -> PublishedHead:
    """A Medusa head of three levels, none of whose answers is like another's, as a new head's are."""
    torch.manual_seed(seed)
    head = new_head("medusa", parts(lm), levels=3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3)
    return head


def change_config(folder: Path, name: str = "config.json", **entries: Any) -> None:
    """Change entries of a JSON file in a model's folder; None: one is removed."""
    found = json.loads((folder / name).read_text()) | entries
    (folder / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]


def plain(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits after `tokens`, by one forward without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def random_parents(rng: random.Random, first: int, n: int) -> list[int]:
    """Chains and branches: half of the nodes follow the newest node, the rest any earlier one or the text."""
    return [j - 1 if rng.random() < 0.5 else rng.randrange(-1, j) for j in range(first, first + n)]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, exact: Tensor | None = None) -> None:
    """exact: `want` without rounding, where rounding alone may move it by more than the tolerance."""
    moved = 0.0 if exact is None else float((want.float() - exact).abs().max())
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=max(TOLERANCE[dtype], moved))


def check_random_steps(
    model: PreTrainedModel,
    seed: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    exact: PreTrainedModel | None = None,
) -> Rows:
    """Random trees grown in several calls, random paths kept; every logit is compared.

    batch: the most rows; of several, rows of different lengths bring different numbers of nodes, also none, and join
        and leave between steps.
    exact: the model's weights in float32; logits may differ by as much as plain ones of `model` differ from its own.
    """
    rng = random.Random(seed)
    rows = CausalLM(model).open(batch, 80)
    committed: list[list[int]] = []
    for step in range(steps):
        if not committed or (len(committed) < batch and (step < 2 or rng.random() < 0.5)):
            committed.append(text(rng, 13 if batch == 1 else rng.randint(0, 15)))
            rows.extend(rows.join(), committed[-1])
        elif len(committed) > 1 and rng.random() < 0.4:
            gone = rng.randrange(len(committed))
            rows.leave(gone)
            committed[gone] = committed[-1]
            committed.pop()
        tokens: list[list[int]] = [[] for _ in committed]
        parents: list[list[int]] = [[] for _ in committed]
        for _ in range(rng.randint(1, 3)):
            more = [text(rng, rng.randint(1, 4) if batch == 1 else rng.choice([0, 1, 1, 3])) for _ in committed]
            above = [random_parents(rng, len(old), len(new)) for old, new in zip(tokens, more, strict=True)]
            for r, logits in enumerate(rows.score(more, above)):
                assert logits.shape == (len(more[r]), VOCAB)
                first = len(tokens[r])
                tokens[r] += more[r]
                parents[r] += above[r]
                for j in range(len(more[r])):
                    chain = [tokens[r][i] for i in path_to(parents[r], first + j)]
                    read = committed[r] + chain
                    assert_close(logits[j], plain(model, read), dtype, None if exact is None else plain(exact, read))
        paths = [path_to(of_row, rng.randrange(-1, len(of_row))) for of_row in parents]
        rows.keep(paths)
        for r, path in enumerate(paths):
            committed[r] += [tokens[r][i] for i in path]
        assert rows.lengths == [len(ids) for ids in committed]
    return rows
