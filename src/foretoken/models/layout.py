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
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.models.cache import Plane
from foretoken.models.hf_model import CACHE_NAMES, HFModel
from foretoken.models.panels import PanelLinear
from foretoken.models.probe import LENGTH, first_forward, probe_tokens

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_MASK = "create_sliding_window_causal_mask"  # what transformers' code masks windows by
# What transformers names types of layers that keep recurrent states; in those of a name with "hybrid" beside attention.
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


@dataclass(frozen=True)
class State:
    """The shape of one recurrent state of one layer.

    layer: the index of the layer.
    kind: "conv" for the latest inputs of a convolution, else "recurrent".
    index: of the state among those of its kind in the layer.
    shape: without the batch.
    dtype, device: of the tensor.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """What a model's slot cache and masks depend on.

    planes: the shapes of (keys, values) of every layer, None for a layer that keeps nothing.
    windows: per type of layer how many positions a token sees there, its own included; None: all.
    context: the number of positions that the model was made for, None if unknown.
    hard: whether positions from number `context` on must not be used.
    probe: transformers' own logits after the first four tokens of the probe (probe.py) [v].
    states: the shapes of the recurrent states of all layers.
    """

    planes: tuple[tuple[Plane, Plane] | None, ...]
    windows: Mapping[str, int | None]
    context: int | None
    hard: bool
    probe: Float[Tensor, " v"]
    states: tuple[State, ...] = ()


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
    cache = next((found for name in CACHE_NAMES if (found := getattr(out, name, None)) is not None), None)
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ForetokenError(f"{kind} returned {type(cache).__name__} instead of a key-value cache: it cannot be kept.")
    planes = tuple(planes_kept(layer, kind) for layer in cache.layers)
    context, hard = _context(model, config)
    states = tuple(state for i, layer in enumerate(cache.layers) for state in states_kept(layer, i))
    return Layout(planes, windows, context, hard, out.logits[0, -1].clone(), states)


def _windows(model: HFModel, config: Any) -> dict[str, int | None]:
    """Return `Layout.windows`. Raises ForetokenError for layers that no token tree can be scored with."""
    kind = type(model).__name__
    window = getattr(config, "sliding_window", None)
    named = set(getattr(config, "layer_types", None) or ()) - {"moe", "mlp"}
    types = named or {FULL if window is None else SLIDING}
    others = sorted(types - {FULL, SLIDING, *RECURRENT})
    if others:
        raise ForetokenError(
            f"{kind} has {others[0]} layers, which cannot follow a token tree: use a model whose layers have full or "
            "sliding attention, or keep recurrent states."
        )
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4 counts slots, not positions
        raise ForetokenError(f"{kind} scales attention by the number of slots, which cannot follow a tree.")
    if getattr(config, "rel_extent", None):  # Inkling counts slots, not positions
        raise ForetokenError(f"{kind} has attention by the distance of slots, which cannot follow a tree.")
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo counts slots, not positions
        raise ForetokenError(f"{kind} has local attention layers, whose window cannot follow a tree.")
    if not _masks_by_windows(model):
        return {FULL: None}
    attending = types - {"linear_attention", "conv"} or {FULL}
    return {name: window if name in (SLIDING, "hybrid_sliding") else None for name in sorted(attending)}


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

    Raises ForetokenError for a state that is neither one key and one value per token nor a recurrent one.
    """
    name = type(layer).__name__
    if type(layer) in (DummyLayer, LinearAttentionLayer):
        return None
    if type(layer) not in (*ATTENTION, *BOTH):
        raise ForetokenError(f"{kind} keeps its state in {name}, which is not known.")
    assert isinstance(layer, DynamicLayer)
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.numel() == 0:
        return None
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[2] > LENGTH or values.shape[2] != keys.shape[2]:
        raise ForetokenError(f"{kind} keeps keys of shape {tuple(keys.shape)} instead of [b, heads, tokens, dim].")
    return _plane(keys), _plane(values)


def states_kept(layer: object, i: int) -> list[State]:
    """Return the shapes of the recurrent states of a layer of a transformers cache; i: the index of the layer."""
    if type(layer) not in (LinearAttentionLayer, *BOTH):
        return []
    assert isinstance(layer, LinearAttentionLayer)
    found = [("conv", layer.conv_states), ("recurrent", layer.recurrent_states)]
    return [
        State(i, kind, index, tuple(state.shape[1:]), state.dtype, state.device)
        for kind, states in found
        for index, state in states.items()
        if state is not None
    ]


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
