"""Heads that draft token after token with a small Transformer of their own: what they share, and the rows that draft.

Let h_i be the target's state at position i and x_{i+1} the token after it. One forward of the head maps (x_{i+1}, h_i)
to a state o_i that stands for h_{i+1}; an LM head, the target's or its own, makes q of x_{i+2} from it. The forward for
the next level takes o_i in place of the target's state. In the cache of a head's layers slot j - 1 holds token x_j,
since a row's first token is never scored.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from foretoken.core.errors import NotFiniteError
from foretoken.core.shapes import Float, Int
from foretoken.heads.head import Backend, Head, PublishedHead
from foretoken.heads.layer import Attend, cached
from foretoken.heads.layouts import EMBEDDING
from foretoken.heads.rows import LOW, HeadRow, HeadRows, planes_of
from foretoken.models.cache import Place, Planes, SlotCache
from foretoken.models.chains import ChainDraws, DrawnChain, draw_levels
from foretoken.models.growing_tree import NewNodes, causal_mask
from foretoken.models.parts import LayerShape, TargetParts
from foretoken.models.rows import CHUNK
from foretoken.models.static import StaticForward, StaticRows, TracedCache

if TYPE_CHECKING:
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.kernel import EagleSlots


class Serial(Head):
    """A head whose next level reads the states that it made itself.

    width: width of its states.
    planes: shapes of the keys and values that each of its layers keeps per token.
    """

    width: int
    planes: Planes

    def embed(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """Return what the head reads for tokens: their embeddings [..., d]; ids: the tokens [...]."""
        return self.target.embed(ids)

    def enter(self, features: Float[Tensor, "... f"]) -> Float[Tensor, "... d"]:
        """Return the target's states in the form of the head's own [..., d].

        features: the states of `feature_layers` side by side [..., f].
        """
        return features / self.feature_scale

    @abstractmethod
    def made(
        self, embedded: Tensor, states: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None
    ) -> Float[Tensor, "b n d"]:
        """Return the states o that the head makes of nodes [b, n, d].

        embedded: the embeddings of the nodes' tokens [b, n, d].
        states: the states before these tokens: from `enter`, or made by the head itself [b, n, d].
        positions: the positions of `states`, one less than those of the tokens [b, n].
        cache: where the nodes' keys and values go, to the slots that were set.
        mask: 0 for the slots that a node sees, LOW for others [b, 1, n, used]; None: all nodes see all slots.
        """

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... c"]:
        """Return the logits of the token after each node, over the vocabulary that the head scores [..., c].

        states: the nodes' states o [..., d].
        """
        return self.target.logits(states * self.feature_scale)

    def forward_of(self, name: str) -> StaticForward:
        """Return the head's forwards as a GPU records them; until `compiling` is set they are plain ones.

        name: the head's name, for messages.
        """
        return StaticForward(self, name, self.planes, compiled=False, own=traced)

    def open(self, batch: int, slots: int, backend: Backend | None) -> "SerialRows":
        return SerialRows(self, batch, slots, backend)


class SerialLayers(Serial, PublishedHead):
    """A serial head that is published by itself and can be trained, with this project's decoder layers.

    shape, num_layers: sizes and number of its decoder layers.
    embed_tokens: an embedding of its own; None where it borrows the target's.
    """

    embed_tokens: nn.Embedding | None

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int) -> None:
        """Make what all such heads have; parts: what the head borrows of its target; shape, num_layers: as above."""
        super().__init__(parts)
        self.shape, self.num_layers = shape, num_layers
        self.width, self.planes = shape.hidden, planes_of(shape, num_layers, parts)
        self.embed_tokens = None

    def take_own(self, checkpoint: "Checkpoint") -> None:
        """Take the rotary positions of a `checkpoint`, and make room for its embedding where it has one.

        The embedding's weights are loaded later. Raises ForetokenError where that of the checkpoint has another number
        of tokens than the target, or is missing though the target's is not as wide as the head.
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
    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        """Return the states o that the head makes of nodes [b, n, d], with any attention.

        embedded, states: as in `made`.
        cos, sin: cosines and sines of the rotary angles of the positions [1 or b, n, head_dim].
        attends: the attention of each layer.
        """

    @no_type_check
    def made(self, embedded, states, positions, cache, mask):
        attends = [cached(cache, layer, mask) for layer in range(self.num_layers)]
        return self.step(embedded, states, *self.rotary.angles(positions), attends)


