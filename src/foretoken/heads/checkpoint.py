"""Draft heads are read from folders and written to folders, in their published layouts.

| head   | file                                       | keys                                                          |
|--------|--------------------------------------------|---------------------------------------------------------------|
| eagle  | model.safetensors or pytorch_model.bin     | fc, layers.i.(self_attn, mlp, ...layernorm)                   |
| gumiho | the same                                   | the same, mlp.j.b.linear                                      |
| eagle3 | the same                                   | fc, midlayer (speculators: layers.0), norm, lm_head, d2t, t2d |
| medusa | medusa_lm_head.pt or .safetensors          | i.j.linear, i.m.weight                                        |
| dflash | model.safetensors or pytorch_model.bin     | fc, hidden_norm, layers.i.(self_attn, mlp, ...), norm         |
| jetflow | the same                                  | the same                                                      |
| hydra  | hydra_lm_head.pt or .safetensors           | hydra_mlp.i.j, hydra_lm_head.i.1, prefix_embeding_layer       |

heads/layouts.py translates other names of the keys to these. Sizes are read off the tensors. config.json tells what
tensors do not show: widths of attention heads, rotary positions, EAGLE-3's flags and layers, what Gumiho's MLPs read.
It may also have "feature_scale", and "target", the target that a head was trained for.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.heads import HEADS
from foretoken.heads.head import PublishedHead
from foretoken.heads.layouts import EMBEDDING, by_authors_names, one_weight, other_head
from foretoken.models.named import check_head_folder, head_file
from foretoken.models.panels import PackedEmbedding
from foretoken.models.parts import LayerShape, TargetParts
from foretoken.models.rotary import Rotary, configured, llama_config

LAYERS = "eagle_aux_hidden_state_layer_ids"  # config.json's name for the layers whose states EAGLE-3 reads
UNUSED = ("prefix_embeding_layer.embed_tokens.weight",)  # Hydra's prefix layer reads states, no embeddings
# Objects in config.json that describe the head (of speculators; NVIDIA; DFlash)
INNER = ("transformer_layer_config", "eagle_config", "dflash_config")
SILU = ("silu", "swish")  # two names of one activation
ROWS = 8192  # rows of an embedding that are compared at once
ROUNDED = 2.0**-7  # relative difference up to which values are equal; two roundings of one to 16 bits differ by less
SAMPLES = 32  # number of values of the target's embedding that config.json keeps, by which the target is recognised
CLOSE = 0.02  # by how much these may differ, as a share of the largest; rounding to 16 bits moves a value by < 0.004


class UnknownTargetWarning(UserWarning):
    """A warning that a head's files do not name the target it was trained for; with another one it drafts badly."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a published head's files, and the target that the head is wanted for.

    path: the file of the weights, for messages.
    weights: the weights by their published names.
    config: the entries of config.json, inner objects merged into it.
    parts: what the head borrows of its target.
    """

    path: Path
    weights: dict[str, Tensor]
    config: dict[str, Any]
    parts: TargetParts

    def count(self, pattern: str) -> int:
        """Return one more than the largest index that is found at the beginning of a key; 0 if none is found.

        pattern: a regular expression, whose first group matches the index.

        Raises ForetokenError for an index that is larger than the number of weights.
        """
        found = {int(match[1]): key for key in self.weights if (match := re.match(pattern, key))}
        most = max(found, default=-1)
        if most >= len(self.weights):
            raise ForetokenError(
                f"{self.path} has {found[most]}, though it has {len(self.weights)} weights in all: download it again."
            )
        return most + 1

    def size(self, key: str, dims: int = 2) -> tuple[int, ...]:
        """Return the shape of a weight.

        key: its name.
        dims: the number of dimensions that it must have.

        Raises ForetokenError where it is missing, or has another number of dimensions.
        """
        if key not in self.weights:
            raise ForetokenError(f"{self.path} lacks {key}: it is not a whole head, get it again.")
        shape = tuple(self.weights[key].shape)
        if len(shape) != dims:
            raise ForetokenError(f"In {self.path}, {key} has shape {shape} instead of {dims} dimensions: take another.")
        return shape

    def check(self, what: str, found: int, wanted: int) -> None:
        """Raise ForetokenError where a size is not the target's.

        what: name of the size, for the message.
        found, wanted: the size in the checkpoint, and that of the target.
        """
        if found != wanted:
            raise ForetokenError(
                f"{self.path} is for a target with {what} {found}, and {self.parts.name} has {wanted}."
            )

    def layer_shape(self, prefix: str) -> LayerShape:
        """Return the sizes of a decoder layer, by the shapes of its weights and, for attention heads, config.json.

        prefix: what the layer's keys begin with, its dot included.

        Raises ForetokenError where a weight is missing, the width of attention heads does not divide its channels, or
        the activation is not SiLU.
        """
        config, parts, llama = self.config, self.parts, self.llama()
        if config.get("hidden_act") not in (None, *SILU):
            raise ForetokenError(
                f"{self.path} has hidden_act {config['hidden_act']} in its config.json, and only silu is read: take "
                "another head."
            )
        queries, width = self.size(f"{prefix}self_attn.q_proj.weight")
        keys, _ = self.size(f"{prefix}self_attn.k_proj.weight")
        inner, hidden = self.size(f"{prefix}mlp.gate_proj.weight")
        dim, heads = config.get("head_dim"), config.get("num_attention_heads")
        if llama is not None:
            heads = heads or llama.num_attention_heads
        dim = dim or (queries // heads if heads else parts.shape.head_dim)
        if not dim or queries % dim or keys % dim:
            raise ForetokenError(
                f"{self.path} has attention heads of width {dim}, which does not divide its {queries} and {keys} "
                "channels."
            )
        eps = float(config.get("rms_norm_eps") or (parts.shape.eps if llama is None else llama.rms_norm_eps))
        bias = f"{prefix}self_attn.q_proj.bias" in self.weights
        return LayerShape(hidden, queries // dim, keys // dim, dim, inner, eps, width, bias)

    def llama(self) -> Any:
        """Return config.json's entries on norms and positions as transformers reads them, see `llama_config`."""
        return llama_config(self.config, f"{self.path.parent}/config.json")

    def rotary(self, dim: int) -> Rotary:
        """Return the rotary positions of config.json; the target's where transformers did not write that file.

        dim: width of the head's attention heads.

        Raises ForetokenError where the positions are for another width or of a kind that is not supported.
        """
        llama = self.llama()
        if llama is None:
            return self.targets_rotary(dim)
        return configured(llama, dim, f"{self.path.parent}/config.json", self.parts.device)

    def targets_rotary(self, dim: int) -> Rotary:
        """Return the target's rotary positions.

        dim: width of the head's attention heads. Raises ForetokenError where the target's have another width.
        """
        found = self.parts.rotary
        if found.dim != dim:
            raise ForetokenError(
                f"{self.path} has attention heads of width {dim}, and {self.parts.name} rotates {found.dim}."
            )
        return found


