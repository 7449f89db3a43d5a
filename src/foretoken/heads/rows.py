"""Draft heads that score token trees like a language model: the rows of one batch, with the cache of the head's layers.

A head reads at a token the target's state before it: (x_j, h_{j-1}). So a row's first token is never scored, slot j - 1
holds token x_j, and a node below the known text takes the state that the head itself made at the node's parent.
What was scored on the head's own states is forgotten at `keep` and scored again on the target's.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import LayerShape, cached
from foretoken.heads.make import Head
from foretoken.heads.serial import Eagle, Eagle3, Gumiho
from foretoken.models.cache import Plane, SlotCache
from foretoken.models.growing_tree import GrowingTree, additive_mask, causal_mask
from foretoken.models.panels import pack_linears

SerialHead = Eagle | Gumiho | Eagle3
CHUNK = 512  # tokens per prefill forward: bounds the mask and the activations
LOW = float(torch.finfo(torch.float16).min)  # what a hidden slot adds to its score, in every dtype


def ready(head: Head, name: str) -> "HeadLM":
    """A head for drafting alone, its weights packed where that is faster; it cannot be trained or saved any more."""
    if head.target.device.type == "cpu" and head.target.dtype == torch.float32:
        pack_linears(head)
    return HeadLM(head, name)


@dataclass(frozen=True)
class HeadLM:
    """A head in the place of a drafter's language model. name: for messages."""

    head: Head
    name: str

    @property
    def vocab_size(self) -> int:
        return self.head.target.vocab_size

    @property
    def device(self) -> torch.device:
        return self.head.target.device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    @property
    def depth(self) -> int | None:
        """Levels it can draft, None for any number."""
        return self.head.depth

    @property
    def serial_levels(self) -> int:
        """Levels drafted one after the other, before those that do not depend on the tokens between."""
        return Gumiho.SERIAL if isinstance(self.head, Gumiho) else 0

    def check_parallel(self) -> None:
        if not isinstance(self.head, Gumiho | Medusa):
            raise ForetokenError(
                f"Head {self.name} drafts its levels one after the other, and a product tree needs parallel ones: take "
                "a ranked tree."
            )

    def open(self, batch: int, slots: int) -> "HeadRows":
        if isinstance(self.head, Gumiho):
            return GumihoRows(self.head, batch, slots)
        if isinstance(self.head, Medusa):
            return MedusaRows(self.head, batch)
        if isinstance(self.head, Hydra):
            return HydraRows(self.head, batch, slots)
        return SerialRows(self.head, batch, slots)


