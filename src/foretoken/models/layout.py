"""Find out what a model keeps per token and how far it sees; refuse models that cannot score token trees in slots."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.models.cache import Plane
from foretoken.models.hf_model import HFModel
from foretoken.models.panels import PanelLinear
from foretoken.models.probe import LENGTH, first_forward, probe_tokens

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_MASK = "create_sliding_window_causal_mask"  # what transformers' code masks windows by


@dataclass(frozen=True)
class Layout:
    """What a model's slot cache and masks depend on.

    planes: the shapes of (keys, values) of every layer, None for a layer that keeps nothing.
    windows: per type of layer how many positions a token sees there, its own included; None: all.
    context: the number of positions that the model was made for, None if unknown.
    hard: whether positions from number `context` on must not be used.
    probe: transformers' own logits after the first four tokens of the probe (probe.py) [v].
    """

    planes: tuple[tuple[Plane, Plane] | None, ...]
    windows: Mapping[str, int | None]
    context: int | None
    hard: bool
    probe: Float[Tensor, " v"]


def layout(model: HFModel) -> Layout:
    """Return the layout of `model`, by its configuration and by one forward of a few tokens.

    Raises ForetokenError, which names the reason, for a model that cannot be used.
    """
    kind = type(model).__name__
    config: Any = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ForetokenError(f"{kind} is an encoder-decoder model: only decoder-only models can be used.")
    if getattr(config, "num_hidden_layers", 1) < 1:
        raise ForetokenError(f"{kind} has no layers: set num_hidden_layers in its config.json to at least 1.")
    if model.training:
        raise ForetokenError(f"{kind} is in training mode, where dropout changes its scores: call model.eval() first.")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ForetokenError(f"{kind} uses attention {attention!r}, which takes no tree mask: load it with 'sdpa'.")
    windows = _windows(model, config)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ForetokenError(f"{kind} takes no position_ids, so that the nodes of a tree cannot be placed in it.")
    if getattr(config, "alibi", False):
        raise ForetokenError(f"{kind} uses ALiBi, whose bias cannot follow a tree: use a model with position ids.")
    text = probe_tokens(model)[:LENGTH]
    own = not any(isinstance(module, PanelLinear) for module in model.modules())
    with torch.inference_mode(), first_forward(model, own):
        out: Any = model(input_ids=torch.tensor([text], device=model.device), use_cache=True)
    if getattr(getattr(out, "logits", None), "ndim", 0) != 3:
        raise ForetokenError(f"{kind} gives no logits per token: load the model by AutoModelForCausalLM.")
    cache = getattr(out, "past_key_values", None)
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ForetokenError(f"{kind} returned {type(cache).__name__} instead of a key-value cache: it cannot be kept.")
    planes = tuple(planes_kept(layer, kind) for layer in cache.layers)
    context, hard = _context(model, config)
    return Layout(planes, windows, context, hard, out.logits[0, -1].clone())


def _windows(model: HFModel, config: Any) -> dict[str, int | None]:
    """Return `Layout.windows`. Raises ForetokenError for layers that no token tree can be scored with."""
    kind = type(model).__name__
    window = getattr(config, "sliding_window", None)
    named = set(getattr(config, "layer_types", None) or ()) - {"moe", "mlp"}
    types = named or {FULL if window is None else SLIDING}
    others = sorted(types - {FULL, SLIDING})
    if getattr(model, "_is_stateful", False) and (others or not named):  # some sizes of Granite 4 have attention alone
        raise ForetokenError(f"{kind} keeps a recurrent state that cannot be rolled back: use a pure attention model.")
    if others:
        raise ForetokenError(
            f"{kind} has {others[0]} layers, which cannot follow a token tree: use a model whose layers all have full "
            "or sliding attention."
        )
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4 counts slots, not positions
        raise ForetokenError(f"{kind} scales attention by the number of slots, which cannot follow a tree.")
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo counts slots, not positions
        raise ForetokenError(f"{kind} has local attention layers, whose window cannot follow a tree.")
    if not _masks_by_windows(model):
        return {FULL: None}
    return {name: window if name == SLIDING else None for name in sorted(types)}


def _masks_by_windows(model: HFModel) -> bool:
    """Whether a `sliding_window` in the configuration of `model` counts: whether its code masks by it.

    transformers' code does where it has `WINDOW_MASK`. Other models of it see all of a text that is read at once, and
    only their caches drop what is out of sight. Code that is not transformers' may mask in ways of its own.
    """
    from transformers import PreTrainedModel  # the model's class has imported it

    inner = [type(part) for part in model.modules() if isinstance(part, PreTrainedModel) and part.base_model is part]
    codes = [inspect.unwrap(kind.forward).__globals__ for kind in inner]
    return any(WINDOW_MASK in code or not code["__name__"].startswith("transformers.") for code in codes)


def planes_kept(layer: object, kind: str) -> tuple[Plane, Plane] | None:
    """Return the shapes of the keys and values that one layer keeps, None if it keeps none.

    layer: the layer of a transformers cache, after a forward of at most LENGTH tokens of the model `kind`.

    Raises ForetokenError for a state that is not one key and one value per token.
    """
    name = type(layer).__name__
    if type(layer) is DummyLayer:
        return None
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ForetokenError(f"{kind} keeps its state in {name}, which is not one key and value per token.")
    assert isinstance(layer, DynamicLayer)
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.numel() == 0:
        return None
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[2] > LENGTH or values.shape[2] != keys.shape[2]:
        raise ForetokenError(f"{kind} keeps keys of shape {tuple(keys.shape)} instead of [b, heads, tokens, dim].")
    return _plane(keys), _plane(values)


def _plane(states: Tensor) -> Plane:
    return Plane(states.shape[1], states.shape[3], states.dtype, states.device)


def _context(model: HFModel, config: Any) -> tuple[int | None, bool]:
    """Return `Layout.context` and `Layout.hard`."""
    context = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = parameters.get("rope_type")
        if kind in ("longrope", "dynamic"):
            # In a longer text such models rotate by other frequencies, and the keys already kept would be wrong.
            return (parameters.get("original_max_position_embeddings") if kind == "longrope" else context), True
    on_the_fly = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    return context, context is not None and not on_the_fly
