"""DFlash and JetFlow: all levels from one forward over a block, which reads the states of several target layers.

The block is the last committed token followed by mask tokens, one per level. Its layers attend to the block, and to
keys and values that they make of the target's states of the committed text. From the head's state at mask i the
target's LM head makes the logits of the children of nodes at depth i - 1. As in Medusa, these logits depend on the
depth alone. In a block of DFlash every token sees all others, in one of JetFlow only those before it.

Sources: Chen, Liang, Liu 2026, DFlash, arXiv:2602.06036; Hu et al. 2026, JetFlow, arXiv:2606.18394. The layout is that
of the package dflash 0.1.0 and of JetFlow's heads, which are the same but for the flag `causal_head`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.flat import LevelRows
from foretoken.heads.head import Backend, PublishedHead
from foretoken.heads.layer import Attend, Attention, DecoderLayer, RMSNorm, cached
from foretoken.heads.rows import HeadRow, planes_of
from foretoken.models.cache import Place, SlotCache
from foretoken.models.features import FINAL
from foretoken.models.parts import LayerShape, TargetParts
from foretoken.models.rows import CHUNK

LAYERS, BLOCK = 5, 16  # number of layers, and tokens per block, of a new head, as published
LARGEST_BLOCK = 256  # the most tokens of a block, which one forward reads whole; published heads have 16 or fewer
ROWS = 8192  # rows of an embedding that are looked at at once
READ = "target_layer_ids"  # config.json's name for the layers whose states it reads: i is for those that leave layer i


class DFlash(PublishedHead):
    """DFlash: level i, from 0 on, is the target's LM head on the state at mask i + 1 of a block.

    block: number of tokens of the block, the last committed token included.
    mask_token: the token whose embedding the block has at each mask.
    causal: whether a token of the block sees only those before it and itself.
    """

    kind = "dflash"
    marks = (r"fc\.weight$", r"hidden_norm\.weight$", r"layers\.\d+\.self_attn\.[qk]_norm\.")
    least_levels = 1
    parallel_from = 0
    causal = False

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_layers: int, block: int, mask_token: int,
        layers: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Make an untrained head.

        parts: what the head borrows of its target.
        shape, num_layers: sizes and number of its layers.
        block, mask_token: as in the class's docstring.
        layers: the target's layers whose states it reads, see models/features.py.
        """
        super().__init__(parts)
        self.shape, self.block, self.depth, self.mask_token = shape, block, block - 1, mask_token
        self.feature_layers = layers
        self.fc = nn.Linear(len(layers) * parts.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=True) for _ in range(num_layers))
        for layer in self.layers:
            layer.self_attn = Attention(shape, normed=True)
        self.norm = RMSNorm(shape.hidden, shape.eps)

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "DFlash":
        count, depth = layers or LAYERS, levels or BLOCK - 1
        return cls(parts, parts.shape, count, depth + 1, _least_token(parts), _usual_layers(parts, count))

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "DFlash":
        config, parts, path = checkpoint.config, checkpoint.parts, checkpoint.path
        shape, count = checkpoint.layer_shape("layers.0."), checkpoint.count(r"layers\.(\d+)\.")
        checkpoint.check("hidden size", shape.hidden, parts.hidden)
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ForetokenError(f"{path} has layers with sliding windows, which are not supported: take another head.")
        for name, usual in (("input_embedding_scale", 1), ("output_multiplier", 1), ("final_logit_softcapping", 0)):
            if config.get(name) not in (None, usual):
                raise ForetokenError(
                    f"{path} has {name} {config[name]} in its config.json, which is not supported: take one without."
                )
        mask_token = config.get("mask_token_id")
        if mask_token is None or mask_token >= parts.vocab_size:
            raise ForetokenError(f"{path} names no mask_token_id of {parts.name} in its config.json: mend it.")
        layers = _layers_read(config, parts, count)
        checkpoint.check("states that are read", checkpoint.size("fc.weight")[1], len(layers) * parts.hidden)
        block = config.get("block_size") or BLOCK
        if not 2 <= block <= LARGEST_BLOCK:
            raise ForetokenError(
                f"In the config.json of {path}, block_size must be a whole number from 2 to {LARGEST_BLOCK}, and is "
                f"{block}: mend it."
            )
        make = JetFlow if config.get("causal_head") or config.get("is_causal") else DFlash
        head = make(parts, shape, count, block, mask_token, layers)
        head.rotary = checkpoint.rotary(shape.head_dim)
        return head

    def config(self) -> dict[str, Any]:
        last = self.target.layers
        return self.rotary.config | self.shape.config() | {
            "block_size": self.block,
            "mask_token_id": self.mask_token,
            READ: [(last if layer == FINAL else layer) - 1 for layer in self.feature_layers],
            "causal_head": self.causal,
        }  # fmt: skip

    def context(self, features: Float[Tensor, "b n f"]) -> Float[Tensor, "b n d"]:
        """Return what the layers make keys and values of [b, n, d]; features: the target's states [b, n, f]."""
        return self.hidden_norm(self.fc(features / self.feature_scale))

    def blocks(self, roots: Int[Tensor, "b m"]) -> Float[Tensor, "b _ d"]:
        """Return the embeddings of one block per root, one block behind the other [b, m * block, d].

        roots: the tokens that the blocks begin with [b, m].
        """
        ids = roots.new_full((*roots.shape, self.block), self.mask_token)
        ids[..., 0] = roots
        return self.target.embed(ids.flatten(1))

    def run(self, x: Float[Tensor, "b n d"], cos: Tensor, sin: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Return the normed states of whole blocks [b, n, d].

        x: the embeddings of the blocks [b, n, d].
        cos, sin: cosines and sines of the rotary angles of their positions [1 or b, n, head_dim].
        attends: the attention of each layer.
        """
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def open(self, batch: int, slots: int, backend: Backend | None) -> "DFlashRows":
        return DFlashRows(self, batch, slots)


class JetFlow(DFlash):
    """JetFlow is DFlash with a causal block: a token of the block sees only those before it and itself."""

    kind = "jetflow"
    causal = True


class DFlashRows(LevelRows):
    """The rows of DFlash and JetFlow: one forward over a block per row and step.

    In the cache, the block's keys and values stand behind those of the text. The next step overwrites them.
    """

    cache: SlotCache  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, head: DFlash, batch: int, slots: int) -> None:
        """Allocate the cache, with room for a block; head: the head that drafts; batch, slots: as in `Head.open`."""
        planes, room = planes_of(head.shape, len(head.layers), head.target), slots + head.block
        super().__init__(head, batch, room, SlotCache(planes, batch, room))

    def _levels(self, fresh: list[int]) -> list[Float[Tensor, "k v"]]:
        return [self._of_block(i, self.rows[i]) for i in fresh]

    def _of_block(self, i: int, row: HeadRow) -> Float[Tensor, "k v"]:
        """Read the new states of `row`, whose index is i, and return the logits of all k levels."""
        head, device = self.head, self.target.device
        for start in range(row.read, len(row.features), CHUNK):
            self._read(i, start, row.features[start : start + CHUNK])
        row.read = at = len(row.features)
        root = row.tokens[row.above(len(row.tree) - 1)[0]]
        self.cache.place(Place(slice(i, i + 1), at, head.block, at + head.block))
        mask = None  # every token of a block sees the text and the whole block
        if head.causal:
            mask = torch.ones(head.block, at + head.block, dtype=torch.bool, device=device).tril(at)
        x = head.blocks(torch.tensor([[root]], device=device)).to(self.target.dtype)
        cos, sin = head.rotary.angles(torch.arange(at, at + head.block, device=device)[None])
        states = head.run(x, cos, sin, [cached(self.cache, layer, mask) for layer in range(len(head.layers))])
        return self.target.logits(states[0, 1:])

    def _read(self, i: int, start: int, features: Float[Tensor, "n f"]) -> None:
        """Write keys and values made of the target's states into the cache of row i, from slot `start` on."""
        n = len(features)
        self.cache.place(Place(slice(i, i + 1), start, n, start + n))
        cos, sin = self.head.rotary.angles(torch.arange(start, start + n, device=features.device)[None])
        context = self.head.context(features[None])
        for number, layer in enumerate(self.head.layers):
            attention: Any = layer.self_attn
            self.cache.update(*attention.keys_values(context, cos, sin), number)


@torch.no_grad()
def _least_token(parts: TargetParts) -> int:
    """Return the token with the smallest embedding, for the masks of a new head.

    Until the head is trained, the state at a mask is close to the mask token's embedding. Where the embedding is the LM
    head too, a mask token with a larger one would therefore get the highest logit of all tokens.
    """
    ids = torch.arange(parts.vocab_size, device=parts.device)
    return int(torch.cat([parts.embed(some).float().square().sum(-1) for some in ids.split(ROWS)]).argmin())


def _usual_layers(parts: TargetParts, count: int) -> tuple[int, ...]:
    """Return the target's layers whose states a head of `count` layers reads by default: evenly spread, as published.

    Raises ForetokenError where the target has fewer than 4 layers.
    """
    if parts.layers < 4:
        raise ForetokenError(
            f"Heads dflash and jetflow need a target of 4 layers, and {parts.name} has {parts.layers}."
        )
    if count == 1:
        return (parts.layers // 2 + 1,)
    return tuple(round(1 + i * (parts.layers - 4) / (count - 1)) + 1 for i in range(count))


def _layers_read(config: dict[str, Any], parts: TargetParts, count: int) -> tuple[int, ...]:
    """Return the target's layers that the states read by a published head enter; FINAL for those after the last layer.

    config: the entries of config.json. count: number of the head's layers. Raises ForetokenError where the target
    lacks a layer.
    """
    named: list[int] | None = config.get(READ)
    if named is None:
        return _usual_layers(parts, count)
    if not named or not all(0 <= layer < parts.layers for layer in named):
        raise ForetokenError(f"A head reads the target's layers {named}, and {parts.name} has {parts.layers}.")
    return tuple(FINAL if layer + 1 == parts.layers else layer + 1 for layer in named)