class HeadRows:
    """lengths[r]: committed tokens that row r is done with; its tree's nodes follow them. See models.rows.Rows."""

    def __init__(self, head: Head, batch: int) -> None:
        self.head, self.batch = head, batch
        self.lengths: list[int] = []
        self.features: list[Tensor] = []  # per row [t, f]: the target's states of all committed tokens but the last
        self.tokens: list[list[int]] = []  # per row, of the tree's nodes
        self.trees: list[GrowingTree] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def join(self) -> int:
        if len(self.lengths) == self.batch:
            raise ForetokenError(f"All {self.batch} rows are in use: let one leave first or open more.")
        self.lengths.append(1)
        self.features.append(torch.empty(0))
        self.tokens.append([])
        self.trees.append(GrowingTree(LOW))
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        _drop(row, self.lengths, self.features, self.tokens, self.trees)

    def learn(self, features: Sequence[Float[Tensor, "_ f"]]) -> None:
        """The target's states of every row's committed tokens but the last."""
        self.features = list(features)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Commit tokens whose target states are known."""
        raise NotImplementedError

    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        """Append nodes to the trees; scores of what follows each of them."""
        raise NotImplementedError

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit of each row's path what was scored on the target's states; forget the rest of the trees."""
        for row, path in enumerate(paths):
            self.trees[row].check_path(path)
            known = max(0, min(len(path), len(self.features[row]) + 1 - self.lengths[row]))
            self._commit(row, list(path[:known]))
            self.lengths[row] += known
            self.trees[row].clear()
            self.tokens[row] = []

    def _commit(self, row: int, nodes: list[int]) -> None: ...

    def _grow(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[int]:
        """Enter the nodes into the trees; the number of nodes each row had before."""
        firsts = [len(tree) for tree in self.trees]
        for row, (new, above) in enumerate(zip(tokens, parents, strict=True)):
            self.trees[row].grow(above)
            self.tokens[row] += new
        return firsts

    def _above(self, row: int, node: int) -> list[int]:
        """Nodes from the tree's top down to `node`."""
        path = [node]
        while self.trees[row].parents[path[-1]] >= 0:
            path.append(self.trees[row].parents[path[-1]])
        return path[::-1]


def _drop(row: int, *of_rows: list[Any]) -> None:
    """The last row takes the place of `row`."""
    for values in of_rows:
        values[row] = values[-1]
        values.pop()


class _Slots:
    """The keys and values of a head's layers."""

    def __init__(self, shape: LayerShape, layers: int, head: Head, batch: int, slots: int) -> None:
        plane = Plane(shape.kv_heads, shape.head_dim, head.target.dtype, head.target.device)
        self.cache = SlotCache([(plane, plane)] * layers, batch, slots)
        self.slots = slots
        self.layers = layers

    def aim(
        self, rows: slice, trees: list[GrowingTree], lengths: list[int], firsts: list[int]
    ) -> Float[Tensor, "b 1 n used"] | None:
        """For the newest nodes of each tree, after `lengths` committed slots."""
        counts = [len(tree) - first for tree, first in zip(trees, firsts, strict=True)]
        n, used = max(counts), max(length + len(tree) for length, tree in zip(lengths, trees, strict=True))
        starts = [length + first for length, first in zip(lengths, firsts, strict=True)]
        if used > self.slots:
            raise ForetokenError(f"A head's row needs {used} slots and has {self.slots}: open with more slots.")
        if min(starts) == max(starts) and starts[0] + n <= self.slots + 1:
            self.cache.aim(rows, starts[0], n, used)
        else:
            places = [[*range(s, s + c), *[self.slots] * (n - c)] for s, c in zip(starts, counts, strict=True)]
            self.cache.aim(rows, places, n, used)
        mask = additive_mask(trees, lengths, firsts, n, used, None)
        plane = self.cache.stores[0]
        return None if mask is None else torch.from_numpy(mask).to(device=plane.device, dtype=plane.dtype)

    def aim_chain(self, row: int, start: int, n: int) -> Float[Tensor, "1 1 n used"]:
        """For n tokens of committed text from slot `start` on."""
        if start + n > self.slots:
            raise ForetokenError(f"A head's row needs {start + n} slots and has {self.slots}: open with more slots.")
        self.cache.aim(slice(row, row + 1), start, n, start + n)
        plane = self.cache.stores[0]
        mask = torch.from_numpy(causal_mask(start, n, LOW, None))
        return mask.to(device=plane.device, dtype=plane.dtype)

    def move(self, row: int, start: int, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            self.cache.move(row, start, nodes)


class SerialRows(HeadRows):
    """EAGLE and EAGLE-3: one forward a level, each node on its parent's state."""

    head: SerialHead

    @torch.inference_mode()
    def __init__(self, head: SerialHead, batch: int, slots: int) -> None:
        super().__init__(head, batch)
        self.slots = _Slots(head.shape, head.num_layers, head, batch, slots)
        self.states: list[list[Tensor]] = []  # per row and node, the head's own state

    def join(self) -> int:
        self.states.append([])
        return super().join()

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        last = len(self.lengths) - 1
        if row != last:
            self.slots.cache.copy_row(last, row, self.lengths[last] - 1 + len(self.trees[last]))
        self.states[row] = self.states[-1]
        self.states.pop()
        super().leave(row)

    @torch.inference_mode()
    def extend(self, row: int, tokens: Sequence[int]) -> None:
        for i in range(0, len(tokens), CHUNK):
            chunk = list(tokens[i : i + CHUNK])
            start, n = self.lengths[row] - 1, len(chunk)
            mask = self.slots.aim_chain(row, start, n)
            states = self.head.enter(self.features[row][None, start : start + n])
            self._forward([chunk], states, np.arange(start, start + n)[None], mask)
            self.lengths[row] += n

    @torch.inference_mode()
    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        firsts = self._grow(tokens, parents)
        out = self._serial(tokens, firsts)
        counts = [len(t) for t in tokens]
        if out is None:
            return [self._none() for _ in counts]
        logits = self.head.logits(out)
        return [logits[r, :count] for r, count in enumerate(counts)]

    def _none(self) -> Tensor:
        return torch.empty(0, self.head.target.vocab_size, device=self.head.target.device)

    def _serial(self, tokens: Sequence[Sequence[int]], firsts: list[int]) -> Float[Tensor, "b n d"] | None:
        """The states of the newest nodes of all rows, also remembered; rows with fewer are padded."""
        n = max(map(len, tokens))
        if not n:
            return None
        inputs, positions = [], np.zeros((len(tokens), n), np.int64)
        for row, new in enumerate(tokens):
            inputs.append(self._inputs(row, firsts[row], n))
            depths = self.trees[row].depths[firsts[row] :]
            positions[row, : len(new)] = np.array(depths, np.int64) + self.lengths[row] - 1
        mask = self.slots.aim(slice(0, len(tokens)), self.trees, [x - 1 for x in self.lengths], firsts)
        out = self._forward([[*t, *[0] * (n - len(t))] for t in tokens], torch.stack(inputs), positions, mask)
        for row, new in enumerate(tokens):
            self.states[row] += out[row, : len(new)].unbind(0)
        return out

    def _inputs(self, row: int, first: int, n: int) -> Float[Tensor, "n d"]:
        """The states that the nodes from `first` on take: the target's where known, else the parent's; padded to n."""
        tree, features = self.trees[row], self.features[row]
        at = [self.lengths[row] - 1 + depth for depth in tree.depths[first:]]
        known = [i for i in at if i < len(features)]  # they come first: the pending text, then drafted nodes
        parts = [self.head.enter(features[torch.tensor(known, device=features.device)])] if known else []
        parts += [self.states[row][parent][None] for parent in tree.parents[first + len(known) :]]
        if len(at) < n:
            parts.append(torch.zeros(n - len(at), self.head.shape.hidden, device=self.head.target.device))
        return torch.cat([part.to(self.head.target.dtype) for part in parts])

    def _forward(self, ids: list[list[int]], states: Tensor, positions: np.ndarray, mask: Tensor | None) -> Tensor:
        device = self.head.target.device
        cos, sin = self.head.target.angles(torch.from_numpy(positions).to(device))
        attends = [cached(self.slots.cache, layer, mask) for layer in range(self.head.num_layers)]
        embedded = self.head.target.embed(torch.tensor(ids, device=device))
        return self.head.step(embedded, states, cos, sin, attends)

    @torch.inference_mode()
    def _commit(self, row: int, nodes: list[int]) -> None:
        self.slots.move(row, self.lengths[row] - 1, nodes)
        self.states[row] = []


class GumihoRows(SerialRows):
    """The first two levels by the serial part, all others at once by the MLPs of each depth-1 node."""

    head: Gumiho  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, head: Gumiho, batch: int, slots: int) -> None:
        super().__init__(head, batch, slots)
        self.known: list[dict[int, Tensor]] = []  # per row: depth-1 node -> [m, v]

    def join(self) -> int:
        self.known.append({})
        return super().join()

    def leave(self, row: int) -> None:
        self.known[row] = self.known[-1]
        self.known.pop()
        super().leave(row)

    def _commit(self, row: int, nodes: list[int]) -> None:
        super()._commit(row, nodes)
        self.known[row] = {}

    @torch.inference_mode()
    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        levels = [self._levels(row, above) for row, above in enumerate(parents)]
        if all(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            return super().score(tokens, parents)
        if any(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            raise ForetokenError("A forward of Gumiho's head takes nodes of its serial or of its parallel levels only.")
        # Parallel levels need no slots: their nodes enter the tree as names only.
        firsts = self._grow(tokens, parents)
        wanted = [
            (row, self._pair(row, first + i)) for row, first in enumerate(firsts) for i in range(len(tokens[row]))
        ]
        self._run_parallel(set(wanted))
        out: list[list[Tensor]] = [[] for _ in tokens]
        for (row, pair), level in zip(wanted, itertools.chain.from_iterable(levels), strict=True):
            out[row].append(self.known[row][pair][level - Gumiho.SERIAL])
        for row, new in enumerate(tokens):
            self.states[row] += self.states[row][:1] * len(new)  # never read: their children are parallel too
        return [torch.stack(rows) if rows else self._none() for rows in out]

    def _levels(self, row: int, parents: Sequence[int]) -> list[int]:
        """Depth below the root of each new node: pending text and the root itself count as 0."""
        tree, done = self.trees[row], []
        root = len(self.features[row]) - self.lengths[row]  # depth in the tree of the last committed token
        for parent in parents:
            above = -1 if parent < 0 else tree.depths[parent] if parent < len(tree) else done[parent - len(tree)]
            done.append(above + 1)
        return [max(0, depth - root) for depth in done]

    def _pair(self, row: int, node: int) -> int:
        """The depth-1 node above `node`; the root is that node's parent."""
        root = len(self.features[row]) - self.lengths[row]
        return self._above(row, node)[root + 1]

    @torch.inference_mode()
    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all parallel levels below each (row, depth-1 node)."""
        self._run_parallel(set(pairs))
        return torch.stack([self.known[row][node] for row, node in pairs])

    def _run_parallel(self, pairs: set[tuple[int, int]]) -> None:
        """All MLPs and their LM head, for every pair not known yet, in one call each."""
        new = sorted(pair for pair in pairs if pair[1] not in self.known[pair[0]])
        if not new:
            return
        first = torch.stack([self.states[row][self.trees[row].parents[node]] for row, node in new])
        second = torch.stack([self.states[row][node] for row, node in new])
        logits = self.head.logits(self.head.parallel(first, second))
        for (row, node), scores in zip(new, logits, strict=True):
            self.known[row][node] = scores


class MedusaRows(HeadRows):
    """One call for all levels of all rows."""

    head: Medusa

    def __init__(self, head: Medusa, batch: int) -> None:
        super().__init__(head, batch)
        self.scores: list[Tensor | None] = []

    def join(self) -> int:
        self.scores.append(None)
        return super().join()

    def leave(self, row: int) -> None:
        self.scores[row] = self.scores[-1]
        self.scores.pop()
        super().leave(row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.lengths[row] += len(tokens)

    @torch.inference_mode()
    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        firsts = self._grow(tokens, parents)
        fresh = [row for row, first in enumerate(firsts) if first == 0 and tokens[row]]
        if fresh:
            states = torch.stack([self.features[row][-1] for row in fresh])
            for row, scores in zip(fresh, self.head.levels(states), strict=True):
                self.scores[row] = scores
        out = []
        for row, first in enumerate(firsts):
            root = len(self.features[row]) - self.lengths[row]
            levels = [max(0, depth - root) for depth in self.trees[row].depths[first:]]
            scores = self.scores[row]
            if scores is None or not levels:
                out.append(torch.empty(0, self.head.target.vocab_size, device=self.head.target.device))
            else:
                out.append(scores[torch.tensor(levels, device=scores.device)])
        return out

    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all levels below each (row, root)."""
        found = [self.scores[row] for row, _ in pairs]
        return torch.stack([scores for scores in found if scores is not None])


class HydraRows(HeadRows):
    """One call a level; before the first, the prefix layer on the states that are new."""

    head: Hydra

    @torch.inference_mode()
    def __init__(self, head: Hydra, batch: int, slots: int) -> None:
        super().__init__(head, batch)
        layers = 0 if head.prefix is None else 1
        self.slots = _Slots(head.shape, layers, head, batch, slots) if layers else None
        self.read: list[int] = []  # states that the prefix layer has seen
        self.prefix: list[Tensor] = []

    def join(self) -> int:
        self.read.append(0)
        self.prefix.append(torch.empty(0))
        return super().join()

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        last = len(self.lengths) - 1
        if self.slots is not None and row != last:
            self.slots.cache.copy_row(last, row, self.read[last])
        _drop(row, self.read, self.prefix)
        super().leave(row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.lengths[row] += len(tokens)

    @torch.inference_mode()
    def score(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ v"]]:
        firsts = self._grow(tokens, parents)
        fresh = [row for row, first in enumerate(firsts) if first == 0 and tokens[row]]
        if fresh:
            self._read_states(fresh)
        device, vocab = self.head.target.device, self.head.target.vocab_size
        logits = [torch.empty(len(new), vocab, device=device) for new in tokens]
        by_level: dict[int, list[tuple[int, int]]] = {}
        for row, first in enumerate(firsts):
            root = len(self.features[row]) - self.lengths[row]
            for node in range(first, len(self.trees[row])):
                level = self.trees[row].depths[node] - root
                if level >= 0:
                    by_level.setdefault(level, []).append((row, node))
        for level, nodes in by_level.items():
            paths = [[self.tokens[row][i] for i in self._above(row, node)[-level - 1 :]] for row, node in nodes]
            embedded = self.head.target.embed(torch.tensor(paths, device=device))
            prefix = torch.stack([self.prefix[row] for row, _ in nodes])
            scores = self.head.level(level, prefix, list(embedded.unbind(1)))
            for (row, node), score in zip(nodes, scores, strict=True):
                logits[row][node - firsts[row]] = score
        return logits

    def _read_states(self, rows: list[int]) -> None:
        """The prefix layer on every state of these rows that it has not seen, in one call where that is one chunk."""
        if self.slots is None:
            for row in rows:
                self.prefix[row] = self.features[row][-1] / self.head.feature_scale
            return
        while any(self.read[row] < len(self.features[row]) for row in rows):
            counts = [min(CHUNK, len(f) - done) for f, done in zip(self.features, self.read, strict=True)]
            n, chains = max(counts), []
            for count in counts:
                chains.append(GrowingTree(LOW))
                chains[-1].grow(range(-1, count - 1))
            mask = self.slots.aim(slice(0, len(counts)), chains, self.read, [0] * len(counts))
            known = [f if len(f) else f.new_zeros(1, f.shape[-1]) for f in self.features]
            at = [[min(done + i, len(f) - 1) for i in range(n)] for f, done in zip(known, self.read, strict=True)]
            places = torch.tensor(at, device=known[0].device)
            new = torch.stack([f[of_row] for f, of_row in zip(known, places, strict=True)])
            cos, sin = self.head.target.angles(places)
            states = self.head.prefix_states(new, cos, sin, cached(self.slots.cache, 0, mask))
            for row, count in enumerate(counts):
                if count:
                    self.prefix[row] = states[row, count - 1]
                    self.read[row] += count