def head_kind(folder: str | Path) -> str | None:
    """Return the kind of the draft head in a folder, None where the folder holds none (but a language model, say).

    For JetFlow's heads, which have the weights of DFlash's, it is "dflash".

    folder: path of the folder. Raises ForetokenError where the file of the weights cannot be read.
    """
    path = head_file(folder)
    if path is None:
        return None
    if path.suffix != ".safetensors":
        return _kind_of(_read(path))
    try:
        with safe_open(path, "pt") as file:
            return _kind_of(by_authors_names(file.keys()))
    except (OSError, SafetensorError) as error:
        raise ForetokenError(f"Cannot read {path} as weights ({error}): download it again.") from error


def load_head(folder: str | Path, parts: TargetParts) -> PublishedHead:
    """Read a head, and return it frozen, in the target's dtype and on its device.

    folder: path of the folder that holds the head.
    parts: what the head borrows of its target.

    Raises ForetokenError where files cannot be read, keys are missing or unexpected, or a size does not fit the target,
    or where the head was trained for another target. Warns where it does not name its target.
    """
    head, config = _loaded(folder, parts)
    _check_origin(config, parts, folder)
    return head.to(dtype=parts.dtype)


def load_to_train(folder: str | Path, parts: TargetParts) -> PublishedHead:
    """Read a head, and return it in float32, also one that was trained for another target with these sizes.

    folder, parts: as in `load_head`. Raises ForetokenError as `load_head` does, but not for another target.
    """
    return _loaded(folder, parts)[0].float()


