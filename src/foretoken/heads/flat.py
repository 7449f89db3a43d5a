"""Heads without a cache of drafted tokens: Medusa guesses every depth from one state, Hydra adds the tokens between.

h_t is the target's state before the root x_{t+1}; level i drafts x_{t+2+i}, the children of nodes at depth i. What a
level's scores depend on is kept per row, not per node.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foretoken.core.shapes import Float
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.head import PublishedHead
from foretoken.heads.layer import Attend, DecoderLayer, LayerShape, RMSNorm, cached, layer_shape
from foretoken.heads.rows import CHUNK, LOW, HeadRow, HeadRows, HeadSlots, planes_of
from foretoken.models.cache import SlotCache
from foretoken.models.growing_tree import GrowingTree
from foretoken.models.parts import TargetParts

if TYPE_CHECKING:
    from foretoken.heads.head import Backend


class ResidualBlock(nn.Module):
    """r(x) + SiLU(Linear x); r is a second Linear where the width changes. Starts as r."""

    def __init__(self, hidden: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden, bias=bias)
        nn.init.zeros_(self.linear.weight)
        self.res_connection = nn.Identity() if width == hidden else nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + torch.nn.functional.silu(self.linear(x))


@dataclass
class FlatRow(HeadRow):
    """read: number of the target's states that stand in a cache. made: what came of all of them: Medusa's and DFlash's
    scores of all levels [k, v], Hydra's prefix state [d]."""

    read: int = 0
    made: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def used(self) -> int:
        return self.read


class FlatRows(HeadRows[FlatRow]):
    """Committed tokens need no forward: their states are the target's."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].length += len(tokens)

    def _fresh(self, firsts: list[int]) -> list[int]:
        """Rows that score their first node since the last `keep`."""
        return [i for i, (row, first) in enumerate(zip(self.rows, firsts, strict=True)) if first == 0 < len(row.tree)]


class Medusa(PublishedHead):
    """Level i: Linear(d -> V) on (x + SiLU(Linear x)) repeated, x = h_t. q depends on the depth alone. Cai et al. 2024.

    A node's children are drawn from its level's q whatever its path, which any law and rule allows: q is what was
    drawn from, only a worse guess than one that knows the path.
    """

    kind = "medusa"
    marks = (r"\d+\.\d+\.linear\.weight$",)
    file = "medusa_lm_head.safetensors"
    least_levels = 1
    parallel_from = 0

    def __init__(
        self, parts: TargetParts, num_heads: int = 4, num_blocks: int = 1, bias: bool = False, block_bias: bool = True
    ) -> None:
        super().__init__(parts)
        self.depth = num_heads
        d, v = parts.hidden, parts.vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(d, d, block_bias) for _ in range(num_blocks)), nn.Linear(d, v, bias=bias))
            for _ in range(num_heads)
        )

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Medusa":
        return cls(parts, levels or 4, layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> tuple["Medusa", dict[str, Tensor]]:
        heads, last = checkpoint.count(r"(\d+)\."), checkpoint.count(r"0\.(\d+)\.") - 1
        vocab, hidden = checkpoint.size(f"0.{last}.weight")
        checkpoint.check("hidden size", hidden, checkpoint.parts.hidden)
        checkpoint.check("vocabulary", vocab, checkpoint.parts.vocab_size)
        weights = checkpoint.weights
        head = cls(checkpoint.parts, heads, last, f"0.{last}.bias" in weights, "0.0.linear.bias" in weights)
        return head, {f"heads.{key}": value for key, value in weights.items()}

    @staticmethod
    def published_key(key: str) -> str:
        return key.removeprefix("heads.")

    def own_lm_heads(self) -> list[nn.Linear]:
        last: list[Any] = [head[-1] for head in self.heads.children() if isinstance(head, nn.Sequential)]
        return last

    def levels(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... k v"]:
        """Scores of every level from h_t."""
        scaled = states / self.feature_scale
        return torch.stack([head(scaled) for head in self.heads], -2)

    def open(self, batch: int, slots: int, backend: "Backend | None") -> "MedusaRows":
        return MedusaRows(self, batch)


class LevelRows(FlatRows):
    """Scores that depend on the depth alone, of all levels at once."""

    @abstractmethod
    def _levels(self, fresh: list[int]) -> Iterable[Float[Tensor, "k v"]]:
        """The scores of all levels of each of these rows."""

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        fresh = self._fresh(firsts)
        if fresh:
            for i, scores in zip(fresh, self._levels(fresh), strict=True):
                self.rows[i].made = scores
        out = []
        for row, first in zip(self.rows, firsts, strict=True):
            levels = [row.level(node) for node in range(first, len(row.tree))]
            out.append(row.made[torch.tensor(levels, device=row.made.device)] if levels else self._none())
        return out

    def parallel_scores(self, places: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all levels below each (row, root)."""
        return torch.stack([self.rows[row].made for row, _ in places])


class MedusaRows(LevelRows):
    """One call for all levels of all rows."""

    def __init__(self, head: Medusa, batch: int) -> None:
        super().__init__(head.target, batch, FlatRow)
        self.head = head

    def _levels(self, fresh: list[int]) -> Float[Tensor, "r k v"]:
        return self.head.levels(torch.stack([self.rows[i].features[-1] for i in fresh]))


