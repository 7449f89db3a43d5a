"""A bigger model with the same function, so that a benchmark sees real acceptance at the cost of a larger target.

Two changes, both of which leave every logit as it was:

1. Blocks are added whose o_proj and down_proj are zero: they add exactly 0 to the residual stream. Their other weights
   are random, so that they cost what a real block costs.
2. The hidden size d is widened to D = 4**a * d. The residual stream becomes x' = (x, 0): the embedding, o_proj and
   down_proj write zeros into the new coordinates. Then RMSNorm sees

       mean(x'^2) + eps' = mean(x^2) / 4**a + eps / 4**a          with eps' = eps / 4**a
       x' / sqrt(mean(x'^2) + eps') = 2**a * (x, 0) / sqrt(mean(x^2) + eps)

   and with the norm's weight divided by 2**a its output is (RMSNorm(x), 0). All factors are powers of two, so nothing
   is rounded by them, in bfloat16 either. The input columns of the new coordinates meet zeros and may be random. New
   heads (whole key/value groups, with the old query-to-key ratio and head size) and new MLP channels compute on random
   weights and meet zero columns of o_proj and down_proj.

Logits differ from the original's by the order of float summation only.
"""

import copy
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foretoken.build import load, with_recipe
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder
from foretoken.core.limits import check_choice, check_seed
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.pair import LABEL, Pair, as_loaded
from foretoken.models.causal_lm import CausalLM
from foretoken.models.load import choose_device, choose_dtype, load_model, load_tokenizer
from foretoken.models.named import AS_STORED
from foretoken.models.panels import pack
from foretoken.models.target import LMTarget

SIZES = {"100m": 100_000_000, "300m": 300_000_000, "1b": 1_000_000_000}  # parameters of an expanded target


def known_size(name: str | None) -> str | None:
    """The name itself. Raises ForetokenError for a size that is none of SIZES."""
    check_choice("expansion", name, SIZES)
    return name


Expand = Annotated[
    str | None,
    typer.Option(
        help="Give the target the cost of a model of 100m, 300m or 1b parameters, at the same function.",
        callback=known_size,
    ),
]
MULTIPLE = 64  # widened MLPs have a multiple of this many channels
TOLERANCE = 0.1  # of the size asked for
ZERO = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")  # what writes into the residual stream


@dataclass(frozen=True)
class Shape:
    """power: a in hidden size = 4**a * d. num_params counts tied embeddings once."""

    power: int
    hidden: int
    layers: int
    kv_heads: int
    heads: int
    intermediate: int
    num_params: int


def expand(model: PreTrainedModel, params: int, seed: int = 0) -> PreTrainedModel:
    """A model of about `params` parameters (within 10%) whose logits equal `model`'s, by the construction above.

    Same dtype, device, vocabulary, context and head size; tied embeddings stay tied. The same seed gives the same
    weights. Raises ForetokenError for models other than Llama and for sizes that cannot be reached.
    """
    if type(model) is not LlamaForCausalLM:
        raise ForetokenError(f"{type(model).__name__} cannot be expanded: only LlamaForCausalLM can.")
    shape = choose_shape(model.config, params)
    config = copy.deepcopy(model.config)
    config.hidden_size = shape.hidden
    config.num_hidden_layers = shape.layers
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
    config.head_dim = _head_dim(model.config)
    config.intermediate_size = shape.intermediate
    config.rms_norm_eps = model.config.rms_norm_eps / 4**shape.power
    with torch.device("meta"):  # the weights come below; initialising them here would cost as much again
        big = type(model)(config)
    old = model.state_dict()
    sources = _sources(model.config.num_hidden_layers, shape.layers)
    rng = torch.Generator().manual_seed(seed)
    new: dict[str, Tensor] = {}
    for name, like in big.state_dict().items():
        original = _original_name(name, sources)
        source = None if original is None else old[original]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            new[name] = new["model.embed_tokens.weight"]
        else:
            new[name] = _widened(name, like.shape, source, shape.power, model.dtype, rng).to(model.device)
    big.load_state_dict(new, assign=True)
    big.tie_weights()
    for name, buffer in model.named_buffers():  # rotary frequencies: same head size, same frequencies
        owner, _, leaf = name.rpartition(".")
        big.get_submodule(owner)._buffers[leaf] = buffer.clone()
    big.generation_config = copy.deepcopy(model.generation_config)
    return big.requires_grad_(False).train(model.training)


