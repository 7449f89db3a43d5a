"""Seconds of one forward, for several ways of running it (*paths*) in turn, and at several sizes (*places*)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, runtime_checkable

from foretoken.measure.harness import Progress, Turn, interleave
from foretoken.models.causal_lm import CausalLM
from foretoken.models.rows import Rows

REPEATS = 3  # measured forwards of one turn, after one that brings the weights back into the processor's caches


@dataclass(frozen=True)
class Place:
    """The size of a forward: `nodes` new tokens in each of `batch` rows, after `context` committed tokens."""

    nodes: int
    context: int
    batch: int

    def __str__(self) -> str:
        return f"context {self.context}, batch {self.batch}: {self.nodes} nodes"


@dataclass(frozen=True)
class Round:
    """One block: a place in round `number`, from 0."""

    place: Place
    number: int

    def __str__(self) -> str:
        return f"{self.place}, round {self.number + 1}"


@runtime_checkable
class Path(Protocol):
    """One way of running a forward."""

    def open(self, context: int, batch: int, nodes: int) -> None:
        """Open `batch` rows and commit `context` tokens to each, with room for trees of up to `nodes` nodes."""
        ...

    def forward(self, nodes: int) -> None:
        """Run one forward of `nodes` new tokens in each row."""
        ...

    def forget(self) -> None:
        """Drop the nodes of the last forward."""
        ...


@dataclass
class OurPath:
    """Our way: `Rows.score` of the model `lm` on a binary tree."""

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
    """Return n token ids of `lm`, always the same."""
    return [1 + i * 37 % (lm.vocab_size - 1) for i in range(n)]


def measure(
    paths: Mapping[str, Path], places: Sequence[Place], rounds: int, now: Callable[[], float], progress: Progress
) -> Iterator[Turn[Round, float]]:
    """Run every path at every place, in each round, and yield turns with the mean seconds of one forward.

    paths: {name: path}.
    places: neighbours with equal context and batch share their rows.
    rounds: how often each place is measured.
    now: reads the clock, in seconds; see `clocks.seconds`.
    progress: shows what runs.
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
    """Return the mean seconds of a forward, over `repeats` of them after one that is not measured."""
    path.forward(place.nodes)
    path.forget()
    total = 0.0
    for _ in range(repeats):
        begin = now()
        path.forward(place.nodes)
        total += now() - begin
        path.forget()
    return total / repeats
