"""Rows of models that keep a recurrent state, as Mamba, linear attention and short convolutions do.

Such a state holds the text up to one token and cannot go back. So each row has the state behind its committed tokens,
from which every forward begins, and a forward reads one path of a tree: a chain takes one forward, a tree one per leaf.
Where a path is accepted as it was read last, its state is the row's next one. Else the accepted tokens are *unread*:
the next forward reads them again in front of its nodes. Once they are more than the nodes of the tree, a forward of
their own reads them, so that forwards grow no longer than about twice their tree.

Keys and values, which some layers of these models have, stand in slots as in other models. So does in our kernel what
short convolutions read: models with these alone need no states there (kernel/convolution.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Saved
from foretoken.core.shapes import Float
from foretoken.models.cache import Place
from foretoken.models.growing_tree import causal_mask
from foretoken.models.modules import Modules, ModuleSlots
from foretoken.models.probe import LENGTH, probe_tokens
from foretoken.models.rows import Rows

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM

LARGE = 1000.0  # in a state, far from what a text leaves there, so that even bfloat16 shows whether it is read
States = list[Tensor]  # of one row [1, ...], in the order of Layout.states; never written into


class RecurrentSlots(ModuleSlots):
    """The slot cache of a batch, and the recurrent states that a forward reads and leaves.

    fresh: the states of an empty row.
    """

    def __init__(self, modules: Modules, batch: int, slots: int) -> None:
        """Allocate the cache; modules: the forwards that read it; batch: rows; slots: per row."""
        super().__init__(modules, batch, slots)
        kept = modules.layout.states
        self.fresh = [torch.zeros(1, *of.shape, dtype=of.dtype, device=of.device) for of in kept]
        self._places = {(of.layer, of.kind, of.index): place for place, of in enumerate(kept)}
        self._now: States = []  # those of the forward's rows [b, ...]
        self._begun = False

    def begin(self, states: Sequence[States]) -> None:
        """Set the states that the next forward begins with; states: those of each of its rows, `fresh` in all or in
        none of them."""
        self._now = [torch.cat(of_rows) for of_rows in zip(*states, strict=True)]  # a copy, which models write into
        self._begun = states[0] is not self.fresh

    def left(self) -> list[States]:
        """Return the states that the last forward has left, of each of its rows."""
        return [list(of_row) for of_row in zip(*(state.split(1) for state in self._now), strict=True)]

    # What transformers' layers call, in place of the methods of its `Cache`. Layers ask for a state before they update
    # it. Some begin a text with a state that is not zeros, so that an empty row has none for them.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the rows have states; layer_idx, state_idx: any."""
        return self._begun

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False, since a state holds the text up to one token; layer_idx: any."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the latest inputs of a convolution [b, channels, size], None where the rows are empty.

        layer_idx, state_idx: those of `State`.
        """
        return self._now[self._places[layer_idx, "conv", state_idx]] if self._begun else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return another state [b, ...], None where the rows are empty; layer_idx, state_idx: those of `State`."""
        return self._now[self._places[layer_idx, "recurrent", state_idx]] if self._begun else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append inputs to the latest ones of a convolution, and return both [b, channels, size + n].

        conv_states: the new inputs [b, channels, n].
        layer_idx, state_idx: as in `get_conv_state`.
        kwargs: change nothing.
        """
        state = self._now[self._places[layer_idx, "conv", state_idx]]
        inputs = torch.cat([state, conv_states.to(state.dtype)], -1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take over a new state, and return it [b, ...].

        recurrent_states: the state [b, ...].
        layer_idx, state_idx: as in `get_recurrent_state`.
        kwargs: change nothing.
        """
        return self._now[self._places[layer_idx, "recurrent", state_idx]].copy_(recurrent_states)


@dataclass
class Reading:
    """The recurrent states of a row, and what they have read.

    committed: those behind the first `read` committed tokens.
    read: the number of these tokens.
    unread: the ids of the other committed tokens.
    nodes: the ids of the nodes of the row's tree.
    path: the nodes behind the committed tokens that the last forward has read.
    ahead: the states that it left.
    prefix: whether nothing but `extend` and `restore` has committed tokens, so that `save` may copy the row.
    restored: the number of tokens whose keys and values `restore` has written.
    """

    committed: States
    read: int = 0
    unread: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    ahead: States = field(default_factory=list)
    prefix: bool = True
    restored: int = 0

    def continues(self, path: list[int]) -> bool:
        """Whether the states `ahead` have read the beginning of a path, but not all of it."""
        return 0 < len(self.path) < len(path) and path[: len(self.path)] == self.path