def choose_shape(config: LlamaConfig, params: int) -> Shape:
    """Choose of all shapes within 10% of `params` the one nearest to common proportions: an MLP of 8/3 of the hidden
    size, heads together as wide as the hidden size, 64 hidden units per layer."""
    small = config.num_hidden_layers, _kv_heads(config), config.intermediate_size
    own = _shape(config, 0, *small)
    if params < own.num_params * (1 - TOLERANCE):
        raise ForetokenError(f"The target has {own.num_params} parameters already: it cannot be expanded to {params}.")
    best, least = None, math.inf
    power = 0
    while _shape(config, power, *small).num_params <= params * (1 + TOLERANCE):
        narrow = _shape(config, power, *small)
        group = narrow.heads // narrow.kv_heads * _head_dim(config)  # query columns of one key/value head
        for kv_heads in range(narrow.kv_heads, max(narrow.kv_heads, 2 * narrow.hidden // group) + 1):
            if narrow.hidden % (kv_heads * (narrow.heads // narrow.kv_heads)):
                continue  # transformers reads no such config
            for layers in range(narrow.layers, 2 * max(narrow.layers, narrow.hidden // MULTIPLE) + 64):
                bare = _shape(config, power, layers, kv_heads, 0).num_params
                if bare > params:
                    break
                channels = (params - bare) / (3 * narrow.hidden * layers)
                intermediate = max(config.intermediate_size, round(channels / MULTIPLE) * MULTIPLE)
                shape = _shape(config, power, layers, kv_heads, intermediate)
                if abs(shape.num_params / params - 1) <= TOLERANCE and (cost := _strangeness(shape, group)) < least:
                    best, least = shape, cost
        power += 1
    if best is None:
        raise ForetokenError(f"No shape of about {params} parameters has the target's function: choose another size.")
    return best


def _strangeness(shape: Shape, group: int) -> float:
    """Squared logarithms of the three proportions over their common values."""
    ratios = (
        shape.intermediate / (8 / 3 * shape.hidden),
        shape.kv_heads * group / shape.hidden,
        shape.hidden / (MULTIPLE * shape.layers),
    )
    return sum(math.log(r) ** 2 for r in ratios)


def _shape(config: LlamaConfig, power: int, layers: int, kv_heads: int, intermediate: int) -> Shape:
    d = config.hidden_size * 4**power
    heads = kv_heads * (config.num_attention_heads // _kv_heads(config))
    head_dim = _head_dim(config)
    block = 2 * d * head_dim * (heads + kv_heads) + 3 * d * intermediate + 2 * d
    if config.attention_bias:
        block += head_dim * (heads + 2 * kv_heads) + d
    if config.mlp_bias:
        block += 2 * intermediate + d
    embeddings = config.vocab_size * d * (1 if config.tie_word_embeddings else 2)
    return Shape(power, d, layers, kv_heads, heads, intermediate, embeddings + layers * block + d)


def _kv_heads(config: LlamaConfig) -> int:
    return config.num_key_value_heads or config.num_attention_heads


def _head_dim(config: LlamaConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _sources(old: int, new: int) -> dict[int, int]:
    """{layer of the big model: the original layer it carries}, spread evenly from layer 0."""
    return {i * new // old: i for i in range(old)}


def _original_name(name: str, sources: dict[int, int]) -> str | None:
    """The original parameter behind one of the big model, None in an added block."""
    parts = name.split(".")
    if "layers" not in parts:
        return name
    at = parts.index("layers") + 1
    source = sources.get(int(parts[at]))
    return None if source is None else ".".join([*parts[:at], str(source), *parts[at + 1 :]])


def _widened(
    name: str, size: torch.Size, source: Tensor | None, power: int, dtype: torch.dtype, rng: torch.Generator
) -> Tensor:
    """A parameter of the given size with `source`, if any, in its first rows and columns."""
    if name.endswith("norm.weight"):
        new = torch.full(size, 0.5**power, dtype=dtype)
        return new if source is None else _placed(new, source.cpu() * 0.5**power)
    if name.endswith("bias") or name.endswith(ZERO):
        new = torch.zeros(size, dtype=dtype)
    else:
        # bfloat16 values, as in nearly every published model: panels.py stores those in half the space.
        new = torch.empty(size).uniform_(-0.03, 0.03, generator=rng).bfloat16().to(dtype)
    return new if source is None else _placed(new, source)


def _placed(new: Tensor, source: Tensor) -> Tensor:
    new[tuple(slice(n) for n in source.shape)] = source
    return new


def with_cost_ratio(engine: Engine, drafter: str, ratio: float, seed: int = 0) -> Engine:
    """The engine with its drafter, loaded from `drafter`, at the cost of this share of the target's parameters."""
    if not isinstance(engine.drafter, LMDrafter) or not isinstance(engine.drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {drafter} is no language model whose cost could be changed: drop --cost-ratio.")
    if not 0 < ratio < float("inf"):
        raise ForetokenError(f"cost-ratio is {ratio}: it must be a finite number > 0.")
    with torch.device("meta"):  # the target's own weights may be packed
        params = AutoModelForCausalLM.from_config(engine.target.lm.model.config).num_parameters()
    model = expand(as_loaded(drafter, engine.drafter.lm), int(ratio * params), seed)
    pack(model)
    lm = CausalLM(model, f"{engine.drafter.name} (cost {ratio:g} of the target's)")
    return with_recipe(replace(engine, source=replace(engine.source, lm=lm)), engine.recipe)


def _in_place_of_target(engine: Engine, model: PreTrainedModel, label: str) -> Engine:
    pack(model)
    return replace(engine, target=LMTarget(CausalLM(model, f"{engine.target.name} ({label})")))


def expanded_pair(pair: Pair, expansion: str, seed: int) -> Pair:
    """The pair with both copies of its target at the cost of "100m", "300m" or "1b" parameters."""
    theirs = expand(pair.target, SIZES[expansion], seed)
    label = label_of(expansion)
    engine = _in_place_of_target(pair.engine, copy.deepcopy(theirs), label)
    return replace(pair, engine=engine, target=theirs, label=label, num_params=theirs.num_parameters())


def label_of(expansion: str) -> str:
    return f"expanded {expansion}: real acceptance, synthetic cost"


def load_expanded(
    target: str | None, drafter: str | None, expansion: str | None, seed: int, device: str | None, dtype: str | None,
    cost_ratio: float | None = None,
) -> Engine:  # fmt: skip
    """The engine of two folders. expansion: of the target; cost_ratio: of the drafter, by parameters."""
    options.quiet()
    size = None if expansion is None else SIZES[expansion]
    target, drafter = options.resolve_models(target, drafter)
    engine = load(target, drafter=drafter, device=device, dtype=dtype, quantise_drafter=AS_STORED)
    options.spare_threads(size or engine.target.lm.model.num_parameters())
    if expansion is not None:
        model = expand(as_loaded(target, engine.target.lm), SIZES[expansion], seed)
        engine = _in_place_of_target(engine, model, f"expanded {expansion}")
    return engine if cost_ratio is None else with_cost_ratio(engine, drafter, cost_ratio, seed)


def command(
    out: str,
    /,
    *,
    size: Annotated[str, typer.Option(help="100m, 300m or 1b parameters.", callback=known_size)] = "100m",
    target: str | None = None,
    seed: int = 0,
    dtype: str | None = None,
) -> None:
    """Write a model with the target's function at the cost of a larger one, for --target of any command.

    `foretoken bench --target OUT --drafter models/drafter` then shows real acceptance at a synthetic cost, and says so.

    out: Folder for the expanded model; made if it is not there.
    seed: Seed of the added weights.
    """
    check_seed(seed)
    options.check_models(target, None, dtype=dtype)
    check_folder(Path(out))
    options.quiet()
    source, _ = options.resolve_models(target, None)
    like = load_model(source, choose_device("cpu"), choose_dtype(dtype))
    model = expand(as_loaded(source, like), SIZES[size], seed)
    setattr(model.config, LABEL, label_of(size))
    model.save_pretrained(out)
    load_tokenizer(source).save_pretrained(out)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters written to {out}", file=sys.stderr)
