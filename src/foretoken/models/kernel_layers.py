"""Decoder layers of the Llama family over packed weights, with their slot cache: one compiled call per forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.sampling import Truncation, inverse
from foretoken.core.shapes import Float
from foretoken.kernel.memory import Arena
from foretoken.kernel.sizes import COLUMNS, DOTTED, LANES, WHOLE
from foretoken.kernel.threads import ThreadChoice
from foretoken.models.features import FINAL, FeatureStore
from foretoken.models.panels import PackedEmbedding, PanelLinear

if TYPE_CHECKING:
    from foretoken.kernel.chain import Text
    from foretoken.kernel.model import Entry, Head, Mlps, Nodes, Table, Wanted

# The cosines and sines [n, dim] of the first n positions.
Angles = Callable[[int], tuple[Tensor, Tensor]]
LOW = np.float32(torch.finfo(torch.float32).min)
NEVER = 2**62  # levels after which a chain would turn to MLPs
NO_FLOATS, NO_IDS = np.zeros(0, np.float32), np.zeros(0, np.int64)
NO_STATES = np.zeros((0, 0, 0), np.float32)


class KernelLayers:
    """The weights of a model or a draft head in the form that the kernel reads; shared by all batches.

    weights: of the layers.
    panels: what the addresses in `weights` point into.
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
        self, layers: Sequence[Any], dim: int, scale: float, eps: float, angles: Angles, kinds: Sequence[str | None]
    ) -> None:
        """layers: modules with the names of Llama's, their linear ones packed; input_layernorm None: attention reads
        what enters the layer as it is. kinds: each layer's mask, by name."""
        from foretoken.kernel.model import Layers

        attention = layers[0].self_attn
        self.dim, self.angles = dim, angles
        self.key_heads = attention.k_proj.out_features // dim
        width: int = layers[0].mlp.gate_proj.out_features
        wide = -(-width // LANES) * LANES
        after = [array(x.post_attention_layernorm.weight) for x in layers]
        before = [x.input_layernorm for x in layers]
        norms = [
            np.stack([y if norm is None else array(norm.weight), y]) for norm, y in zip(before, after, strict=True)
        ]
        head_norms, head_eps = np.zeros((0, 2, dim), np.float32), 0.0
        if hasattr(attention, "q_norm"):  # Qwen3: each query and key head by itself
            both = [(x.self_attn.q_norm.weight, x.self_attn.k_norm.weight) for x in layers]
            head_norms = np.stack([np.stack([array(q), array(k)]) for q, k in both])
            head_eps = attention.q_norm.variance_epsilon
        linears = [_linears(x) for x in layers]
        self.panels = [linear.panels for row in linears for linear in row]
        forms = np.array([[linear.form for linear in row] for row in linears])
        self.paired = bool((forms == DOTTED).all())
        self.weights = Layers(
            query_heads=attention.q_proj.out_features // dim,
            key_heads=self.key_heads,
            dim=dim,
            width=width,
            wide=wide,
            paired=self.paired,
            eps=np.float32(eps),
            head_eps=np.float32(head_eps),
            scale=np.float32(scale),
            low=LOW,
            bare=np.array([norm is None for norm in before]),
            norms=np.stack(norms),
            head_norms=head_norms,
            weights=np.array([[linear.address for linear in row] for row in linears]),
            forms=forms,
            to_qkv=np.stack([np.concatenate([bias_of(p) for p in row[:3]]) for row in linears]),
            to_out=np.stack([bias_of(row[3]) for row in linears]),
            to_gate=np.stack([np.concatenate([bias_of(p, wide) for p in row[4:6]]) for row in linears]),
            to_down=np.stack([bias_of(row[6]) for row in linears]),
        )
        self.threads = ThreadChoice()
        self.kinds = list(dict.fromkeys(kinds))
        self.kind_of_layer = np.array([self.kinds.index(kind) for kind in kinds])

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
        cos, sin = layers.angles(slots)
        cache, weights = Cache(self.keys, self.values, cos.numpy(), sin.numpy()), layers.weights
        self.model = Model(
            weights._replace(paired=self.paired), cache, layers.embedding, layers.entry, layers.head, layers.serial,
            layers.mlps,
        )  # fmt: skip
        self._rows, self._slots, self._used = slice(0), np.zeros((0, 0), np.int64), 0

    @property
    def drafts_chains(self) -> bool:
        return self.layers.drafts_chains

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

    def _text(self, row: int, past: Sequence[int], read: Sequence[int], states: np.ndarray, start: int) -> "Text":
        """The tokens `read` after a row's committed text, for a compiled chain.

        past, states: see kernel.chain.Text. Raises IndexError for a token beyond the embedding.
        """
        from foretoken.kernel.chain import Text

        looked_up, unread = np.array(past, np.int64), np.array(read)
        for tokens in (looked_up, unread):
            check_known(tokens, self.layers.embedding)
        return Text(looked_up, unread, states, row, start)

    def _draft(
        self,
        text: "Text",
        u: Float[Tensor, "n 1"],
        temperature: float,
        floor: float,
        truncation: Truncation,
    ) -> tuple[list[int], Float[Tensor, "_ v"], Float[Tensor, "_ d"]]:
        """The chain after a text: tokens, the q of each, and the states made of the nodes, zeros where no forward was
        run; see kernel.chain.draft_chain."""
        from foretoken.kernel.chain import Drafted, Drawing, draft_chain

        levels, m, width = len(u), len(text.tokens), self.layers.vocab_size
        make = np.zeros if len(self.layers.head.columns) else np.empty
        q = make((levels if temperature > 0 else 0, width), np.float32)
        made = np.zeros((m + levels - 1, self.layers.embedding.width), np.float32)
        drafted = Drafted(np.empty(levels, np.int64), q, made)
        drawing = Drawing(u.numpy(), factor_at(temperature), truncation, floor)
        with self.layers.threads.forward(torch.get_num_threads(), m, levels) as run:
            done, run.forwards = draft_chain(self.model, text, drawing, drafted, run.threads)
        states = torch.from_numpy(made[: max(0, m + done - 1)])
        return drafted.tokens[:done].tolist(), torch.from_numpy(q[:done]), states

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


def wanted_of(features: FeatureStore | None, layers: int, m: int, d: int) -> "Wanted":
    """Room for the states of m nodes that `features` wants, the inputs of so many layers or FINAL."""
    from foretoken.kernel.model import Wanted

    if features is None:
        return Wanted(NO_IDS, NO_STATES)
    wanted = [layers if layer == FINAL else layer for layer in features.distinct]
    return Wanted(np.array(wanted, np.int64), np.empty((len(wanted), m, d), np.float32))


def check_known(tokens: np.ndarray, table: "Table") -> None:
    """Raises IndexError for a token beyond `table`, since compiled loops do not look."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(table.rows):
        raise IndexError(f"Token {tokens.max()} has no embedding: the model has {len(table.rows)}.")


def bias_of(linear: PanelLinear, width: int | None = None) -> np.ndarray:
    """The bias, zeros where there is none, with zeros up to `width`."""
    out = np.zeros(width or linear.out_features, np.float32)
    if linear.bias is not None:
        out[: linear.out_features] = array(linear.bias)
    return out


def array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().float().numpy()


def table_of(embedding: nn.Embedding | PackedEmbedding) -> "Table":
    """An embedding as the kernel reads it: bfloat16 and quantised rows as they are stored, since a float32 copy of a
    large vocabulary takes a gigabyte; all else in float32."""
    from foretoken.kernel.model import Table

    if isinstance(embedding, PackedEmbedding):
        return Table(embedding.raw, embedding.form, embedding.embedding_dim)
    weight = embedding.weight.detach()
    bits = weight.dtype == torch.bfloat16
    rows = weight.contiguous().view(torch.int16).numpy().view(np.uint16) if bits else array(weight)
    return Table(rows, WHOLE, embedding.embedding_dim)


def factor_at(temperature: float) -> np.float32:
    """What scores are multiplied by; 0 at 0."""
    return inverse(temperature) if temperature > 0 else np.float32(0)


def _linears(layer: Any) -> list[PanelLinear]:
    a, mlp = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
