"""Draft heads from folders, as published or as we save them (layout.py)."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.heads.layout import READERS, Weights, kind_of, published
from foretoken.heads.make import Head
from foretoken.heads.origin import check_origin
from foretoken.heads.serial import Eagle3
from foretoken.models.named import check_head_folder, head_file
from foretoken.models.parts import TargetParts

BORROWED = ("embed_tokens.weight", "prefix_embeding_layer.embed_tokens.weight")  # copies of the target's embedding


def head_kind(folder: str | Path) -> str | None:
    """The kind of head in a folder, None where there is none (a language model, say)."""
    path = head_file(folder)
    if path is None:
        return None
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            return kind_of(file.keys())
    return kind_of(_read(path))


def load_head(folder: str | Path, parts: TargetParts) -> Head:
    """The head in `folder` for a target, frozen, in the target's dtype.

    Raises ForetokenError naming missing and unexpected keys, the size that does not fit the target, or the other target
    that it was trained for.
    """
    head, config = _loaded(folder, parts)
    check_origin(config, parts, folder)
    return head.to(dtype=parts.dtype)


def load_to_train(folder: str | Path, parts: TargetParts) -> Head:
    """The head in `folder` in float32, whatever target of these sizes it was trained for. Raises ForetokenError."""
    return _loaded(folder, parts)[0].float()


def _loaded(folder: str | Path, parts: TargetParts) -> tuple[Head, dict[str, Any]]:
    check_head_folder(folder)
    path = head_file(folder)
    assert path is not None
    weights, config = _read(path), _config(Path(folder))
    kind = kind_of(weights)
    if kind is None:
        raise ForetokenError(
            f"{path} is no draft head: its keys, such as {next(iter(weights), 'none')}, are those of no layout known."
        )
    weights = {key: value for key, value in weights.items() if key not in BORROWED}
    head, renamed = READERS[kind](weights, config, parts, path)
    head.feature_scale = float(config.get("feature_scale", 1.0))
    _fill(head, renamed, path)
    return head.to(device=parts.device).requires_grad_(False).eval(), config


def _read(path: Path) -> Weights:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # weight files fail in as many ways as there are formats
        raise ForetokenError(f"Cannot read {path} as weights ({type(error).__name__}): download it again.") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ForetokenError(f"{path} holds no table of tensors by name, so that it is no draft head.")
    return loaded


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ForetokenError(f"{path} is not JSON: remove it or put the head's own one there.") from error
    if not isinstance(config, dict):
        raise ForetokenError(f"{path} is no JSON object: remove it or put the head's own one there.")
    _check(config, path)
    inner = config.get("transformer_layer_config", {})
    _check(inner, path)
    return {**config, **inner}


def _check(config: dict[str, Any], path: Path) -> None:
    for key, (good, wanted) in WANTED.items():
        if key in config and not good(config[key]):
            raise ForetokenError(f"In {path}, {key} must be {wanted}, not {json.dumps(config[key]):.40}: mend it.")


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _layers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)


def _or_null(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or good(value)


# What is read of config.json, and in words; null stands for the default where published heads write it.
WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "transformer_layer_config": (lambda value: isinstance(value, dict), "an object"),
    "feature_scale": (_positive, "a number above 0"),
    "rms_norm_eps": (_or_null(_positive), "a number above 0"),
    **dict.fromkeys(("head_dim", "num_attention_heads"), (_or_null(_whole), "a whole number above 0")),
    "eagle_aux_hidden_state_layer_ids": (_or_null(_layers), "a list of layers' numbers"),
    **dict.fromkeys(
        ("norm_before_residual", "norm_output"), (_or_null(lambda value: isinstance(value, bool)), "true or false")
    ),
}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ForetokenError(f"Cannot read {path} as weights ({error}): download it again.") from error


def _fill(head: Head, weights: Weights, path: Path) -> None:
    """Every weight of the head from the file, and nothing left over."""
    own = head.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unexpected:
        parts = []
        for what, keys in (("lacks", missing), ("has the unexpected", unexpected)):
            if keys:
                parts.append(f"{what} {', '.join(published(head.kind, key) for key in keys[:8])}")
        raise ForetokenError(f"{path} {' and '.join(parts)}: it is no whole {head.kind} head.")
    for key, value in weights.items():
        if own[key].shape != value.shape:
            raise ForetokenError(
                f"In {path}, {published(head.kind, key)} has shape {tuple(value.shape)}, not {tuple(own[key].shape)}."
            )
    head.load_state_dict(weights)
    if isinstance(head, Eagle3) and head.d2t is not None:
        ids = torch.arange(len(head.d2t)) + head.d2t
        if int(ids.min()) < 0 or int(ids.max()) >= head.target.vocab_size or len(ids.unique()) != len(ids):
            raise ForetokenError(f"{path} maps draft tokens by d2t to ids that the target lacks, or two to one.")
