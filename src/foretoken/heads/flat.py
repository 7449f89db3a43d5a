"""Heads without a cache of draft tokens: Medusa drafts every level from one state; Hydra also reads the tokens between.

h_t is the target's state before the root x_{t+1}. Level i of such a head drafts x_{t+2+i}, the children of nodes at
depth i. What is made of the target's states is kept per row, not per node.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foretoken.core.shapes import Float
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.head import Backend, PublishedHead
from foretoken.heads.layer import Attend, DecoderLayer, RMSNorm, cached
from foretoken.heads.rows import LOW, HeadRows, planes_of
from foretoken.models.cache import SlotCache
from foretoken.models.growing_tree import GrowingTree, NewNodes
from foretoken.models.parts import LayerShape, TargetParts
from foretoken.models.rows import CHUNK


class ResidualBlock(nn.Module):
    """r(x) + SiLU(Linear x), where r is the identity, or a second Linear where the width changes."""

    def __init__(self, hidden: int, width: int, bias: bool = True) -> None:
        """Make a block that starts as r(x), but for what the bias adds.

        hidden, width: channels of the result and of x.
        bias: whether the linear layer in SiLU has a bias.
        """
        super().__init__()
        self.linear = nn.Linear(width, hidden, bias=bias)
        nn.init.zeros_(self.linear.weight)
        self.res_connection = nn.Identity() if width == hidden else nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of x [..., width], as [..., hidden]."""
        return self.res_connection(x) + torch.nn.functional.silu(self.linear(x))


class FlatRows(HeadRows):
    """The rows of a head that runs no forward on committed tokens, since it reads the target's states of them."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].length += len(tokens)

    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        """Do nothing: what the cache keeps is of the target's states."""

    def _fresh(self, firsts: list[int]) -> list[int]:
        """Return the indices of the rows that score their first node since the last `keep`."""
        return [i for i, (row, first) in enumerate(zip(self.rows, firsts, strict=True)) if first == 0 < len(row.tree)]