class Chain(NamedTuple):
    """Tokens that a forward reads one after the other in one row.

    ids: their ids.
    slots: the slots of all tokens that the last one sees, in the order of their positions from 0 on; the last of them
        are those of `ids`.
    states: what the forward begins with.
    """

    ids: list[int]
    slots: list[int]
    states: States


class RecurrentRows(Rows):
    """Rows of a model that keeps recurrent states. Results are those of other `Rows`, up to rounding."""

    cache: RecurrentSlots  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, lm: "CausalLM", batch: int, slots: int, layers: tuple[int, ...] = ()) -> None:
        """Open rows of the model `lm`; batch, slots, layers: as in `CausalLM.open`."""
        assert isinstance(lm.backend, Modules)
        self._readings: list[Reading] = []
        super().__init__(lm, batch, slots, layers, RecurrentSlots(lm.backend, batch, slots))

    def join(self) -> int:
        row = super().join()
        self._readings.append(Reading(self.cache.fresh))
        return row

    def leave(self, row: int) -> None:
        super().leave(row)
        self._readings[row] = self._readings[-1]
        self._readings.pop()

    def _commit(self, row: int, tokens: Sequence[int]) -> None:
        reading = self._readings[row]
        ids = [*reading.unread, *tokens]
        end = reading.read + len(ids)
        self._follow(slice(row, row + 1), [Chain(ids, list(range(end)), reading.committed)], head=False)
        (reading.committed,) = self.cache.left()
        reading.read = self.lengths[row] = end
        reading.unread, reading.restored = [], 0

    def _score(self, rows: slice, tokens: Sequence[Sequence[int]], firsts: list[int]) -> Float[Tensor, "b n v"]:
        batch = range(len(self))[rows]
        for r in batch:
            reading = self._readings[r]
            reading.nodes[firsts[r] :] = tokens[r]
            if reading.path[-1:] >= [firsts[r]]:  # these nodes were in a forward that failed
                reading.path = []
        paths = [self._trees[r].paths(firsts[r]) for r in batch]
        runs = [(slice(r, r + 1), [path]) for r, of_row in zip(batch, paths, strict=True) for path in of_row]
        chains = [self._chain(r, path) for r, of_row in zip(batch, paths, strict=True) for path in of_row]
        alike = {(len(chain.ids), chain.states is self.cache.fresh) for chain in chains}
        if len(alike) == 1 and all(len(of_row) == 1 for of_row in paths):
            runs = [(rows, [path for (path,) in paths])]  # all rows in one forward
        n = max(map(len, tokens[rows]))
        out = torch.empty(0)
        for part, of_rows in runs:
            members = range(len(self))[part]
            chains = [self._chain(r, path) for r, path in zip(members, of_rows, strict=True)]
            logits = self._follow(part, chains, head=True)
            if not len(out):
                out = logits.new_empty(len(batch), n, self.vocab_size)
            for r, path, scores, states in zip(members, of_rows, logits, self.cache.left(), strict=True):
                new = [node - firsts[r] for node in path if node >= firsts[r]]
                out[r - rows.start, new] = scores[-len(new) :]
                self._readings[r].path, self._readings[r].ahead = path, states
        return out

    def _chain(self, row: int, path: list[int]) -> Chain:
        """Return what must be read so that a forward has read `path`, nodes of the tree of the row with index `row`."""
        reading, length = self._readings[row], self.lengths[row]
        slots = [*range(length), *(length + node for node in path)]
        if reading.continues(path):
            return Chain([reading.nodes[node] for node in path[len(reading.path) :]], slots, reading.ahead)
        ids = [*reading.unread, *(reading.nodes[node] for node in path)]
        return Chain(ids, slots, reading.committed)

    def _follow(self, rows: slice, chains: list[Chain], head: bool) -> Float[Tensor, "b n _"]:
        """Read chains of equal length, one in each of `rows`, by one forward, and return its logits [b, n, v].

        head: whether the LM head runs; where it does not, the result has no meaning.
        """
        n = len(chains[0].ids)
        firsts = [len(chain.slots) - n for chain in chains]
        used = max(max(chain.slots) for chain in chains) + 1
        new = [chain.slots[-n:] for chain in chains]
        together = all(of_row == list(range(new[0][0], new[0][0] + n)) for of_row in new)
        self.cache.place(Place(rows, new[0][0] if together else new, n, used))
        self.cache.begin([chain.states for chain in chains])
        masks: dict[str, np.ndarray | None] = {}
        for kind, window in self._windows.items():
            whole = window is None or used <= window
            masks[kind] = None
            if n > 1 or not whole or any(len(chain.slots) < used for chain in chains):
                mask = np.full((len(chains), 1, n, used), self._low, np.float32)
                for of_row, chain, first in zip(mask, chains, firsts, strict=True):
                    of_row[..., chain.slots] = causal_mask(first, n, self._low, window)[0]
                masks[kind] = mask
        positions = [list(range(first, first + n)) for first in firsts]
        return self._forward([chain.ids for chain in chains], positions, masks, head)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        super().keep(paths)
        for row, path in enumerate(paths):
            reading = self._readings[row]
            if path:
                reading.prefix = False
                if list(path) == reading.path:
                    reading.committed, reading.read, reading.unread = reading.ahead, self.lengths[row], []
                else:
                    reading.unread += [reading.nodes[node] for node in path]
            size, reading.nodes, reading.path, reading.ahead = len(reading.nodes), [], [], []
            if len(reading.unread) > size:
                self._commit(row, [])

    def cut(self, row: int, length: int) -> None:
        super().cut(row, length)
        reading = self._readings[row]
        if length < reading.read:
            raise ForetokenError(f"The recurrent states of {self._lm.name} cannot go back to token {length}.")
        del reading.unread[length - reading.read :]

    def save(self, row: int, start: int, end: int) -> Saved | None:
        """Return a copy as `Rows.save` does. Only the last one of a text that was read has the recurrent states.

        Returns None too where tokens were committed by `keep`.
        """
        saved = super().save(row, start, end) if self._readings[row].prefix else None
        if saved is None or end < self.lengths[row]:
            return saved
        return Saved(start, end, (*saved.parts, *self._readings[row].committed))

    def restore(self, row: int, saved: Saved) -> None:
        """Commit tokens as `Rows.restore` does; those without states only once others follow that have them."""
        reading = self._readings[row]
        own = len(self.cache.stores) + (self._features is not None)
        self.lengths[row] = max(self.lengths[row], reading.restored)
        super().restore(row, Saved(saved.start, saved.end, saved.parts[:own]))
        reading.restored = saved.end
        if len(saved.parts) > own:
            reading.committed, reading.read = list(saved.parts[own:]), saved.end
        self.lengths[row] = reading.read


