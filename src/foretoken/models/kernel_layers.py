"""Decoder layers over packed weights in the kernel, with their slot cache: one compiled call per forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.sampling import inverse
from foretoken.core.shapes import Float
from foretoken.kernel.memory import Arena
from foretoken.kernel.sizes import ALL, COLUMNS, DOTTED, LANES, SILU, WHOLE
from foretoken.kernel.threads import ThreadChoice
from foretoken.models.chains import ChainDraws, DrawnChain
from foretoken.models.decoder_layer import array, norm_eps, read_layer
from foretoken.models.panels import PackedEmbedding

if TYPE_CHECKING:
    from foretoken.kernel.model import Entry, Head, Mlps, Nodes, Table

# The cosines and sines [n, dim] of the first n positions, in layers of a kind.
Angles = Callable[[int, str | None], tuple[Tensor, Tensor]]
LOW = np.float32(torch.finfo(torch.float32).min)
NEVER = 2**62  # levels after which a chain would turn to MLPs
NO_FLOATS, NO_IDS = np.zeros(0, np.float32), np.zeros(0, np.int64)


class KernelLayers:
    """The weights of a model or a draft head in the form that the kernel reads; shared by all batches.

    weights: of the layers.
    linears: into whose panels the addresses in `weights` point.
    embedding: as `table_of` makes it; no rows where a table is not all that embeds a token.
    serial: levels of a chain before those of `mlps`.
    threads: how many a forward runs in.
    kinds: the kinds of the layers, by their masks' names, and kind_of_layer: their places in it [layers].
    """

    entry: "Entry"
    head: "Head"
    mlps: "Mlps"
    embedding: "Table"
    vocab_size: int
    serial: int

    def __init__(
        self, layers: Sequence[Any], dim: int, scale: float, eps: float, angles: Angles, kinds: Sequence[str | None],
        curve: tuple[float, float] = SILU,
    ) -> None:  # fmt: skip
        """layers: modules as `read_layer` takes them. dim: the width of an attention head. scale: factor of queries.
        eps: of the norms of states. kinds: each layer's mask and angles, by name. curve: of the MLPs' activation."""
        from foretoken.kernel.model import Layers

        read = [read_layer(layer, dim) for layer in layers]
        first = read[0]
        self.dim, self.angles = dim, angles
        self.key_heads = first.k.out_features // dim
        width = first.gate.out_features
        wide = -(-width // LANES) * LANES
        forms = np.array([[matrix.linear.form for matrix in layer.matrices] for layer in read])
        self.linears = [matrix.linear for layer in read for matrix in layer.matrices]
        self.paired = bool((forms == DOTTED).all())
        self.kinds = list(dict.fromkeys(kinds))
        self.kind_of_layer = np.array([self.kinds.index(kind) for kind in kinds])
        before = [x.before_mlp if x.before_attention is None else x.before_attention for x in read]
        self.weights = Layers(
            query_heads=first.q.out_features // dim,
            key_heads=self.key_heads,
            dim=dim,
            width=width,
            wide=wide,
            paired=self.paired,
            eps=np.float32(eps),
            head_eps=np.float32(norm_eps(layers[0].self_attn.q_norm) if len(first.head_norms) else 0),
            scale=np.float32(scale),
            low=LOW,
            curve=(np.float32(curve[0]), np.float32(curve[1])),
            bare=np.array([x.before_attention is None for x in read]),
            norms=np.stack([np.stack(pair) for pair in zip(before, [x.before_mlp for x in read], strict=True)]),
            norms_after=np.stack([x.after for x in read]),
            head_norms=np.stack([x.head_norms for x in read]),
            kinds=self.kind_of_layer,
            weights=np.array([[matrix.address for matrix in layer.matrices] for layer in read]),
            forms=forms,
            to_qkv=np.stack([np.concatenate([x.q.bias(), x.k.bias(), x.v.bias()]) for x in read]),
            to_out=np.stack([x.out.bias() for x in read]),
            to_gate=np.stack([np.concatenate([x.gate.bias(wide), x.up.bias(wide)]) for x in read]),
            to_down=np.stack([x.down.bias() for x in read]),
        )
        self.threads = ThreadChoice()

    def halve_cache(self) -> None:
        """Let caches that are opened from now on be in bfloat16 where the weights are quantised, which takes less time.

        As a target, Qwen2.5 Q4_K_M would be further from float32 by a fifth: the entry of 2026-11-26 on an Intel
        processor in docs/LOG.md.
        """
        self.paired = bool((self.weights.forms >= DOTTED).all())

    @property
    def drafts_chains(self) -> bool:
        """Whether a chain can be drafted in one call: compiled loops do not look whether a token that was drawn is in
        the embedding."""
        return self.head.address != 0 and len(self.embedding.rows) >= self.vocab_size


class KernelSlots:
    """The slot cache of a batch in the kernel's layout; the same calls as SlotCache, and the layers themselves.

    keys, values: of every layer as attention.py has them.
    paired: whether they are bfloat16, two to a word, else float32.
    """

    def __init__(self, layers: KernelLayers, batch: int, slots: int, host: "KernelSlots | None" = None) -> None:
        """host: a cache of the same shape that is used instead of one of its own."""
        from foretoken.kernel.model import Cache, Model

        self.layers = layers
        self.paired = layers.paired if host is None else host.paired
        per_word = 2 if self.paired else 1
        if host is None:
            arena, panels = Arena(), slots // COLUMNS + 1  # one slot takes the writes of padding
            shape = len(layers.weights.weights), batch, layers.key_heads
            self.keys = arena.zeros((*shape, panels, layers.dim // per_word, COLUMNS), np.float32)
            self.values = arena.zeros((*shape, panels * COLUMNS // per_word, layers.dim), np.float32)
        else:
            self.keys, self.values = host.keys, host.values
        # [.., slots / per_word, dim, per_word]: a slot's values by themselves
        numbers = self.values.view(np.uint16 if self.paired else np.float32)
        self._by_slot = numbers.reshape(*self.values.shape, per_word)
        angles = [layers.angles(slots, kind) for kind in layers.kinds]
        cos, sin = [torch.stack(part).numpy() for part in zip(*angles, strict=True)]
        cache, weights = Cache(self.keys, self.values, cos, sin), layers.weights
        self.model = Model(
            weights._replace(paired=self.paired), cache, layers.embedding, layers.entry, layers.head, layers.serial,
            layers.mlps,
        )  # fmt: skip
        self._rows, self._slots, self._used = slice(0), np.zeros((0, 0), np.int64), 0

    def place(self, rows: slice, start: int | Sequence[Sequence[int]], n: int, used: int) -> None:
        """Set where the next forward of `rows` writes its n nodes and that it reads slots [0, used)."""
        self._rows, self._used = rows, used
        if isinstance(start, int):
            self._slots = np.arange(start, start + n)[None].repeat(rows.stop - rows.start, 0)
        else:
            self._slots = np.array(start)

    def _nodes(self, positions: np.ndarray, masks: Mapping[str, np.ndarray | None]) -> "Nodes":
        """The nodes whose slots were set. positions: of each, in one axis [batch * n]. masks: by kind of layer,
        None where all is seen."""
        from foretoken.kernel.model import Nodes

        given = [masks[kind or ""] for kind in self.layers.kinds] if len(masks) > 1 else masks.values()
        b, n = self._slots.shape
        seen = tuple([np.zeros((b, 1, n, 0), np.float32) if mask is None else mask for mask in given])
        return Nodes(positions, self._slots, self._rows.start, self._used, seen, self.layers.kind_of_layer)

    def _draft(
        self, row: int, past: Sequence[int], read: Sequence[int], states: np.ndarray, start: int, draws: ChainDraws
    ) -> tuple[DrawnChain, Float[Tensor, "_ d"]]:
        """The chain after the tokens `read`, which follow a row's committed text, and the states made of the nodes,
        zeros where no forward was run; see kernel.chain.draft_chain.

        past, states: see kernel.chain.Text. Raises IndexError for a token beyond the embedding.
        """
        from foretoken.kernel.chain import Drafted, Drawing, Text, draft_chain

        looked_up, unread = np.array(past, np.int64), np.array(read)
        for tokens in (looked_up, unread):
            check_known(tokens, self.layers.embedding)
        text = Text(looked_up, unread, states, row, start)
        levels, m, width = len(draws.u), len(read), self.layers.vocab_size
        likeliest = draws.likeliest or draws.temperature == 0
        factor, truncation = inverse(draws.temperature or 1.0), draws.truncation if draws.temperature else ALL
        drawing = Drawing(draws.u.numpy(), likeliest, factor, truncation, np.array(draws.floors, np.float64))
        make = np.zeros if len(self.layers.head.columns) else np.empty
        q = make((0 if likeliest else levels, width), np.float32)
        made = np.zeros((m + levels - 1, self.layers.embedding.width), np.float32)
        drafted = Drafted(np.empty(levels, np.int64), q, np.empty(levels), made)
        with self.layers.threads.forward(torch.get_num_threads(), m, levels) as run:
            done, run.forwards = draft_chain(self.model, text, drawing, drafted, run.threads)
        chain = DrawnChain(drafted.tokens[:done].tolist(), torch.from_numpy(q[:done]), drafted.sure[:done].tolist())
        return chain, torch.from_numpy(made[: max(0, m + done - 1)])

    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Copy the slots start + nodes of a row to start, start + 1, ... in every layer."""
        source, place = np.array(nodes) + start, np.arange(start, start + len(nodes))
        keys, values = self.keys[:, row], self._by_slot[:, row]
        keys[:, :, place // COLUMNS, :, place % COLUMNS] = keys[:, :, source // COLUMNS, :, source % COLUMNS]
        of_word = values.shape[-1]
        values[:, :, place // of_word, :, place % of_word] = values[:, :, source // of_word, :, source % of_word]

    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` slots of row `source` to row `target`."""
        panels, words = -(-used // COLUMNS), -(-used // self._by_slot.shape[-1])
        self.keys[:, target, :, :panels] = self.keys[:, source, :, :panels]
        self.values[:, target, :, :words] = self.values[:, source, :, :words]

    def read(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """A copy of a row's slots [start, end) in every layer, for `write`; of whole panels, so that it also holds what
        comes before `start` in its panel."""
        return tuple(torch.from_numpy(part.copy()) for part in self._panels(row, start, end))

    def write(self, row: int, start: int, end: int, parts: Sequence[Tensor]) -> None:
        """Put what `read` gave into slots [start, end) of a row whose text before `start` is the same."""
        for place, part in zip(self._panels(row, start, end), parts, strict=True):
            place[...] = part.numpy()

    def _panels(self, row: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of the keys and the values of a row's panels that hold the slots [start, end)."""
        first, last = start // COLUMNS, -(-end // COLUMNS)
        words = COLUMNS // self._by_slot.shape[-1]
        return self.keys[:, row, :, first:last], self.values[:, row, :, first * words : last * words]


def check_known(tokens: np.ndarray, table: "Table") -> None:
    """Raises IndexError for a token beyond `table`, since compiled loops do not look."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(table.rows):
        raise IndexError(f"Token {tokens.max()} has no embedding: the model has {len(table.rows)}.")


def table_of(embedding: nn.Embedding | PackedEmbedding) -> "Table":
    """An embedding as the kernel reads it: bfloat16 and quantised rows as they are stored, since a float32 copy of a
    large vocabulary takes a gigabyte; all else in float32."""
    from foretoken.kernel.model import Table

    if isinstance(embedding, PackedEmbedding):
        return Table(embedding.raw, embedding.form, embedding.embedding_dim, np.float32(embedding.scale))
    weight = embedding.weight.detach()
    bits = weight.dtype == torch.bfloat16
    rows = weight.contiguous().view(torch.int16).numpy().view(np.uint16) if bits else array(weight)
    scale = getattr(embedding, "embed_scale", None)  # Gemma's
    factor = 1.0 if scale is None else float(scale.to(weight.dtype))
    return Table(rows, WHOLE, embedding.embedding_dim, np.float32(factor))
