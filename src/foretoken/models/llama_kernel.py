"""Language models whose whole forward is the kernel's, on a CPU: embedding, layers over packed weights, and LM head.

All but the products with the weights is computed in float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.sampling import inverse
from foretoken.core.shapes import Float
from foretoken.kernel.sizes import COLUMNS, DOTTED, GELU, LANES, QUANTISED, SILU
from foretoken.models.decoder_layer import bias_of, first_attention, named, norm_eps, norm_weight, read_layer
from foretoken.models.experts import PanelMixture
from foretoken.models.features import FINAL, FeatureStore
from foretoken.models.hf_model import HFModel
from foretoken.models.kernel_layers import NO_FLOATS, NO_IDS, KernelLayers, KernelSlots, check_known, table_of
from foretoken.models.layout import FULL
from foretoken.models.named import HEAD_KIND
from foretoken.models.panels import PACKED, PackedEmbedding, PackedLinear, PanelLinear, check_quantised
from foretoken.models.rotary import rotary_of
from foretoken.models.skeleton import Skeleton

# The known classes of transformers, by name, since importing them all takes time.
FAMILY = frozenset((
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
    "GemmaForCausalLM", "Gemma3ForCausalLM", "SmolLM3ForCausalLM", "MinistralForCausalLM", "SeedOssForCausalLM",
    "GraniteForCausalLM", "GraniteMoeHybridForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM",
    "GraniteMoeForCausalLM", "Lfm2ForCausalLM",
))  # fmt: skip
CURVES = {"silu": SILU, "gelu_pytorch_tanh": GELU}
ACTIVATIONS = ("SiLUActivation", "SiLU", "GELUTanh")  # the classes of transformers and torch
# Settings of Gemma's and LFM2's families that the kernel does not have.
NOT_HERE = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "conv_bias")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # rotary scalings that do not depend on the length of the text


class LlamaKernel(KernelLayers):
    """The weights of one language model in the form that the kernel reads; shared by all batches.

    Granite multiplies what a layer adds to the residual stream by a number r, and divides the logits by another one.
    Here the stream is kept divided by r, which the norms do not see, and the weight of the last norm is divided by the
    other number.

    output: the LM head. screen: its 4-bit copy, where `screen_head` made one.
    residual, divisor: Granite's two numbers, 1 in other models.
    """

    execution = "kernel"

    def __init__(self, model: HFModel | Skeleton) -> None:
        """Read the weights of `model`, for which `llama_kernel` has found that the kernel can run it."""
        from foretoken.kernel.model import Head

        config: Any = model.config
        inner: Any = model.model
        layers, attention = list(inner.layers), first_attention(inner.layers)
        last_norm = named(inner, "norm", "embedding_norm")  # the second name is LFM2's
        kinds = getattr(config, "layer_types", None) or [None] * len(layers)
        kinds = [FULL if kind == "conv" else kind for kind in kinds]  # convolutions see the whole path in its mask

        def angles(count: int, kind: str | None) -> tuple[Tensor, Tensor]:
            return rotary_of(inner.rotary_emb, kind).angles(torch.arange(count))

        # Granite's numbers, and whether SmolLM3's layers rotate. A configuration may have numbers that no module reads.
        self.residual: float = getattr(layers[0], "residual_multiplier", 1.0)
        self.divisor: float = config.logits_scaling if type(model).__name__.startswith("Granite") else 1.0
        embedding: float = getattr(inner, "embedding_multiplier", 1.0)
        rotated = [bool(getattr(getattr(layer, "self_attn", None), "use_rope", True)) for layer in layers]
        eps, curve = norm_eps(last_norm) / self.residual**2, CURVES[activation_of(model)]
        super().__init__(layers, attention.head_dim, attention.scaling, eps, angles, kinds, curve, rotated)
        table = table_of(inner.embed_tokens)
        self.embedding = table._replace(factor=table.factor * np.float32(embedding / self.residual))
        last: Any = model.get_output_embeddings()
        self.output: PanelLinear = last  # kept here: the address below points into its panels
        self.vocab_size: int = last.out_features
        bias = NO_FLOATS if last.bias is None else bias_of(last)
        norm, one = norm_weight(last_norm) / np.float32(self.divisor), np.float32(1)
        self.head = Head(norm, np.float32(eps), False, one, last.address, last.form, 0, bias, NO_IDS)

    def screen_head(self) -> None:
        """Compute most logits by a 4-bit copy of the LM head from now on, as kernel/screen.py says; for drafters alone.

        An LM head that is not quantised to HEAD_KIND stays as it is.
        """
        from foretoken.kernel.screen import screen_of

        if isinstance(self.output, PackedLinear) and self.output.kind == HEAD_KIND:
            check_quantised("q4_0")  # the kind of the screen
            self.screen = screen_of(self.output.panels.numpy())  # kept here: the address below points into it
            self.head = self.head._replace(screen=self.screen.ctypes.data)

    def open(self, batch: int, slots: int) -> "KernelRows":
        return KernelRows(self, batch, slots)


class KernelRows(KernelSlots):
    """The slot cache of a batch, and the forward of the whole model."""

    def __call__(
        self,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Run the model as `ModuleSlots` does; where head is False, the logits have no rows [0, n, v]."""
        flat, at = np.array(ids).reshape(-1), np.array(positions).reshape(-1)
        logits = self.score_tree(flat, at, masks, 0.0, features, head)
        assert logits is not None
        return logits.view(len(ids) if head else 0, len(ids[0]), logits.shape[1])

    def score_tree(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        masks: Mapping[str, np.ndarray | None],
        temperature: float,
        features: FeatureStore | None = None,
        head: bool = True,
    ) -> Float[Tensor, "m v"] | None:
        """Run the model on nodes and return softmax(logits / temperature) [m, v], bit for bit as `softmax` has it.

        `place` has set the slots of the m nodes, row after row.

        tokens, positions: of each node [m].
        masks: as in `ModuleSlots.__call__`.
        temperature: >= 0; at 0 the logits are returned.
        features: where the nodes' hidden states are written; None: they are not kept.
        head: whether the LM head runs; where it does not, the result has no rows.

        Returns None where some probability would not be finite; logits are not checked.
        """
        from foretoken.kernel.model import Wanted, score

        check_known(tokens, self.layers.embedding)
        k, m = self.layers, len(tokens)
        assert isinstance(k, LlamaKernel)
        asked = () if features is None else features.distinct
        layers = np.array([len(k.records) if layer == FINAL else layer for layer in asked], np.int64)
        wanted = Wanted(layers, np.empty((len(layers), m, k.embedding.width), np.float32))
        out = np.empty((m if head else 0, k.vocab_size), np.float32)
        factor = inverse(temperature) if temperature > 0 else np.float32(0)
        nodes = self._nodes(positions, masks)
        with k.threads.forward(torch.get_num_threads(), m) as run:
            finite = score(self.model, tokens, nodes, factor, wanted, out, run.threads)
        if features is not None:
            if k.residual != 1 or k.divisor != 1:
                scales = [k.divisor if layer == FINAL else k.residual for layer in asked]
                wanted.states[:] *= np.array(scales, np.float32)[:, None, None]
            states = torch.from_numpy(wanted.states)
            features.keep(self.at, states.view(len(layers), -1, self.at.n, k.embedding.width))
        return torch.from_numpy(out) if finite else None