def save_head(head: PublishedHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head in its published layout: the weights as safetensors, and config.json.

    head: the head.
    folder: path of the folder, which is made where it does not exist.
    dtype: that of the weights in the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        key: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for key, value in head.published_weights().items()
    }
    config = {
        "foretoken_head": head.kind,
        "feature_scale": head.feature_scale,
        "vocab_size": head.target.vocab_size,
        "hidden_size": head.target.hidden,
        "target": _origin(head.target),
    }
    content = json.dumps(config | head.config(), indent=2) + "\n"
    write(folder / head.file, lambda path: path.write_bytes(save(weights)))
    write(folder / "config.json", lambda path: path.write_text(content))


def _kind_of(keys: Iterable[str]) -> str | None:
    names = list(keys)
    for kind, head in HEADS.items():
        if all(any(re.match(mark, name) for name in names) for mark in head.marks):
            return kind
    return None


def _loaded(folder: str | Path, parts: TargetParts) -> tuple[PublishedHead, dict[str, Any]]:
    path = check_head_folder(folder)
    weights, config = _read(path), _config(Path(folder))
    kind = _kind_of(weights)
    if kind is None:
        raise ForetokenError(
            f"{path} is no draft head: its keys, such as {next(iter(weights), 'none')}, are those of no layout known."
        )
    other = other_head(weights, HEADS[kind].marks)
    if other is not None:
        raise ForetokenError(f"{path} holds {other}, which is not supported: take one that docs/drafters.md lists.")
    kept = {key: value for key, value in weights.items() if key not in UNUSED and not _is_targets(key, value, parts)}
    head = HEADS[kind].read(Checkpoint(path, kept, config, parts))
    head.feature_scale = float(config.get("feature_scale", 1.0))
    _fill(head, kept, path)
    return head.to(device=parts.device).requires_grad_(False).eval(), config


def _read(path: Path) -> dict[str, Tensor]:
    try:
        stored = path.suffix == ".safetensors"
        loaded = load_file(path) if stored else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # weight files fail in as many ways as there are formats
        raise ForetokenError(f"Cannot read {path} as weights ({type(error).__name__}): download it again.") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ForetokenError(f"{path} holds no table of tensors by name, so that it is no draft head.")
    for one, other in one_weight(loaded):
        if not torch.equal(loaded[one], loaded[other]):
            raise ForetokenError(f"{path} has {one} and {other}, which are one weight, and differ: remove either.")
    return {key: loaded[there] for key, there in by_authors_names(loaded).items()}


def _is_targets(key: str, value: Tensor, parts: TargetParts) -> bool:
    """Whether a weight is a copy of the target's embedding, as in most heads, and not an embedding that was trained."""
    if key != EMBEDDING or tuple(value.shape) != (parts.vocab_size, parts.hidden):
        return False
    ids = torch.arange(parts.vocab_size, device=parts.device)
    return all(
        torch.allclose(own.to(parts.device, torch.float32), parts.embed(some).float(), rtol=ROUNDED, atol=1e-6)
        for own, some in zip(value.split(ROWS), ids.split(ROWS), strict=True)
    )


