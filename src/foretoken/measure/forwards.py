"""Milliseconds of one forward: every path in turn at every place, in rotated order, round after round."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from torch import nn

from foretoken.core.errors import ForetokenError
from foretoken.measure.harness import Progress, interleave
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PanelLinear
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
    """One of the ways of running a forward. what: how it does so; weight_bytes: read by every forward."""

    name: str

    @property
    def what(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    def open(self, context: int, batch: int, nodes: int) -> None:
        """Commit `context` tokens to `batch` rows, with room for so many nodes."""
        ...

    def forward(self, nodes: int) -> None: ...

    def forget(self) -> None:
        """Drop the nodes of the last forward."""
        ...


@dataclass
class OurPath:
    """`Rows.score` on a binary tree. what: of which kind the path is for this model."""

    name: str
    lm: CausalLM
    rows: Rows = field(init=False)

    @property
    def what(self) -> str:
        return self.lm.execution

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.lm.model)

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


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a forward reads: all but an embedding table, of which it reads a few rows."""
    total = sum(p.nbytes for p in model.parameters())
    total += sum(m.panels.nbytes for m in model.modules() if isinstance(m, PanelLinear))
    embedding: Any = model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return total if getattr(head, "weight", None) is embedding else total - embedding.nbytes


@dataclass(frozen=True)
class Timing:
    """One turn of one path. ms: of one forward, the mean of the turn's. gb_s: gigabytes of weights read a second."""

    path: str
    what: str
    nodes: int
    context: int
    batch: int
    round: int
    order: int
    ms: float
    gb_s: float

    @property
    def place(self) -> Place:
        return Place(self.nodes, self.context, self.batch)


def measure(
    paths: Sequence[Path], places: Sequence[Place], rounds: int, now: Callable[[], float], progress: Progress
) -> Iterator[Timing]:
    """Every path at every place, round after round; places of one context and batch share their caches."""
    if rounds < 1:
        raise ForetokenError(f"rounds is {rounds}: it must be at least 1.")
    named = {path.name: path for path in paths}
    for (context, batch), group in groupby(places, key=lambda p: (p.context, p.batch)):
        here = list(group)

        def warm(path: Path, context: int = context, batch: int = batch, here: Sequence[Place] = here) -> None:
            path.open(context, batch, max(p.nodes for p in here))
            for place in here:
                _turn(path, place, 1, now)

        def run(path: Path, block: Round) -> float:
            return _turn(path, block.place, REPEATS, now)

        blocks = [Round(place, number) for place in here for number in range(rounds)]
        for turn in interleave(named, blocks, run, warm, progress):
            path, place, took = named[turn.name], turn.block.place, turn.result
            where = (place.nodes, context, batch, turn.block.number, turn.order)
            yield Timing(path.name, path.what, *where, took * 1e3, path.weight_bytes / took / 1e9)


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