@torch.inference_mode()
def check_states(lm: "CausalLM") -> None:
    """Raise ForetokenError for a model `lm` whose forwards of one token, or of several, ignore its recurrent states.

    Such forwards of several tokens can only begin a text. Their logits are exactly the same behind any states. All
    states of one kind and index are changed at once, since layers that have them share their code.
    """
    tokens = probe_tokens(lm.weights)
    rows = RecurrentRows(lm, 1, LENGTH)
    rows.extend(rows.join(), tokens[:2])
    (reading,) = rows._readings
    committed = reading.committed

    def logits(n: int, states: States) -> Float[Tensor, "n v"]:
        reading.committed = states
        (scores,) = rows.score([tokens[2 : 2 + n]], [[-1, 0][:n]])
        rows.keep([[]])
        return scores

    names = [(of.kind, of.index) for of in lm._layout.states]
    for n, number in ((2, "several tokens"), (1, "one token")):
        right = logits(n, committed)
        for name in sorted(set(names)):
            changed = [
                torch.full_like(of, LARGE) if name == own else of for own, of in zip(names, committed, strict=True)
            ]
            if torch.equal(logits(n, changed), right):
                raise ForetokenError(
                    f"{type(lm.weights).__name__} reads {number} behind a text without its {name[0]} states, so it "
                    "cannot be used."
                )
