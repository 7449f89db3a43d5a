"""The published layouts of draft heads: keys, and sizes read off the tensors, not the configuration.

| head   | file                                       | keys                                                          |
|--------|--------------------------------------------|---------------------------------------------------------------|
| eagle  | model.safetensors or pytorch_model.bin     | fc, layers.i.(self_attn, mlp, ...layernorm)                   |
| gumiho | the same                                   | the same, mlp.j.b.linear                                      |
| eagle3 | the same                                   | fc, midlayer (speculators: layers.0), norm, lm_head, d2t, t2d |
| medusa | medusa_lm_head.pt or .safetensors          | i.j.linear, i.m.weight                                        |
| hydra  | hydra_lm_head.pt or .safetensors           | hydra_mlp.i.j, hydra_lm_head.i.1, prefix_embeding_layer       |

config.json may add "feature_scale", and holds what tensors do not show (head sizes, EAGLE-3's flags and layers).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import LayerShape
from foretoken.heads.make import Head
from foretoken.heads.serial import Eagle, Eagle3, Gumiho
from foretoken.models.features import FINAL
from foretoken.models.parts import TargetParts

UNKNOWN_FLAGS = ("norm_before_fc", "fc_norm")  # of the speculators format
Weights = dict[str, Tensor]


def kind_of(keys: Iterable[str]) -> str | None:
    names = set(keys)
    if "fc.weight" in names:
        if "lm_head.weight" in names or any(name.startswith("midlayer.") for name in names):
            return "eagle3"
        return "gumiho" if any(name.startswith("mlp.") for name in names) else "eagle"
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    return "medusa" if any(re.fullmatch(r"\d+\.\d+\.linear\.weight", name) for name in names) else None


def _count(weights: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest index that `pattern` finds in a key; 0 for none."""
    found = [int(match[1]) for key in weights if (match := re.match(pattern, key))]
    return max(found, default=-1) + 1


def _size(weights: Mapping[str, Tensor], key: str, path: Path) -> tuple[int, ...]:
    if key not in weights:
        raise ForetokenError(f"{path} lacks {key}.")
    return tuple(weights[key].shape)


def _check(what: str, found: int, wanted: int, parts: TargetParts, path: Path) -> None:
    if found != wanted:
        raise ForetokenError(f"{path} is for a target with {what} {found}, and {parts.name} has {wanted}.")