class Hydra(PublishedHead):
    """Level i: MLP and Linear(d -> V) on (prefix state, embeddings of the i + 1 tokens from the root on).

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
        super().__init__(parts)
        self.depth, self.shape = num_heads, shape
        d = parts.hidden
        self.prefix = DecoderLayer(shape, input_norm=True) if prefix else None
        self.prefix_norm = RMSNorm(d, shape.eps) if prefix else None
        self.mlps = nn.ModuleList(
            nn.Sequential(ResidualBlock(d, (i + 2) * d), *(ResidualBlock(d, d) for _ in range(num_blocks - 1)))
            for i in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(d, parts.vocab_size) for _ in range(num_heads))

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Hydra":
        return cls(parts, layer_shape(parts), levels or 4, layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> tuple["Hydra", dict[str, Tensor]]:
        parts = checkpoint.parts
        heads, blocks = checkpoint.count(r"hydra_mlp\.(\d+)\."), checkpoint.count(r"hydra_mlp\.0\.(\d+)\.") // 2
        vocab, hidden = checkpoint.size("hydra_lm_head.0.1.weight")
        checkpoint.check("hidden size", hidden, parts.hidden)
        checkpoint.check("vocabulary", vocab, parts.vocab_size)
        prefix = any(key.startswith("prefix_embeding_layer.") for key in checkpoint.weights)
        shape = checkpoint.layer_shape("prefix_embeding_layer.layers.0.") if prefix else layer_shape(parts)
        checkpoint.targets_rotary(shape.head_dim)
        head = cls(parts, shape, heads, blocks, prefix)
        return head, {_hydra_key(key): value for key, value in checkpoint.weights.items()}

    @staticmethod
    def published_key(key: str) -> str:
        key = re.sub(r"^mlps\.(\d+)\.(\d+)\.", lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}.", key)
        key = re.sub(r"^lm_heads\.(\d+)\.", r"hydra_lm_head.\1.1.", key)
        key = re.sub(r"^prefix\.", "prefix_embeding_layer.layers.0.", key)
        return re.sub(r"^prefix_norm\.", "prefix_embeding_layer.norm.", key)

    def config(self) -> dict[str, Any]:
        return self.shape.config()

    def own_lm_heads(self) -> list[nn.Linear]:
        return [module for module in self.lm_heads if isinstance(module, nn.Linear)]

    def prefix_states(
        self, features: Float[Tensor, "b n d"], cos: Float[Tensor, "_ n h"], sin: Float[Tensor, "_ n h"], attend: Attend
    ) -> Float[Tensor, "b n d"]:
        scaled = features / self.feature_scale
        if self.prefix is None or self.prefix_norm is None:
            return scaled
        return self.prefix_norm(self.prefix(scaled, cos, sin, attend))

    def level(self, i: int, prefix: Float[Tensor, "... d"], embedded: list[Tensor]) -> Float[Tensor, "... v"]:
        """embedded: those of the root and the i tokens below it."""
        return self.lm_heads[i](self.mlps[i](torch.cat((prefix, *(e.to(prefix.dtype) for e in embedded)), -1)))

    def open(self, batch: int, slots: int, backend: "Backend | None") -> "HydraRows":
        return HydraRows(self, batch, slots)


def _hydra_key(key: str) -> str:
    """The name of a published weight of Hydra in the module."""
    key = re.sub(r"^hydra_mlp\.(\d+)\.(\d+)\.", lambda m: f"mlps.{m[1]}.{(int(m[2]) - 1) // 2}.", key)
    key = re.sub(r"^hydra_lm_head\.(\d+)\.1\.", r"lm_heads.\1.", key)
    key = re.sub(r"^prefix_embeding_layer\.layers\.0\.", "prefix.", key)
    return re.sub(r"^prefix_embeding_layer\.norm\.", "prefix_norm.", key)


class HydraRows(FlatRows):
    """One call a level; before the first, the prefix layer on the states that are new."""

    @torch.inference_mode()
    def __init__(self, head: Hydra, batch: int, slots: int) -> None:
        of_prefix = None
        if head.prefix is not None:
            of_prefix = HeadSlots(SlotCache(planes_of(head.shape, 1, head.target), batch, slots), slots)
        super().__init__(head.target, batch, FlatRow, of_prefix)
        self.head = head

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
        for level, nodes in by_level.items():
            paths = [[self.rows[i].tokens[j] for j in self.rows[i].above(node)] for i, node in nodes]
            embedded = self.target.embed(torch.tensor(paths, device=device))
            prefix = torch.stack([self.rows[i].made for i, _ in nodes])
            scores = self.head.level(level, prefix, list(embedded.unbind(1)))
            for (i, node), score in zip(nodes, scores, strict=True):
                logits[i][node - firsts[i]] = score
        return logits

    def _read_states(self, rows: list[int]) -> None:
        """The prefix layer on every state of these rows that it has not seen, in one call where that is one chunk."""
        if self.slots is None:
            for i in rows:
                self.rows[i].made = self.rows[i].features[-1] / self.head.feature_scale
            return
        assert isinstance(self.slots.cache, SlotCache)
        while any(self.rows[i].read < len(self.rows[i].features) for i in rows):
            new = [row.features[row.read : row.read + CHUNK] for row in self.rows]
            counts = list(map(len, new))
            chains = [GrowingTree(LOW) for _ in new]
            for chain, count in zip(chains, counts, strict=True):
                chain.grow(range(-1, count - 1))
            starts = [row.read for row in self.rows]
            mask = self.slots.place(chains, starts, [0] * len(starts))
            states = pad_sequence(new, batch_first=True)
            places = torch.arange(max(counts)) + torch.tensor(starts)[:, None]
            cos, sin = self.head.rotary.angles(places.to(states.device))
            attend = cached(self.slots.cache, 0, self.slots.seen(mask, self.target))
            prefix = self.head.prefix_states(states, cos, sin, attend)
            for row, of_row, count in zip(self.rows, prefix, counts, strict=True):
                if count:
                    row.made = of_row[count - 1]
                    row.read += count
