"""The Llama family over packed weights: embedding, layers and LM head on a CPU; all but products in float32."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.policy import Grow
from foretoken.core.shapes import Float
from foretoken.core.truncated import Truncation
from foretoken.kernel.sizes import ALL, LANES
from foretoken.models.features import FINAL, FeatureStore
from foretoken.models.kernel_layers import (
    NO_LAYERS,
    KernelLayers,
    KernelSlots,
    array,
    bias_of,
    chain_outputs,
    check_known,
    embedded,
    factor_at,
    table_of,
)
from foretoken.models.llama import is_plain_llama
from foretoken.models.panels import PanelLinear, use_threads


class LlamaKernel:
    """The weights of one model in the form that kernel.py reads; shared by all rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        inner: Any = model.model
        layers, attention = list(inner.layers), inner.layers[0].self_attn
        kinds = getattr(config, "layer_types", None) or [None] * len(layers)

        def angles(count: int) -> tuple[Tensor, Tensor]:
            cos, sin = inner.rotary_emb(torch.empty(0), torch.arange(count)[None])
            return cos[0], sin[0]

        eps = inner.norm.variance_epsilon
        self.layers = KernelLayers(layers, attention.head_dim, attention.scaling, eps, angles, kinds)
        self.embedding = table_of(inner.embed_tokens.weight)
        self.norm = array(inner.norm.weight)
        head: Any = model.get_output_embeddings()
        self.head: PanelLinear = head
        self.head_address = head.address
        self.head_bias = bias_of(head) if head.bias is not None else np.zeros(0, np.float32)
        self.last = (self.norm, self.head_address, head.form, self.head_bias)  # as kernel_chain takes it

    def open(self, batch: int, slots: int) -> "KernelRows":
        return KernelRows(self, batch, slots)


class KernelRows(KernelSlots):
    """The slot cache of a batch, and the forward of the whole model."""

    def __init__(self, kernel: LlamaKernel, batch: int, slots: int) -> None:
        super().__init__(kernel.layers, batch, slots)
        self.kernel = kernel

    def __call__(
        self,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        masks: Mapping[str, np.ndarray | None],
        head: bool,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Logits of the nodes whose slots were aimed at; the last layer's states where head is False."""
        from foretoken.kernel.forward import head as scores

        k, eps = self.kernel, self.layers.eps
        b, n = len(ids), len(ids[0])
        x = embedded(k.embedding, np.array(ids).reshape(-1))
        self.run(x, np.array(positions).reshape(-1), masks, features)
        self._remember_last(features, x)
        if not head:
            return torch.from_numpy(x).view(b, n, -1)
        y = np.empty((b * n, k.head.out_features), np.float32)
        scores(x, k.norm, eps, k.head_address, k.head.form, k.head_bias, y, use_threads())
        return torch.from_numpy(y.reshape(b, n, -1))

    def _remember_last(self, features: FeatureStore | None, x: np.ndarray) -> None:
        """Keep the states x [batch * n, d] after the last layer, normed, if `features` wants them."""
        from foretoken.kernel.forward import norm

        if features is not None and FINAL in features.layers:
            normed = np.empty_like(x)
            norm(x, self.kernel.norm, self.layers.eps, normed)
            features.write(FINAL, torch.from_numpy(normed).view(*self._slots.shape, -1))

    @property
    def drafts_chains(self) -> bool:
        """Whether every token that could be drawn is in the embedding: the loop does not look."""
        return len(self.kernel.embedding) >= self.kernel.head.out_features

    def draft_chain(
        self,
        row: int,
        read: Sequence[int],
        start: int,
        u: Float[Tensor, "n 1"],
        temperature: float,
        floor: float,
        truncation: Truncation = ALL,
    ) -> tuple[list[int], Float[Tensor, "_ v"]]:
        """Tokens drawn one after the other behind those `read`, whose first goes to slot `start` (its position too),
        and the q of each; at temperature 0 the likeliest ones, without q.

        What `forward`, softmax and draw would give level by level, bit for bit. Fewer than n where the product of q
        falls below `floor`, none where logits are not finite.
        """
        from foretoken.kernel.fused import draft_chain

        k = self.kernel
        factor, q, tokens = chain_outputs(len(u), k.head.out_features, temperature)
        done = draft_chain(
            np.array(read), row, *self._chain(read, start, k.embedding), k.last, u.numpy(), factor, truncation,
            floor, use_threads(), q, tokens,
        )  # fmt: skip
        return tokens[:done].tolist(), torch.from_numpy(q[:done])

    def score_tree(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        masks: Mapping[str, np.ndarray | None],
        temperature: float,
        features: FeatureStore | None = None,
    ) -> Float[Tensor, "n v"] | None:
        """softmax(logits / temperature) of a lone row's nodes, whose slots were aimed at; at temperature 0 the logits.
        What `forward` and softmax would give, bit for bit; None where p would not be finite. The hidden states that
        `features` wants are kept there."""
        from foretoken.kernel.fused import score_tree

        k = self.kernel
        check_known(tokens, k.embedding)
        out, x = np.empty((len(tokens), k.head.out_features), np.float32), embedded(k.embedding, np.array(tokens))
        wanted = NO_LAYERS if features is None else features.inputs
        states = np.empty((len(wanted), *x.shape), np.float32)
        state = self._lone(int(self._slots[0, 0]), (self._seen(masks),))
        finite = score_tree(
            x, np.array(positions), self._rows.start, *state, k.last, factor_at(temperature), wanted, states,
            use_threads(), out,
        )  # fmt: skip
        if features is not None:
            self._remember(features, states)
            self._remember_last(features, x)
        return torch.from_numpy(out) if finite else None

    def grow_tree(self, row: int, read: Sequence[int], start: int, temperature: float, grow: Grow) -> list[int] | None:
        """grow(pending .. threads), the arguments of kernel_chain.draft_chain that are the model's, row's and
        temperature's; one mask, of the forward that reads `read`."""
        k = self.kernel
        _, _, _, masks, *_ = state = self._chain(read, start, k.embedding)
        state = (*state[:3], masks[:1], *state[5:])
        return grow(np.array(read), row, *state, k.last, factor_at(temperature), use_threads())


def llama_kernel(model: PreTrainedModel) -> LlamaKernel | None:
    """The compiled forward of a packed model, None where it would not be the same computation."""
    inner: Any = model.base_model
    if not is_plain_llama(model, PanelLinear) or not isinstance(model.get_output_embeddings(), PanelLinear):
        return None
    if inner.layers[0].self_attn.head_dim % LANES:
        return None
    return LlamaKernel(model)
