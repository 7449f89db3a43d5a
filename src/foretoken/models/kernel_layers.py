"""Decoder layers over packed weights in the kernel, with their slot cache: one compiled call per forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.sampling import inverse
from foretoken.core.shapes import Float
from foretoken.kernel.memory import Arena
from foretoken.kernel.sizes import ALL, COLUMNS, DOTTED, HALVED, LANES, SILU, WHOLE
from foretoken.kernel.threads import ThreadChoice
from foretoken.models.cache import Place, Slots
from foretoken.models.chains import ChainDraws, DrawnChain
from foretoken.models.decoder_layer import array, first_attention, head_norm, norm_eps, read_layer
from foretoken.models.experts import PanelMixture
from foretoken.models.panels import PackedEmbedding

if TYPE_CHECKING:
    from foretoken.kernel.model import Entry, Head, Mlps, Nodes, Table

# (n, kind of layer) -> the cosines and sines by which the first n positions are rotated there, each [n, dim].
Angles = Callable[[int, str | None], tuple[Tensor, Tensor]]
LOW = np.float32(torch.finfo(torch.float32).min)
NEVER = 2**62  # `serial` where there are no MLPs: more levels than any chain has
NO_FLOATS, NO_IDS = np.zeros(0, np.float32), np.zeros(0, np.int64)


class KernelLayers:
    """The weights of a model or a draft head in the form that the kernel reads; shared by all batches.

    entry, head, mlps: what stands before and behind the layers, see kernel/model.py.
    embedding: from `table_of`; without rows where embedding a token takes more than looking up a row.
    vocab_size: V, the number of logits.
    serial: number of levels of a chain that the layers draft; further ones come from `mlps`.
    records: what the kernel must know of each layer, with addresses of its weights [layers] LAYER of kernel/layer.py.
    linears, mixtures, arrays: the modules and arrays of which `records` holds addresses, kept here so that their memory
        stays; a layer without experts has None among `mixtures`.
    paired: whether new caches are in bfloat16.
    kinds: the names of the different kinds of layers; layers of one kind have the same masks and angles.
    rotated: per layer whether queries and keys are rotated; where they are not, all angles are 0.
    convolved: per layer whether it has a short convolution instead of attention.
    width: d, the width of the states.
    threads: chooses how many threads a forward runs in.
    """

    entry: "Entry | None" = None
    head: "Head"
    mlps: "Mlps | None" = None
    embedding: "Table"
    vocab_size: int
    serial: int = NEVER

    def __init__(
        self, layers: Sequence[Any], dim: int, scale: float, eps: float, angles: Angles, kinds: Sequence[str | None],
        curve: tuple[float, float] = SILU, rotated: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        """Read the weights of some layers. Subclasses set head, embedding and vocab_size; draft heads also the others.

        layers: modules as `read_layer` takes them.
        dim: the width of an attention head.
        scale: the factor of the queries.
        eps: what the norms of states add to the mean square.
        angles: the rotary angles by number of positions and kind of layer.
        kinds: per layer the name of its kind; None where a model has but one.
        curve: the MLPs' activation, SILU or GELU of kernel/sizes.py.
        rotated: per layer whether queries and keys are rotated by their positions; empty where all layers rotate them.
        """
        from foretoken.kernel.layer import LAYER, machine_code

        read = [read_layer(layer, dim) for layer in layers]
        self.convolved, self.width = np.array([len(x.filters) > 0 for x in read]), len(read[0].before_mlp)
        first = read[np.argmin(self.convolved)]  # that with attention
        self.dim, self.angles, self.key_heads = dim, angles, first.k.out_features // dim
        widths = [x.gate.out_features for x in read]
        wides = [-(-width // LANES) * LANES for width in widths]
        self.linears = [matrix.linear for layer in read for matrix in layer.matrices]
        self.paired = all(linear.form == DOTTED for linear in self.linears)
        self.kinds, self.rotated = list(dict.fromkeys(kinds)), rotated or [True] * len(layers)
        self.records = t = np.zeros(len(read), LAYER)
        t["query_heads"], t["key_heads"], t["dim"] = first.q.out_features // dim, self.key_heads, dim
        t["query_heads"][self.convolved] = t["key_heads"][self.convolved] = 1
        t["dim"][self.convolved] = self.width
        t["width"], t["wide"], t["kind"] = widths, wides, [self.kinds.index(kind) for kind in kinds]
        t["picks"] = 1
        t["bare"] = [x.before_attention is None for x in read]
        t["normed_heads"], t["settled"] = len(first.head_norms) > 0, len(first.after) > 0
        t["taps"] = [len(x.filters) for x in read]
        t["eps"], t["scale"], t["low"], (t["linear"], t["cubic"]) = eps, scale, LOW, curve
        t["head_eps"] = norm_eps(head_norm(first_attention(layers))) if len(first.head_norms) else 0
        before = [x.before_mlp if x.before_attention is None else x.before_attention for x in read]
        self.arrays = {
            "norms": [np.stack(pair) for pair in zip(before, [x.before_mlp for x in read], strict=True)],
            "norms_after": [x.after for x in read],
            "head_norms": [x.head_norms for x in read],
            "weights": [np.array([matrix.address for matrix in layer.matrices]) for layer in read],
            "forms": [np.array([matrix.linear.form for matrix in layer.matrices]) for layer in read],
            "to_qkv": [np.concatenate([x.q.bias(), x.k.bias(), x.v.bias()]) for x in read],
            "to_out": [x.out.bias() for x in read],
            "to_gate": [np.concatenate([x.gate.bias(n), x.up.bias(n)]) for x, n in zip(read, wides, strict=True)],
            "to_down": [x.down.bias() for x in read],
            "filters": [x.filters for x in read],
        }
        if self.convolved.any():
            from foretoken.kernel.convolution import convolution

            t["mixer"][self.convolved] = machine_code("foretoken_convolution", convolution).address[0]
        self.mixtures = [x.mixture for x in read]
        for i, mixture in enumerate(self.mixtures):
            if mixture is not None:
                self._add_experts(i, mixture)
        for name, arrays in self.arrays.items():
            t[name] = [array.ctypes.data for array in arrays]
        self.threads = ThreadChoice()

    def _add_experts(self, layer: int, mixture: PanelMixture) -> None:
        """Complete the record of a layer with experts; layer: its number. mixture: its MLP."""
        from foretoken.kernel.experts import experts
        from foretoken.kernel.layer import machine_code

        t = self.records[layer : layer + 1]
        t["mlp"] = machine_code("foretoken_experts", experts).address[0]
        t["experts"], t["picks"], t["normed_shares"] = mixture.experts, mixture.picks, mixture.normed
        for name, of_router in {"weights": mixture.router.address, "forms": mixture.router.form}.items():
            self.arrays[name][layer] = np.append(self.arrays[name][layer], of_router)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelLayers":
        """Return this object: addresses of copied weights would be others, and the weights are only read."""
        return self

    def open(self, batch: int, slots: int) -> "KernelSlots":
        """Allocate a slot cache for `batch` rows of `slots` slots each."""
        return KernelSlots(self, batch, slots)

    def halve_cache(self) -> None:
        """Let caches that are opened from now on be in bfloat16 where all layers' weights are quantised.

        This takes less time, and is for drafters: as a target, Qwen2.5 Q4_K_M would be further from float32 by a fifth
        (the entry of 2026-11-26 on an Intel processor in docs/LOG.md).
        """
        self.paired = all(linear.form >= DOTTED for linear in self.linears)

    @property
    def drafts_chains(self) -> bool:
        """Whether a whole chain can be drafted in one compiled call: the kernel has the LM head and all embeddings.

        Compiled loops do not check that a drawn token has an embedding.
        """
        return self.head.address != 0 and len(self.embedding.rows) >= self.vocab_size


class KernelSlots(Slots):
    """The slot cache of a batch in the kernel's layout; subclasses add forwards.

    layers: the weights.
    keys, values: those of every layer with attention [layers, batch, ...], laid out as in kernel/attention.py.
    paired: whether they are bfloat16, two in a word of 32 bits, else float32.
    inputs: what the convolutions of the other layers read of each token [layers, batch, slots, d or d / 2].
    cos, sin: cosines and sines of every position, by kind of layer [kinds, positions, dim]; one more kind, the last,
        where some layers do not rotate.
    model: weights and cache together, as compiled functions take them.
    """

    def __init__(self, layers: KernelLayers, batch: int, slots: int, host: "KernelSlots | None" = None) -> None:
        """Allocate the cache.

        layers: the weights.
        batch: the number of rows.
        slots: slots per row.
        host: a cache of the same shape whose memory is used instead; None: memory of its own.
        """
        from foretoken.kernel.model import Model

        self.layers = layers
        self.paired = layers.paired if host is None else host.paired
        per_word = 2 if self.paired else 1
        if host is None:
            arena, panels = Arena(), slots // COLUMNS + 1  # one slot takes the writes of padding
            shape = int(np.sum(~layers.convolved)), batch, layers.key_heads
            self.keys = arena.zeros((*shape, panels, layers.dim // per_word, COLUMNS), np.float32)
            self.values = arena.zeros((*shape, panels * COLUMNS // per_word, layers.dim), np.float32)
            shape = int(np.sum(layers.convolved)), batch, panels * COLUMNS, layers.width // per_word
            self.inputs = arena.zeros(shape, np.float32)
        else:
            self.keys, self.values, self.inputs = host.keys, host.values, host.inputs
        # Values with an axis for the numbers in a word [.., slots / per_word, dim, per_word], to copy single slots.
        numbers = self.values.view(np.uint16 if self.paired else np.float32)
        self._by_slot = numbers.reshape(*self.values.shape, per_word)
        angles = [layers.angles(slots, kind) for kind in layers.kinds]
        if not all(layers.rotated):  # angles of 0
            angles.append((torch.ones(slots, layers.dim), torch.zeros(slots, layers.dim)))
        self.cos, self.sin = [torch.stack(part).numpy() for part in zip(*angles, strict=True)]
        records = layers.records.copy()
        records["paired"], records["panels"], records["positions_known"] = self.paired, self.keys.shape[3], slots
        for name, parts in {"keys": self.keys, "values": self.values}.items():
            records[name][~layers.convolved] = [part.ctypes.data for part in parts]
        records["values"][layers.convolved] = [part.ctypes.data for part in self.inputs]
        for name, parts in {"cos": self.cos, "sin": self.sin}.items():
            places = [kind if turns else -1 for kind, turns in zip(records["kind"], layers.rotated, strict=True)]
            records[name] = [parts[place].ctypes.data for place in places]
        self.model = Model(records, layers.embedding, layers.entry, layers.head, layers.serial, layers.mlps)

    def place(self, at: Place) -> None:
        """Set which slots the next forward reads and writes; at: these slots."""
        self.at = at

    def _nodes(self, positions: np.ndarray, masks: Mapping[str, np.ndarray | None]) -> "Nodes":
        """Return the nodes whose slots `place` has set, as compiled functions take them.

        positions: of each node, row after row [batch * n].
        masks: per kind of layer its mask [batch, 1, n, used], None where all slots are seen; one mask is for all kinds.
        """
        from foretoken.kernel.model import Nodes

        given = [masks[kind or ""] for kind in self.layers.kinds] if len(masks) > 1 else masks.values()
        slots = self.at.slots
        b, n = slots.shape
        seen = tuple([np.zeros((b, 1, n, 0), np.float32) if mask is None else mask for mask in given])
        return Nodes(positions, slots, self.at.rows.start, self.at.used, seen)

    def draft_chain(
        self, row: int, past: Sequence[int], read: Sequence[int], start: int, draws: ChainDraws,
        states: np.ndarray | None = None,
    ) -> tuple[DrawnChain, Float[Tensor, "_ d"]]:  # fmt: skip
        """Draw a chain of tokens as forwards, softmax and draws per level would, bit for bit.

        row: the index of the row.
        past: ids in which guesses of the next tokens are looked up, which saves forwards; see kernel.chain.Text.
        read: ids that follow the row's committed tokens.
        start: the slot, and the position, of the first of them.
        draws: how tokens are drawn, and how many at most.
        states: of a draft head the states that it reads beside `read` [tokens, d]; None for a language model.

        Returns the chain, and the states after its read tokens [tokens, d], zeros where no forward was run. Raises
        IndexError for a token beyond the embedding.
        """
        from foretoken.kernel.chain import Drafted, Drawing, Text, draft_chain

        if states is None:
            states = np.zeros((0, self.layers.embedding.width), np.float32)
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
        """Copy slots to start, start + 1, ...; row, start, nodes: as in `Slots.move`."""
        source, place = np.array(nodes) + start, np.arange(start, start + len(nodes))
        keys, values = self.keys[:, row], self._by_slot[:, row]
        keys[:, :, place // COLUMNS, :, place % COLUMNS] = keys[:, :, source // COLUMNS, :, source % COLUMNS]
        of_word = values.shape[-1]
        values[:, :, place // of_word, :, place % of_word] = values[:, :, source // of_word, :, source % of_word]
        self.inputs[:, row, place] = self.inputs[:, row, source]

    def _views(self, row: int, start: int, end: int) -> list[Tensor]:
        """Return the panels of a row that hold the slots [start, end): `write` needs the same text in all of them.

        Last comes what convolutions read in these slots.
        """
        first, last = start // COLUMNS, -(-end // COLUMNS)
        words = COLUMNS // self._by_slot.shape[-1]
        values = self.values[:, row, :, first * words : last * words]
        parts = self.keys[:, row, :, first:last], values, self.inputs[:, row, start:end]
        return [torch.from_numpy(part) for part in parts]


def check_known(tokens: np.ndarray, table: "Table") -> None:
    """Raise IndexError where one of `tokens` [m] has no row in `table`, which compiled loops do not check."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(table.rows):
        raise IndexError(f"Token {tokens.max()} has no embedding: the model has {len(table.rows)}.")


def table_of(embedding: nn.Embedding | PackedEmbedding) -> "Table":
    """Return an embedding as the kernel reads it.

    Rows in bfloat16 and quantised ones stay as they are stored, since a float32 copy of a large vocabulary takes a
    gigabyte; all others become float32.

    embedding: the module; a factor of its own, such as Gemma's, is kept.
    """
    from foretoken.kernel.model import Table

    if isinstance(embedding, PackedEmbedding):
        return Table(embedding.raw, embedding.form, embedding.embedding_dim, np.float32(embedding.scale))
    weight = embedding.weight.detach()
    form = HALVED if weight.dtype == torch.bfloat16 else WHOLE
    rows = weight.contiguous().view(torch.int16).numpy() if form == HALVED else array(weight)
    scale = getattr(embedding, "embed_scale", None)  # Gemma's
    factor = 1.0 if scale is None else float(scale.to(weight.dtype))
    return Table(rows.view(np.uint8), form, embedding.embedding_dim, np.float32(factor))
