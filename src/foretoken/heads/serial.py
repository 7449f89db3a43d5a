"""Heads that draft token after token with a small Transformer of their own: what they share, and the rows that draft.

With h_i the target's state at position i and x_{i+1} the token after it, one step maps (x_{i+1}, h_i) to a state o_i
that stands for h_{i+1}; the target's LM head on it gives q of x_{i+2}. The next step takes o_i in place of the target's
state. In the cache of a head's layers slot j - 1 holds token x_j, since a row's first token is never scored.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from foretoken.core.errors import NotFiniteError
from foretoken.core.shapes import Float, Int
from foretoken.heads.head import Head, PublishedHead
from foretoken.heads.layer import Attend, LayerShape, cached
from foretoken.heads.layouts import EMBEDDING
from foretoken.heads.rows import CHUNK, HeadRow, HeadRows, HeadSlots, planes_of
from foretoken.models.cache import Planes, SlotCache
from foretoken.models.chains import ChainDraws, DrawnChain, draw_levels
from foretoken.models.kernel_layers import KernelSlots
from foretoken.models.panels import use_threads
from foretoken.models.parts import TargetParts
from foretoken.models.static import StaticForward, StaticRows, TracedCache

if TYPE_CHECKING:
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.head import Backend
    from foretoken.heads.kernel import EagleKernel


class Serial(Head):
    """What drafting needs of such a head.

    width: of its states. planes: what each of its layers keeps of a token. window: how far back its layers see, in
    positions; None: as far as the text goes.
    """

    width: int
    planes: Planes
    window: int | None = None

    def embed(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """What the head reads for a token."""
        return self.target.embed(ids)

    def enter(self, features: Float[Tensor, "... f"]) -> Float[Tensor, "... d"]:
        """The target's states in the form of the head's own."""
        return features / self.feature_scale

    @abstractmethod
    def made(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        positions: Int[Tensor, "b n"],
        cache: Cache,
        mask: Float[Tensor, "b 1 n used"] | None,
    ) -> Float[Tensor, "b n d"]:
        """The states o of new nodes, from their tokens' embeddings and the states before them.

        positions: of these states. cache: where the nodes' keys and values go, to the slots that were set. mask: 0 for
        the slots that a node sees, LOW for others; None: it sees all.
        """

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Scores of the token that follows a node, from its state o."""
        return self.target.logits(states * self.feature_scale)

    def draft_logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... c"]:
        """The same over the vocabulary that the head scores."""
        return self.logits(states)

    @property
    def columns(self) -> Int[Tensor, " c"] | None:
        """The target ids of the vocabulary that the head scores, None where that is the target's."""
        return None

    def forward_of(self, name: str) -> StaticForward:
        """Its forwards as a GPU records them: plain ones until `compiling` is set. name: for messages."""
        return StaticForward(self, name, self.planes, compiled=False, step=traced)

    def open(self, batch: int, slots: int, backend: "Backend | None") -> "SerialRows":
        return SerialRows(self, batch, slots, backend)


class SerialLayers(Serial, PublishedHead):
    """One with layers of our own, which can be trained.

    shape, num_layers: of its decoder layers. embed_tokens: an embedding of its own, None where it borrows the target's.
    """

    embed_tokens: nn.Embedding | None

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int) -> None:
        super().__init__(parts)
        self.shape, self.num_layers = shape, num_layers
        self.width, self.planes = shape.hidden, planes_of(shape, num_layers, parts)
        self.embed_tokens = None

    def take_own(self, checkpoint: "Checkpoint") -> None:
        """Make room for what a checkpoint has instead of the target's: rotary positions and an embedding.

        Raises ForetokenError where its embedding is of another vocabulary, or missing though the target's is not as
        wide as the head.
        """
        self.rotary = checkpoint.rotary(self.shape.head_dim)
        if EMBEDDING in checkpoint.weights:
            rows, width = checkpoint.size(EMBEDDING)
            checkpoint.check("vocabulary", rows, self.target.vocab_size)
            self.embed_tokens = nn.Embedding(rows, width)
        elif self.shape.hidden != self.target.hidden:
            checkpoint.size(EMBEDDING)

    def embed(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        return self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)

    def config(self) -> dict[str, Any]:
        return self.rotary.config | self.shape.config()

    @abstractmethod
    def step(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        cos: Float[Tensor, "_ n h"],
        sin: Float[Tensor, "_ n h"],
        attends: list[Attend],
    ) -> Float[Tensor, "b n d"]:
        """As `made`. cos, sin: the rotary angles of the positions. attends: the attention of each layer."""

    @no_type_check
    def made(self, embedded, states, positions, cache, mask):
        attends = [cached(cache, layer, mask) for layer in range(self.num_layers)]
        return self.step(embedded, states, *self.rotary.angles(positions), attends)


KIND = ""  # of all layers of a head


@no_type_check
def traced(head, of_layer, layers, scored, nodes, states, masks, planes):
    """`models.static.step` of a head, which gives what `plain_step` does. states: see there."""
    ids, positions, slots = nodes
    return plain_step(head, scored, ids, positions, states, TracedCache(planes, of_layer, slots), masks)