def _shape(
    weights: Mapping[str, Tensor], prefix: str, config: dict[str, Any], parts: TargetParts, path: Path
) -> LayerShape:
    """Of the layer under `prefix`; only the width of one attention head cannot be seen in the tensors."""
    queries, width = _size(weights, f"{prefix}self_attn.q_proj.weight", path)
    keys, _ = _size(weights, f"{prefix}self_attn.k_proj.weight", path)
    inner, hidden = _size(weights, f"{prefix}mlp.gate_proj.weight", path)
    dim = config.get("head_dim")
    if not dim and config.get("num_attention_heads"):
        dim = queries // config["num_attention_heads"]
    dim = dim or parts.head_dim
    if queries % dim or keys % dim or dim != 2 * len(parts.inv_freq):
        raise ForetokenError(
            f"{path} has attention heads of width {dim}, which do not divide its {queries} and {keys} channels, or "
            f"differ from the {2 * len(parts.inv_freq)} that {parts.name} rotates."
        )
    eps = float(config.get("rms_norm_eps") or parts.eps)
    bias = f"{prefix}self_attn.q_proj.bias" in weights
    return LayerShape(hidden, queries // dim, keys // dim, dim, inner, eps, width, bias)


def _eagle(weights: Weights, config: dict[str, Any], parts: TargetParts, path: Path) -> tuple[Head, Weights]:
    _check("hidden size", _size(weights, "fc.weight", path)[1] // 2, parts.hidden, parts, path)
    shape = _shape(weights, "layers.0.", config, parts, path)
    layers, bias = _count(weights, r"layers\.(\d+)\."), "fc.bias" in weights
    return Eagle(parts, shape, layers, bias), weights


def _gumiho(weights: Weights, config: dict[str, Any], parts: TargetParts, path: Path) -> tuple[Head, Weights]:
    _check("hidden size", _size(weights, "fc.weight", path)[1] // 2, parts.hidden, parts, path)
    shape = _shape(weights, "layers.0.", config, parts, path)
    mlps, blocks = _count(weights, r"mlp\.(\d+)\."), _count(weights, r"mlp\.0\.(\d+)\.")
    layers = _count(weights, r"layers\.(\d+)\.")
    return Gumiho(parts, shape, layers, mlps, blocks, "fc.bias" in weights), weights


def _medusa(weights: Weights, config: dict[str, Any], parts: TargetParts, path: Path) -> tuple[Head, Weights]:
    heads, last = _count(weights, r"(\d+)\."), _count(weights, r"0\.(\d+)\.") - 1
    vocab, hidden = _size(weights, f"0.{last}.weight", path)
    _check("hidden size", hidden, parts.hidden, parts, path)
    _check("vocabulary", vocab, parts.vocab_size, parts, path)
    return Medusa(parts, heads, last, f"0.{last}.bias" in weights), {f"heads.{k}": v for k, v in weights.items()}


def _hydra(weights: Weights, config: dict[str, Any], parts: TargetParts, path: Path) -> tuple[Head, Weights]:
    heads, blocks = _count(weights, r"hydra_mlp\.(\d+)\."), _count(weights, r"hydra_mlp\.0\.(\d+)\.") // 2
    vocab, hidden = _size(weights, "hydra_lm_head.0.1.weight", path)
    _check("hidden size", hidden, parts.hidden, parts, path)
    _check("vocabulary", vocab, parts.vocab_size, parts, path)
    prefix = any(key.startswith("prefix_embeding_layer.") for key in weights)
    own = LayerShape(hidden, parts.heads, parts.kv_heads, parts.head_dim, parts.intermediate, parts.eps, hidden)
    shape = _shape(weights, "prefix_embeding_layer.layers.0.", config, parts, path) if prefix else own
    return Hydra(parts, shape, heads, blocks, prefix), {_hydra_ours(k): v for k, v in weights.items()}


def _eagle3(weights: Weights, config: dict[str, Any], parts: TargetParts, path: Path) -> tuple[Head, Weights]:
    for flag in UNKNOWN_FLAGS:
        if config.get(flag):
            raise ForetokenError(f"{path} was made with {flag}, a form of EAGLE-3 that is not read here.")
    weights = {re.sub(r"^layers\.0\.", "midlayer.", key): value for key, value in weights.items()}
    shape = _shape(weights, "midlayer.", config, parts, path)
    layers = tuple(config.get("eagle_aux_hidden_state_layer_ids") or ())
    if not all(FINAL <= layer < parts.layers for layer in layers):
        raise ForetokenError(f"{path} reads the target's layers {layers}, and {parts.name} has {parts.layers}.")
    width = _size(weights, "fc.weight", path)[1]
    _check("hidden size", width // (len(layers) or 3), parts.hidden, parts, path)
    vocab = _size(weights, "lm_head.weight", path)[0]
    whole = "d2t" not in weights
    if whole:
        _check("vocabulary", vocab, parts.vocab_size, parts, path)
    else:
        _check("vocabulary", _size(weights, "t2d", path)[0], parts.vocab_size, parts, path)
    flags = bool(config.get("norm_before_residual")), bool(config.get("norm_output"))
    return Eagle3(parts, shape, None if whole else vocab, layers, *flags), weights


def _hydra_published(key: str) -> str:
    key = re.sub(r"^mlps\.(\d+)\.(\d+)\.", lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}.", key)
    key = re.sub(r"^lm_heads\.(\d+)\.", r"hydra_lm_head.\1.1.", key)
    key = re.sub(r"^prefix\.", "prefix_embeding_layer.layers.0.", key)
    return re.sub(r"^prefix_norm\.", "prefix_embeding_layer.norm.", key)


def _hydra_ours(key: str) -> str:
    key = re.sub(r"^hydra_mlp\.(\d+)\.(\d+)\.", lambda m: f"mlps.{m[1]}.{(int(m[2]) - 1) // 2}.", key)
    key = re.sub(r"^hydra_lm_head\.(\d+)\.1\.", r"lm_heads.\1.", key)
    key = re.sub(r"^prefix_embeding_layer\.layers\.0\.", "prefix.", key)
    return re.sub(r"^prefix_embeding_layer\.norm\.", "prefix_norm.", key)


Reader = Callable[[Weights, dict[str, Any], TargetParts, Path], tuple[Head, Weights]]
READERS: dict[str, Reader] = {
    "eagle": _eagle, "gumiho": _gumiho, "medusa": _medusa, "hydra": _hydra, "eagle3": _eagle3,
}  # fmt: skip


def published(kind: str, key: str) -> str:
    """The published name of a head's weight that is ours by `key`."""
    if kind == "hydra":
        return _hydra_published(key)
    return key.removeprefix("heads.") if kind == "medusa" else key
