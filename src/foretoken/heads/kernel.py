"""EAGLE, EAGLE-3 and Gumiho heads in the compiled kernel: packed weights on a CPU."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.heads.eagle import Eagle, Gumiho
from foretoken.heads.eagle3 import Eagle3
from foretoken.kernel.sizes import LANES
from foretoken.models.decoder_layer import array, bias_of
from foretoken.models.kernel_layers import NO_FLOATS, NO_IDS, KernelLayers, KernelSlots, table_of
from foretoken.models.panels import PackedEmbedding, PanelLinear, use_threads

if TYPE_CHECKING:
    from foretoken.kernel.model import Entry, Head, Mlps


class EagleKernel(KernelLayers):
    """The weights of one head in the form that the kernel reads; shared by all batches.

    module: the head itself.
    blocks: the linear layers of Gumiho's MLPs, per MLP. They are kept here since the addresses in `mlps` point into
        their panels, also after the head was cut.
    """

    def __init__(self, head: Eagle | Eagle3) -> None:
        """Read the weights of `head`, whose linear layers are packed."""
        shape, target = head.shape, head.target
        scale, kinds = shape.head_dim**-0.5, [None] * head.num_layers
        super().__init__(
            _layers(head), shape.head_dim, scale, shape.eps, lambda n, _: head.rotary.angles(torch.arange(n)), kinds
        )
        self.module = head  # the addresses of its linear layers point into their panels
        self.vocab_size = target.vocab_size
        self.entry, self.head = _entry(head), _head(head)
        if isinstance(head, Gumiho):
            self.serial = Gumiho.SERIAL
            mlps: Any = head.mlp
            self.blocks: list[list[PanelLinear]] = [[block.linear for block in mlp] for mlp in mlps]
            self.mlps = _mlps(self.blocks)
        own = head.embed_tokens
        table: Any = target.embedding if own is None else own
        plain = type(table) in (nn.Embedding, PackedEmbedding) and (own is not None or target.embedding_scale == 1)
        self.embedding = table_of(table if plain else nn.Embedding(0, shape.hidden))

    def open(self, batch: int, slots: int) -> "EagleSlots":
        return EagleSlots(self, batch, slots)


class EagleSlots(KernelSlots):
    """The slot cache of a batch in the kernel, with the forward of EAGLE, EAGLE-3 and Gumiho heads over it."""

    layers: EagleKernel

    def step(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        positions: np.ndarray,
        mask: np.ndarray | None,
    ) -> Float[Tensor, "b n d"]:
        """Return the states o of the nodes whose slots `place` has set [b, n, d], in float32.

        embedded, states, positions: as in `Serial.made`.
        mask: 0 for the slots that a node sees, LOW for others [b, 1, n, used]; None: all nodes see all slots.
        """
        from foretoken.kernel.heads import step

        of_tokens, before = _rows(embedded), _rows(states)
        x = np.empty_like(before)
        step(self.model, of_tokens, before, self._nodes(positions.reshape(-1), {"": mask}), x, use_threads())
        return torch.from_numpy(x).view(states.shape)

    def logits(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """Return the logits over the head's own vocabulary, for `states` that `step` returned.

        Where the kernel cannot compute the LM head, these are the logits of the module over the target's vocabulary,
        which such a head borrows.
        """
        from foretoken.kernel.model import scores

        head = self.layers.head
        if head.address == 0:
            return self.layers.module.logits(states)
        flat = states.reshape(-1, states.shape[-1]).contiguous().numpy()
        out = np.empty((len(flat), len(head.columns) or self.layers.vocab_size), np.float32)
        scores(flat, head, out, use_threads())
        return torch.from_numpy(out).view(*states.shape[:-1], -1)

    def parallel(self, embedded: Float[Tensor, "n k d"], states: Float[Tensor, "n k d"]) -> Float[Tensor, "n m d"]:
        """Return the states that Gumiho's MLPs make [n, number of MLPs, d], as `Gumiho.parallel` does.

        embedded: the embeddings of the first two draft tokens of n paths [n, 2, d].
        states: the head's states from which these tokens were drawn [n, 2, d].
        """
        from foretoken.kernel.heads import parallel

        of_tokens, before = _rows(embedded), _rows(states)
        out = np.empty((len(states), len(self.layers.blocks), states.shape[-1]), np.float32)
        parallel(self.model.mlps, self.model, of_tokens, before, out, use_threads())
        return torch.from_numpy(out)


def _rows(x: Float[Tensor, "*n d"]) -> np.ndarray:
    """Return vectors as the kernel reads them, one behind the other in float32."""
    return x.float().reshape(-1, x.shape[-1]).contiguous().numpy()


def eagle_kernel(head: Eagle | Eagle3) -> EagleKernel | None:
    """Return a head's weights for the kernel; None where they are not packed, or have sizes that it does not support.

    head: the head.
    """
    unknown = head.shape.head_dim % LANES or (isinstance(head, Gumiho) and head.shape.hidden % LANES)
    return EagleKernel(head) if isinstance(head.fc, PanelLinear) and not unknown else None


def _layers(head: Eagle | Eagle3) -> list[Any]:
    """Return the decoder layers as KernelLayers takes them: the first norms of EAGLE-3's layer belong to `_entry`."""
    if isinstance(head, Eagle):
        return list(head.layers)
    layer = head.midlayer
    after = layer.post_attention_layernorm
    return [
        SimpleNamespace(self_attn=layer.self_attn, mlp=layer.mlp, input_layernorm=None, post_attention_layernorm=after)
    ]