def llama_kernel(model: HFModel | Skeleton) -> LlamaKernel | None:
    """Return the compiled forward of a packed `model`, None where it would not be the same computation."""
    inner: Any = model.base_model
    if not (isinstance(model, Skeleton) or is_plain(model)):  # of a skeleton it was found out when it was written
        return None
    if not isinstance(model.get_output_embeddings(), PanelLinear):
        return None
    dim = first_attention(inner.layers).head_dim
    if dim % LANES:
        return None
    if any(matrix.first % COLUMNS for layer in inner.layers for matrix in read_layer(layer, dim).matrices):
        return None  # a part of a larger matrix that does not begin with a panel
    forms = {module.form for module in model.modules() if isinstance(module, PanelLinear)}
    if DOTTED in forms and max(forms) >= QUANTISED:  # one rounds input rows to bfloat16, the other to 8 bits
        return None
    return LlamaKernel(model)


def is_plain(model: HFModel) -> bool:
    """Whether `model` is one of FAMILY on a CPU in float32 or bfloat16, all its linear layers packed, and unchanged.

    A model is changed by adapters, hooks and the like, which compute something else than its class does.
    """
    kind = type(model)
    if kind.__name__ not in FAMILY or not kind.__module__.startswith("transformers.models."):
        return False
    if model.device.type != "cpu" or model.dtype not in PACKED:
        return False
    config: Any = model.config
    rope = config.rope_parameters  # where kinds of layers differ in it, those of each kind
    scaled = {part.get("rope_type") for part in ([rope] if "rope_type" in rope else rope.values())}
    if activation_of(model) not in CURVES or not scaled <= set(STATIC_ROPE):
        return False
    if any(getattr(config, name, None) for name in NOT_HERE):
        return False
    known = (
        PanelLinear, PackedLinear, PanelMixture, nn.Embedding, PackedEmbedding, nn.ModuleList, nn.Dropout, nn.Conv1d,
    )  # fmt: skip
    for module in model.modules():
        ours = type(module) in known or type(module).__module__ == kind.__module__
        changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        if not (ours or type(module).__name__ in ACTIVATIONS) or changed:  # by adapters, hooks, offloading
            return False
        if isinstance(getattr(module, "experts", None), nn.Module):  # those of a PanelMixture are in its stacks
            return False
    inner: Any = model.model
    mixers = [named(layer, "self_attn", "conv") for layer in inner.layers]
    attention = first_attention(inner.layers)
    if inner.rotary_emb is None or attention is None or None in mixers:  # Granite 4 with Mamba layers
        return False
    sizes = {2 * values.numel() for name, values in inner.rotary_emb.named_buffers() if name.endswith("inv_freq")}
    return sizes == {attention.head_dim}


def activation_of(model: HFModel | Skeleton) -> str:
    """Return the name of the activation in the MLPs of a `model`; LFM2's has no place in its configuration."""
    config: Any = model.config
    if type(model).__name__.startswith("Lfm2"):
        return "silu"
    return getattr(config, "hidden_activation", None) or config.hidden_act