@no_type_check
def plain_step(head, scored, ids, positions, states, cache, mask):
    """Scores of the head's own vocabulary [b, n, c] after nodes, and their states o; the states alone where not
    `scored`.

    ids: of the nodes [b, n]. positions, states, cache, mask: as `Serial.made` takes them.
    """
    made = head.made(head.embed(ids), states, positions, cache, mask)
    return (head.draft_logits(made), made) if scored else (made,)


class EagleSlots(KernelSlots):
    """The slot cache of a batch, the head's `step` and `logits` over it, and whole chains."""

    layers: "EagleKernel"

    def step(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        positions: np.ndarray,
        mask: np.ndarray | None,
    ) -> Float[Tensor, "b n d"]:
        """For the nodes whose slots were set. positions [b, n]; mask [b, 1, n, used] of 0 and low, or None."""
        from foretoken.kernel.heads import step

        of_tokens, before = _rows(embedded), _rows(states)
        x = np.empty_like(before)
        step(self.model, of_tokens, before, self._nodes(positions.reshape(-1), {"": mask}), x, use_threads())
        return torch.from_numpy(x).view(states.shape)

    def logits(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """Over the head's own vocabulary, from states that `step` gave."""
        from foretoken.kernel.model import scores

        head = self.layers.head
        if head.address == 0:
            return self.layers.module.logits(states)
        flat = states.reshape(-1, states.shape[-1]).contiguous().numpy()
        out = np.empty((len(flat), len(head.columns) or self.layers.vocab_size), np.float32)
        scores(flat, head, out, use_threads())
        return torch.from_numpy(out).view(*states.shape[:-1], -1)

    def parallel(self, embedded: Float[Tensor, "n k d"], states: Float[Tensor, "n k d"]) -> Float[Tensor, "n m d"]:
        """`Gumiho.parallel` from the embeddings of the first drafted tokens and the states before them."""
        from foretoken.kernel.heads import parallel

        of_tokens, before = _rows(embedded), _rows(states)
        out = np.empty((len(states), len(self.layers.blocks), states.shape[-1]), np.float32)
        parallel(self.model, of_tokens, before, out, use_threads())
        return torch.from_numpy(out)

    def draft_chain(
        self, row: int, read: Sequence[int], states: Float[Tensor, "m d"], start: int, draws: ChainDraws
    ) -> tuple[DrawnChain, Float[Tensor, "_ d"]]:
        """As KernelRows.draft_chain, with the states that go with the tokens `read`; also the states made of the nodes,
        which are zeros where no forward was run."""
        return self._draft(row, (), read, states.float().numpy(), start, draws)


def _rows(x: Float[Tensor, "*n d"]) -> np.ndarray:
    """As the kernel reads them, one behind the other."""
    return x.float().reshape(-1, x.shape[-1]).contiguous().numpy()


@dataclass
class SerialRow(HeadRow):
    """states: the head's own, one per node. parallel: Gumiho's scores [m, v] of the levels below a depth-2 node."""

    states: list[Tensor] = field(default_factory=list)
    parallel: dict[int, Tensor] = field(default_factory=dict)

    def forget_tree(self) -> None:
        super().forget_tree()
        self.states, self.parallel = [], {}


class SerialRows(HeadRows[SerialRow]):
    """One forward a level, each node on its parent's state."""

    slots: HeadSlots  # pyright: ignore[reportIncompatibleVariableOverride]

    @torch.inference_mode()
    def __init__(self, head: Serial, batch: int, slots: int, backend: "Backend | None") -> None:
        if backend is None:
            cache = SlotCache(head.planes, batch, slots)
        elif isinstance(backend, StaticForward):
            cache = backend.open(batch, slots)
        else:
            cache = EagleSlots(backend, batch, slots)
        super().__init__(head.target, batch, SerialRow, HeadSlots(cache, slots, head.window), head.columns)
        self.head = head
        self.kernel = cache if isinstance(cache, EagleSlots) else None

    @torch.inference_mode()
    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            self.slots.cache.move(row, self.rows[row].length - 1, nodes)

    @torch.inference_mode()
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        of_row = self.rows[row]
        for i in range(0, len(tokens), CHUNK):
            chunk = list(tokens[i : i + CHUNK])
            start, n = of_row.length - 1, len(chunk)
            mask = self.slots.place_chain(row, start, n)
            states = self._enter(of_row.features[None, start : start + n])
            self._forward([chunk], states, np.arange(start, start + n)[None], mask, scored=False)
            of_row.length += n

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        tokens = [row.tokens[first:] for row, first in zip(self.rows, firsts, strict=True)]
        n = max(map(len, tokens))
        if not n:
            return [self._none() for _ in firsts]
        inputs, positions = [], np.zeros((len(tokens), n), np.int64)
        for i, (row, first, new) in enumerate(zip(self.rows, firsts, tokens, strict=True)):
            inputs.append(self._inputs(row, first, n))
            positions[i, : len(new)] = np.array(row.tree.depths[first:], np.int64) + row.length - 1
        trees, lengths = [row.tree for row in self.rows], [row.length - 1 for row in self.rows]
        mask = self.slots.place(trees, lengths, firsts)
        ids = [[*t, *[0] * (n - len(t))] for t in tokens]
        logits, made = self._forward(ids, torch.stack(inputs), positions, mask, scored=True)
        for row, new, of_row in zip(self.rows, tokens, made, strict=True):
            row.states += of_row[: len(new)].unbind(0)
        return [of_row[: len(new)] for new, of_row in zip(tokens, logits, strict=True)]

    def _enter(self, features: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """The target's states as the head's own; the kernel computes with float32 states."""
        return self.head.enter(features if self.kernel is None else features.float())

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called where it scores so many nodes."""
        if len(self.rows[row].tree):
            return False
        if isinstance(self.slots.cache, StaticRows):
            return self.slots.cache.forward.compiling and len(self.rows) == 1 and self.head.parallel_from is None
        return self.kernel is not None and self.kernel.layers.drafts_chains

    @torch.inference_mode()
    def draft_chain(self, row: int, tokens: Sequence[int], draws: ChainDraws, past: Sequence[int] = ()) -> DrawnChain:
        """As models.fused_rows.FusedRows.draft_chain: one compiled call, or recorded forwards, whose tokens and q are
        those of `score` and draw. Nothing is looked up in `past`, since a head needs the state before each token."""
        of_row, draws = self.rows[row], replace(draws, u=draws.u[: self.head.depth])
        self.slots.check_room(of_row.length - 1 + len(tokens) + len(draws.u) - 1)
        if isinstance(self.slots.cache, StaticRows):
            drawn, made = self._recorded(self.slots.cache, tokens, draws)
        else:
            assert self.kernel is not None
            of_row.tree.grow(range(-1, len(tokens) - 1))
            states = self._inputs(of_row, 0, len(tokens))
            drawn, made = self.kernel.draft_chain(row, tokens, states, of_row.length - 1, draws)
            of_row.tokens += tokens
        if not drawn.tokens:
            raise NotFiniteError(f"The {self.head.kind} head of {self.target.name} gave NaN or infinite logits.")
        count, read = len(of_row.tree), drawn.tokens[:-1]
        of_row.tree.grow(range(count - 1, count + len(read) - 1))
        of_row.tokens += read
        of_row.states += made
        return drawn

    def _recorded(self, cache: StaticRows, tokens: Sequence[int], draws: ChainDraws) -> tuple[DrawnChain, list[Tensor]]:
        """(the chain of the only row, the states made of the drawn tokens but the last: those of `tokens` are known)"""
        of_level = cache.levels(self.rows[0].used + len(tokens), len(draws.u) - 1, self.head.window)
        (scores,) = self.score([tokens], [range(-1, len(tokens) - 1)])
        made = self.rows[0].states[-1:]

        def below(level: int, token: Tensor) -> Tensor:
            logits, states = of_level(level - 1, token, made[-1].to(self.target.dtype).view(1, 1, -1))
            made.append(states[0, 0])
            return self.whole(logits[0], float("-inf"))

        drawn = draw_levels(scores[-1:], below, draws)
        return drawn, made[1 : max(1, len(drawn.tokens))]

    def _inputs(self, row: SerialRow, first: int, n: int) -> Float[Tensor, "n d"]:
        """The states that the nodes from `first` on take: the target's where known, else the parent's; padded to n."""
        tree, features = row.tree, row.features
        at = [row.length - 1 + depth for depth in tree.depths[first:]]
        known = sum(i < len(features) for i in at)  # they come first: the pending text, then drafted nodes
        parts = [self._enter(features[at[0] : at[0] + known])] if known else []
        parts += [row.states[parent][None] for parent in tree.parents[first + known :]]
        if len(at) < n:
            parts.append(torch.zeros(n - len(at), self.head.width, device=self.target.device))
        dtype = self.target.dtype if self.kernel is None else torch.float32
        return torch.cat([part.to(dtype) for part in parts])

    def _forward(
        self, ids: list[list[int]], states: Tensor, positions: np.ndarray, mask: np.ndarray | None, scored: bool
    ) -> tuple[Tensor, ...]:
        """As `plain_step`."""
        if isinstance(self.slots.cache, StaticRows):
            return self.slots.cache.run(ids, positions, {KIND: mask}, scored, (), states)
        nodes = torch.tensor(ids, device=self.target.device)
        if self.kernel is not None:
            made = self.kernel.step(self.head.embed(nodes), states, positions, mask)
            return (self.kernel.logits(made), made) if scored else (made,)
        assert isinstance(self.slots.cache, SlotCache)
        at = torch.from_numpy(positions).to(self.target.device)
        return plain_step(self.head, scored, nodes, at, states, self.slots.cache, self.slots.seen(mask, self.target))
