"""Seconds of one forward: every path in turn at every place, in rotated order, round after round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, runtime_checkable

from foretoken.measure.harness import Progress, Turn, interleave
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows

REPEATS = 3  # forwards of one turn, after one that brings the path's weights back into the processor's caches


@dataclass(frozen=True)
class Place:
    """`nodes` new tokens in each of `batch` rows after `context` committed ones."""

    nodes: int
    context: int
    batch: int

    def __str__(self) -> str:
        return f"context {self.context}, batch {self.batch}: {self.nodes} nodes"


@dataclass(frozen=True)
class Round:
    place: Place
    number: int

    def __str__(self) -> str:
        return f"{self.place}, round {self.number + 1}"


@runtime_checkable
class Path(Protocol):
    """One of the ways of running a forward."""

    def open(self, context: int, batch: int, nodes: int) -> None:
        """Commit `context` tokens to `batch` rows, with room for so many nodes."""
        ...

    def forward(self, nodes: int) -> None: ...

    def forget(self) -> None:
        """Drop the nodes of the last forward."""
        ...


@dataclass
class OurPath:
    """`Rows.score` on a binary tree."""

    lm: CausalLM
    rows: Rows = field(init=False)

    def open(self, context: int, batch: int, nodes: int) -> None:
        self.rows = self.lm.open(batch, context + nodes)
        for _ in range(batch):
            self.rows.extend(self.rows.join(), tokens(self.lm, context))

    def forward(self, nodes: int) -> None:
        batch = len(self.rows)
        self.rows.score([tokens(self.lm, nodes)] * batch, [[-1, *((i - 1) // 2 for i in range(1, nodes))]] * batch)

    def forget(self) -> None:
        self.rows.keep([()] * len(self.rows))


def tokens(lm: CausalLM, n: int) -> list[int]:
    """Some n token ids."""
    return [1 + i * 37 % (lm.vocab_size - 1) for i in range(n)]


def measure(
    paths: Mapping[str, Path], places: Sequence[Place], rounds: int, now: Callable[[], float], progress: Progress
) -> Iterator[Turn[Round, float]]:
    """Every path at every place, round after round; places of one context and batch share their caches.

    Yields turns whose results are seconds of one forward, the mean of REPEATS.
    """
    for (context, batch), group in groupby(places, key=lambda p: (p.context, p.batch)):
        here = list(group)

        def warm(path: Path, context: int = context, batch: int = batch, here: Sequence[Place] = here) -> None:
            path.open(context, batch, max(p.nodes for p in here))
            for place in here:
                _turn(path, place, 1, now)

        def run(path: Path, block: Round) -> float:
            return _turn(path, block.place, REPEATS, now)

        yield from interleave(paths, [Round(p, n) for p in here for n in range(rounds)], run, warm, progress)


def _turn(path: Path, place: Place, repeats: int, now: Callable[[], float]) -> float:
    """Mean seconds of a forward."""
    path.forward(place.nodes)
    path.forget()
    total = 0.0
    for _ in range(repeats):
        begin = now()
        path.forward(place.nodes)
        total += now() - begin
        path.forget()
    return total / repeats