@no_type_check
def traced(head, of_layer, layers, scored, nodes, states, masks, planes):
    """Run the forward of a head in the place of `models.static.step`, and return what `plain_step` returns.

    head: the head, in the place of the model.
    of_layer, layers, scored, nodes: as there; `layers` is not used.
    states: as in `plain_step`.
    masks: what is added to the attention scores [b, 1, n, slots].
    planes: keys and values of every layer in turn, each [b, h, slots, d], which are read and written.
    """
    ids, positions, slots = nodes
    return plain_step(head, scored, ids, positions, states, TracedCache(planes, of_layer, slots), masks)


@no_type_check
def plain_step(head, scored, ids, positions, states, cache, mask):
    """Return the head's own logits after nodes [b, n, c] and their states o [b, n, d]; only (o,) where not `scored`.

    head: the head.
    scored: whether logits are computed.
    ids: the tokens of the nodes [b, n].
    positions, states, cache, mask: as in `Serial.made`.
    """
    made = head.made(head.embed(ids), states, positions, cache, mask)
    return (head.logits(made), made) if scored else (made,)


class SerialRows(HeadRows):
    """The rows of a serial head: one forward per level, in which each node reads the state made at its parent."""

    cache: "SlotCache | StaticRows | EagleSlots"  # pyright: ignore[reportIncompatibleVariableOverride]

    @torch.inference_mode()
    def __init__(self, head: Serial, batch: int, slots: int, backend: Backend | None) -> None:
        """Allocate the cache; head: the head that drafts; batch, slots, backend: as in `Head.open`."""
        cache: Any = SlotCache(head.planes, batch, slots) if backend is None else backend.open(batch, slots)
        super().__init__(head, batch, slots, cache)
        self.kernel: EagleSlots | None = None if isinstance(cache, SlotCache | StaticRows) else cache

    @torch.inference_mode()
    def _keep_slots(self, row: int, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            self.cache.move(row, self.rows[row].length - 1, nodes)

    @torch.inference_mode()
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        of_row = self.rows[row]
        for i in range(0, len(tokens), CHUNK):
            chunk = list(tokens[i : i + CHUNK])
            start, n = of_row.length - 1, len(chunk)
            self._check_room(start + n)
            self.cache.place(Place(slice(row, row + 1), start, n, start + n))
            mask = causal_mask(start, n, LOW, self.head.window)
            states = self._enter(of_row.features[None, start : start + n])
            self._forward([chunk], states, np.arange(start, start + n)[None], mask, scored=False)
            of_row.length += n

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ c"]]:
        tokens = [row.tokens[first:] for row, first in zip(self.rows, firsts, strict=True)]
        new = NewNodes([row.tree for row in self.rows], [row.length - 1 for row in self.rows], firsts)
        if not new.n:
            return [self._none() for _ in firsts]
        inputs = torch.stack([self._inputs(row, first, new.n) for row, first in zip(self.rows, firsts, strict=True)])
        positions, mask = np.array(new.positions()), self._placed(new)
        logits, made = self._forward(new.padded(tokens), inputs, positions, mask, scored=True)
        for row, ids, of_row in zip(self.rows, tokens, made, strict=True):
            row.states += of_row[: len(ids)].unbind(0)
        return [of_row[: len(ids)] for ids, of_row in zip(tokens, logits, strict=True)]

    def _enter(self, features: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """Return the target's states as the head's own; in float32 where the kernel reads them."""
        return self.head.enter(features if self.kernel is None else features.float())

    def drafts_chains(self, row: int, nodes: int) -> bool:
        """Whether `draft_chain` can be called for the row with index `row`; nodes: not used."""
        if len(self.rows[row].tree):
            return False
        if isinstance(self.cache, StaticRows):
            return self.cache.forward.compiling and len(self.rows) == 1 and self.head.parallel_from is None
        return self.kernel is not None and self.kernel.layers.drafts_chains

    @torch.inference_mode()
    def draft_chain(self, row: int, tokens: Sequence[int], draws: ChainDraws, past: Sequence[int] = ()) -> DrawnChain:
        """Draw a chain as models.fused_rows.FusedRows.draft_chain does, with the tokens and q of `score` and draws.

        It takes one compiled call, or recorded forwards. row, tokens, draws: as there. past: not used, since a head
        needs the state before a token to read it, so that guesses do not help.
        """
        of_row, draws = self.rows[row], replace(draws, u=draws.u[: self.head.depth])
        self._check_room(of_row.length - 1 + len(tokens) + len(draws.u) - 1)
        if isinstance(self.cache, StaticRows):
            drawn, made = self._recorded(self.cache, tokens, draws)
        else:
            assert self.kernel is not None
            of_row.tree.grow(range(-1, len(tokens) - 1))
            states = self._inputs(of_row, 0, len(tokens))
            drawn, made = self.kernel.draft_chain(row, (), tokens, of_row.length - 1, draws, states.numpy())
            of_row.tokens += tokens
        if not drawn.tokens:
            raise NotFiniteError(f"The {self.head.kind} head of {self.target.name} gave NaN or infinite logits.")
        count, read = len(of_row.tree), drawn.tokens[:-1]
        of_row.tree.grow(range(count - 1, count + len(read) - 1))
        of_row.tokens += read
        of_row.states += made
        return drawn

    def _recorded(self, cache: StaticRows, tokens: Sequence[int], draws: ChainDraws) -> tuple[DrawnChain, list[Tensor]]:
        """Draw the chain of the only row by recorded forwards, one per level.

        Returns the chain, and the states made of all drawn tokens but the last; `score` has kept those of `tokens`.
        """
        of_level = cache.levels(self.rows[0].used + len(tokens), len(draws.u) - 1, self.head.window)
        (scores,) = self.score([tokens], [range(-1, len(tokens) - 1)])
        made = self.rows[0].states[-1:]

        def below(level: int, token: Tensor) -> Tensor:
            logits, states = of_level(level - 1, token, made[-1].to(self.target.dtype).view(1, 1, -1))
            made.append(states[0, 0])
            return self.whole(logits[0], float("-inf"))

        drawn = draw_levels(scores[-1:], below, draws)
        return drawn, made[1 : max(1, len(drawn.tokens))]

    def _inputs(self, row: HeadRow, first: int, n: int) -> Float[Tensor, "n d"]:
        """Return the states that a row's nodes from `first` on read, padded to n: the target's, else the parent's."""
        tree, features = row.tree, row.features
        at = [row.length - 1 + depth for depth in tree.depths[first:]]
        known = sum(i < len(features) for i in at)  # these come first: committed text, then draft tokens
        parts = [self._enter(features[at[0] : at[0] + known])] if known else []
        parts += [row.states[parent][None] for parent in tree.parents[first + known :]]
        if len(at) < n:
            parts.append(torch.zeros(n - len(at), self.head.width, device=self.target.device))
        dtype = self.target.dtype if self.kernel is None else torch.float32
        return torch.cat([part.to(dtype) for part in parts])

    def _forward(
        self, ids: list[list[int]], states: Tensor, positions: np.ndarray, mask: np.ndarray | None, scored: bool
    ) -> tuple[Tensor, ...]:
        """Return the results of `plain_step` for the nodes whose slots were set, by the backend of this batch."""
        if isinstance(self.cache, StaticRows):
            return self.cache.run(ids, positions, {"": mask}, scored, (), states)
        nodes = torch.tensor(ids, device=self.target.device)
        if self.kernel is not None:
            made = self.kernel.step(self.head.embed(nodes), states, positions, mask)
            return (self.kernel.logits(made), made) if scored else (made,)
        assert isinstance(self.cache, SlotCache)
        at = torch.from_numpy(positions).to(self.target.device)
        return plain_step(self.head, scored, nodes, at, states, self.cache, self._seen(mask))