class Medusa(PublishedHead):
    """Medusa: level i is residual blocks x + SiLU(Linear x) on h_t, then Linear(d -> V). Cai et al. 2024.

    So q depends on the depth alone: the children of all nodes of one depth are drawn from the same q, whatever their
    paths. Every law and rule allows that, since q is what was drawn from; it is only a worse guess than one from the
    path.
    """

    kind = "medusa"
    marks = (r"\d+\.\d+\.linear\.weight$",)
    file = "medusa_lm_head.safetensors"
    least_levels = 1
    parallel_from = 0

    def __init__(
        self, parts: TargetParts, num_heads: int = 4, num_blocks: int = 1, bias: bool = False, block_bias: bool = True
    ) -> None:
        """Make an untrained head.

        parts: what the head borrows of its target.
        num_heads: number of levels.
        num_blocks: residual blocks per level.
        bias, block_bias: whether the linear layers to V tokens, and those of the blocks, have biases.
        """
        super().__init__(parts)
        self.depth = num_heads
        d, v = parts.hidden, parts.vocab_size
        for i in range(num_heads):
            blocks = [ResidualBlock(d, d, block_bias) for _ in range(num_blocks)]
            self.add_module(str(i), nn.Sequential(*blocks, nn.Linear(d, v, bias=bias)))

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Medusa":
        return cls(parts, levels or 4, layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Medusa":
        heads, last = checkpoint.count(r"(\d+)\."), checkpoint.count(r"0\.(\d+)\.") - 1
        vocab, hidden = checkpoint.size(f"0.{last}.weight")
        checkpoint.check("hidden size", hidden, checkpoint.parts.hidden)
        checkpoint.check("vocabulary", vocab, checkpoint.parts.vocab_size)
        weights = checkpoint.weights
        return cls(checkpoint.parts, heads, last, f"0.{last}.bias" in weights, "0.0.linear.bias" in weights)

    def own_lm_heads(self) -> list[nn.Linear]:
        last: list[Any] = [head[-1] for head in self.children() if isinstance(head, nn.Sequential)]
        return last

    def levels(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... k v"]:
        """Return the logits of all k levels [..., k, v]; states: h_t, the last of the target's states [..., d]."""
        scaled = states / self.feature_scale
        return torch.stack([head(scaled) for head in self.children()], -2)

    def open(self, batch: int, slots: int, backend: Backend | None) -> "MedusaRows":
        return MedusaRows(self, batch, 0, None)


class LevelRows(FlatRows):
    """The rows of a head whose logits depend on the depth alone, and are computed for all levels at once."""

    @abstractmethod
    def _levels(self, fresh: list[int]) -> Iterable[Float[Tensor, "k v"]]:
        """Return the logits of all k levels [k, v] of each of the rows with indices `fresh`."""

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        fresh = self._fresh(firsts)
        if fresh:
            for i, scores in zip(fresh, self._levels(fresh), strict=True):
                self.rows[i].levels = scores
        out = []
        for row, first in zip(self.rows, firsts, strict=True):
            depths = [row.level(node) for node in range(first, len(row.tree))]
            out.append(row.levels[torch.tensor(depths, device=row.levels.device)] if depths else self._none())
        return out

    def parallel_scores(self, places: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Return the logits of all levels that are drafted at once, m of them, below some nodes [n, m, v].

        places: the n nodes, each as (index of its row, index of the node in the row's tree). The node has the depth
            `parallel_from`, so that it is the root in this class; its row was scored since the last `keep`.
        """
        return torch.stack([self.rows[row].levels for row, _ in places])


class MedusaRows(LevelRows):
    """The rows of Medusa: one call for all levels of all rows."""

    def _levels(self, fresh: list[int]) -> Float[Tensor, "r k v"]:
        return self.head.levels(torch.stack([self.rows[i].features[-1] for i in fresh]))


class Hydra(PublishedHead):
    """Hydra: level i is an MLP and Linear(d -> V) on (prefix state, embeddings of the i + 1 tokens from the root on).

    The prefix state comes from one decoder layer over the states h_0..h_t (Hydra++), or is h_t itself. Ankner et al.
    2024.
    """

    kind = "hydra"
    marks = (r"hydra_mlp\.",)
    file = "hydra_lm_head.safetensors"
    least_levels = 1

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_heads: int = 4, num_blocks: int = 1, prefix: bool = True
    ) -> None:
        """Make an untrained head.

        parts: what the head borrows of its target.
        shape: sizes of the prefix layer.
        num_heads: number of levels.
        num_blocks: residual blocks per MLP.
        prefix: whether there is a prefix layer.
        """
        super().__init__(parts)
        self.depth, self.shape = num_heads, shape
        d = parts.hidden
        self.prefix_embeding_layer: Any = None
        if prefix:
            layers, norm = nn.ModuleList([DecoderLayer(shape, input_norm=True)]), RMSNorm(shape.hidden, shape.eps)
            self.prefix_embeding_layer = nn.ModuleDict({"layers": layers, "norm": norm})
        # In the published layout every residual block, and every LM head, comes after a module without weights.
        widths = [[(i + 2) * d, *[d] * (num_blocks - 1)] for i in range(num_heads)]
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*(m for width in level for m in (nn.Identity(), ResidualBlock(d, width)))) for level in widths
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Sequential(nn.Identity(), nn.Linear(d, parts.vocab_size)) for _ in range(num_heads)
        )

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Hydra":
        return cls(parts, parts.shape, levels or 4, layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Hydra":
        parts = checkpoint.parts
        heads, blocks = checkpoint.count(r"hydra_mlp\.(\d+)\."), checkpoint.count(r"hydra_mlp\.0\.(\d+)\.") // 2
        vocab, hidden = checkpoint.size("hydra_lm_head.0.1.weight")
        checkpoint.check("hidden size", hidden, parts.hidden)
        checkpoint.check("vocabulary", vocab, parts.vocab_size)
        prefix = any(key.startswith("prefix_embeding_layer.") for key in checkpoint.weights)
        shape = checkpoint.layer_shape("prefix_embeding_layer.layers.0.") if prefix else parts.shape
        checkpoint.targets_rotary(shape.head_dim)
        return cls(parts, shape, heads, blocks, prefix)

    def config(self) -> dict[str, Any]:
        return self.shape.config()

    def own_lm_heads(self) -> list[nn.Linear]:
        return [module for module in self.hydra_lm_head.modules() if isinstance(module, nn.Linear)]

    def prefix_states(
        self, features: Float[Tensor, "b n d"], cos: Float[Tensor, "_ n h"], sin: Float[Tensor, "_ n h"], attend: Attend
    ) -> Float[Tensor, "b n d"]:
        """Return the prefix states, one per state of the target [b, n, d].

        features: the target's states [b, n, d].
        cos, sin: cosines and sines of the rotary angles of their positions [1 or b, n, head_dim].
        attend: computes attention, as in `Attention`.
        """
        scaled, prefix = features / self.feature_scale, self.prefix_embeding_layer
        return scaled if prefix is None else prefix["norm"](prefix["layers"][0](scaled, cos, sin, attend))

    def level(self, i: int, prefix: Float[Tensor, "... d"], embedded: list[Tensor]) -> Float[Tensor, "... v"]:
        """Return the logits of level i [..., v].

        i: the level, from 0 on.
        prefix: prefix states [..., d].
        embedded: embeddings of the root and of the i tokens below it, i + 1 tensors [..., d].
        """
        given = torch.cat((prefix, *(e.to(prefix.dtype) for e in embedded)), -1)
        return self.hydra_lm_head[i](self.hydra_mlp[i](given))

    def open(self, batch: int, slots: int, backend: Backend | None) -> "HydraRows":
        return HydraRows(self, batch, slots)


class HydraRows(FlatRows):
    """The rows of Hydra: one call per level, and before the first level the prefix layer on the new states."""

    @torch.inference_mode()
    def __init__(self, head: Hydra, batch: int, slots: int) -> None:
        """Allocate the cache of a prefix layer; head: the head that drafts; batch, slots: as in `Head.open`."""
        cache = None
        if head.prefix_embeding_layer is not None:
            cache = SlotCache(planes_of(head.shape, 1, head.target), batch, slots)
        super().__init__(head, batch, slots, cache)

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        fresh = self._fresh(firsts)
        if fresh:
            self._read_states(fresh)
        device = self.target.device
        logits = [
            torch.empty(len(row.tree) - first, self.target.vocab_size, device=device)
            for row, first in zip(self.rows, firsts, strict=True)
        ]
        by_level: dict[int, list[tuple[int, int]]] = {}
        for i, (row, first) in enumerate(zip(self.rows, firsts, strict=True)):
            for node in range(first, len(row.tree)):
                if row.tree.depths[node] >= len(row.features) - row.length:  # not above the last committed token
                    by_level.setdefault(row.level(node), []).append((i, node))
                else:
                    logits[i][node - first] = 0
        for level, nodes in by_level.items():
            paths = [[self.rows[i].tokens[j] for j in self.rows[i].above(node)] for i, node in nodes]
            embedded = self.target.embed(torch.tensor(paths, device=device))
            prefix = torch.stack([self.rows[i].prefix for i, _ in nodes])
            scores = self.head.level(level, prefix, list(embedded.unbind(1)))
            for (i, node), score in zip(nodes, scores, strict=True):
                logits[i][node - firsts[i]] = score
        return logits

    def _read_states(self, rows: list[int]) -> None:
        """Run the prefix layer on new states until it has read all those of `rows`, by CHUNK per row and call."""
        if self.cache is None:
            for i in rows:
                self.rows[i].prefix = self.rows[i].features[-1] / self.head.feature_scale
            return
        assert isinstance(self.cache, SlotCache)
        while any(self.rows[i].read < len(self.rows[i].features) for i in rows):
            new = [row.features[row.read : row.read + CHUNK] for row in self.rows]
            counts = list(map(len, new))
            chains = [GrowingTree(LOW) for _ in new]
            for chain, count in zip(chains, counts, strict=True):
                chain.grow(range(-1, count - 1))
            starts = [row.read for row in self.rows]
            mask = self._placed(NewNodes(chains, starts, [0] * len(starts)))
            states = pad_sequence(new, batch_first=True)
            places = torch.arange(max(counts)) + torch.tensor(starts)[:, None]
            cos, sin = self.head.rotary.angles(places.to(states.device))
            attend = cached(self.cache, 0, self._seen(mask))
            prefix = self.head.prefix_states(states, cos, sin, attend)
            for row, of_row, count in zip(self.rows, prefix, counts, strict=True):
                if count:
                    row.prefix = of_row[count - 1]
                    row.read += count