def _fill(head: PublishedHead, weights: dict[str, Tensor], path: Path) -> None:
    """Load every weight of the head from `weights`. Raises ForetokenError where one is missing, left over or unfit."""
    own = head.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unexpected:
        lists = (("lacks", missing), ("has the unexpected", unexpected))
        parts = [f"{what} {', '.join(keys[:8])}" for what, keys in lists if keys]
        raise ForetokenError(f"{path} {' and '.join(parts)}: it is no whole {head.kind} head.")
    for key, value in weights.items():
        if own[key].shape != value.shape:
            raise ForetokenError(f"In {path}, {key} has shape {tuple(value.shape)}, not {tuple(own[key].shape)}.")
    head.load_state_dict(weights)


def _config(folder: Path) -> dict[str, Any]:
    """Return the entries of config.json, those of the objects in INNER merged into them; {} where there is no file."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ForetokenError(f"{path} is not JSON: remove it or put the head's own one there.") from error
    if not isinstance(config, dict):
        raise ForetokenError(f"{path} is no JSON object: remove it or put the head's own one there.")
    _check_values(config, path)
    for name in INNER:
        inner = config.get(name, {})
        _check_values(inner, path)
        config = {**config, **inner}
    return config


def _check_values(config: dict[str, Any], path: Path) -> None:
    for key, (good, wanted) in WANTED.items():
        if key in config and not good(config[key]):
            raise ForetokenError(f"In {path}, {key} must be {wanted}, not {json.dumps(config[key]):.40}: mend it.")


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _layers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)


def _or_null(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or good(value)


# Per entry of config.json that is read: a check of its value, and in words what it must be. Where published heads write
# null for the default, null passes.
WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(INNER, (_object, "an object")),
    "feature_scale": (_positive, "a number above 0"),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), (_or_null(_positive), "a number above 0")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (_or_null(_object), "an object")),
    **dict.fromkeys(
        ("head_dim", "num_attention_heads", "max_position_embeddings", "block_size"),
        (_or_null(_whole), "a whole number above 0"),
    ),
    **dict.fromkeys((LAYERS, "target_layer_ids"), (_or_null(_layers), "a list of layers' numbers")),
    "mask_token_id": (_or_null(lambda value: type(value) is int and value >= 0), "a token's number"),
    **dict.fromkeys(
        ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "causal_head", "is_causal"),
        (_or_null(lambda value: isinstance(value, bool)), "true or false"),
    ),
}


def _origin(parts: TargetParts) -> dict[str, Any]:
    """Return what distinguishes a target from others of its sizes, whatever dtype it is loaded in."""
    table: Any = parts.embedding
    width = table.embedding_dim
    count = table.num_embeddings * width
    places = torch.arange(0, count, max(1, count // SAMPLES))[:SAMPLES]
    if isinstance(table, PackedEmbedding):
        chosen = table.stored(places // width).gather(1, places[:, None] % width)[:, 0]
    else:
        chosen = table.weight.detach().flatten()[places.to(parts.device)]
    sample = [round(x, 6) for x in chosen.float().tolist()]
    return {"name": Path(parts.name).name, "layers": parts.layers, "embedding": sample}


def _check_origin(config: dict[str, Any], parts: TargetParts, folder: str | Path) -> None:
    """Refuse a head of another target; warn where a head names no target, as heads of other projects do not."""
    named = config.get("target")
    if named is None:
        warnings.warn(
            f"Draft head {folder} does not tell which target it was trained for: if that is not {parts.name}, few of "
            "its drafts will be accepted.",
            UnknownTargetWarning,
            stacklevel=3,
        )
        return
    here = _origin(parts)
    try:
        values, own = np.array(named["embedding"], dtype=float), np.array(here["embedding"])
        same = named["layers"] == here["layers"] and values.shape == own.shape
        same = same and bool(np.abs(values - own).max() <= CLOSE * np.abs(values).max())
        name = str(named["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise ForetokenError(f"{folder}/config.json is damaged, its target cannot be: remove that entry.") from error
    if not same:
        raise ForetokenError(
            f"Draft head {folder} was trained for another target ({name}) than {parts.name}: name that one, or train a "
            "head for this one with foretoken train."
        )