def _entry(head: Eagle | Eagle3) -> "Entry":
    """Return what makes the first layer's input of embeddings and states."""
    from foretoken.kernel.model import Entry

    d, eps = head.shape.hidden, np.float32(head.shape.eps)
    if isinstance(head, Eagle):
        fc: Any = head.fc
        return Entry(fc.address, fc.form, bias_of(fc), np.zeros((0, d), np.float32), eps, False)
    layer = head.midlayer
    norms = np.stack([array(layer.input_layernorm.weight), array(layer.hidden_norm.weight)])
    return Entry(0, 0, NO_FLOATS, norms, eps, layer.norm_before_residual)


def _head(head: Eagle | Eagle3) -> "Head":
    """Return the LM head; its address is 0 where the target's is borrowed and is more than a packed product."""
    from foretoken.kernel.model import Head

    eps, target = np.float32(head.shape.eps), head.target
    norm, normed, factor = NO_FLOATS, False, np.float32(head.feature_scale)
    if isinstance(head, Eagle3):
        norm, normed, factor = array(head.norm.weight), head.norm_output, np.float32(1)
        if head.lm_head is not None:
            last: Any = head.lm_head
            columns = NO_IDS if head.columns is None else head.columns.numpy()
            return Head(norm, eps, normed, factor, last.address, last.form, 0, NO_FLOATS, columns)
    last = target.unembedding
    if not isinstance(last, PanelLinear) or target.logit_scale != 1 or target.softcap is not None:
        return Head(norm, eps, normed, factor, 0, 0, 0, NO_FLOATS, NO_IDS)
    bias = NO_FLOATS if last.bias is None else bias_of(last)
    return Head(norm, eps, normed, factor, last.address, last.form, 0, bias, NO_IDS)


def _mlps(mlps: list[list[PanelLinear]]) -> "Mlps":
    """Return addresses, forms and biases of the MLPs' linear layers; mlps: the layers of each MLP."""
    from foretoken.kernel.model import Mlps

    blocks, d = (len(mlps[0]), mlps[0][0].out_features) if mlps else (0, 0)
    addresses, forms = np.zeros((len(mlps), blocks), np.int64), np.zeros((len(mlps), blocks), np.int64)
    biases = np.ones((len(mlps), blocks, 2 * d), np.float32)
    for j, mlp in enumerate(mlps):
        addresses[j] = [linear.address for linear in mlp]
        forms[j] = [linear.form for linear in mlp]
        biases[j, :, :d] = [bias_of(linear) for linear in mlp]
    return Mlps(addresses, forms, biases)
