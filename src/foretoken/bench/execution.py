"""Milliseconds of one forward: every path in turn at every place, in rotated order, round after round."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

import torch

from foretoken.bench.forwards import EAGER, Path, Place
from foretoken.bench.methods import THEIRS
from foretoken.bench.summary import Spread
from foretoken.core.errors import ForetokenError

REPEATS = 3  # forwards of one turn, after one that brings the path's weights back into the processor's caches
READ = 1 << 28  # bytes; far more than caches hold
THREAD, WALL = "thread", "wall"


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

    def record(self) -> dict[str, Any]:
        """A line of JSONL."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """One path at one place. Times and GB/s over the rounds; ratios of speeds, each taken inside a round: how many
    times faster than transformers, and than our eager path."""

    path: str
    nodes: int
    context: int
    batch: int
    num_runs: int
    ms: Spread
    gb_s: float
    vs_transformers: Spread
    vs_eager: Spread

    @property
    def place(self) -> Place:
        return Place(self.nodes, self.context, self.batch)


def clock_named(device: torch.device) -> str:
    """The thread's own CPU time where one thread does all the work, since no other program disturbs that; else wall."""
    return THREAD if device.type == "cpu" and torch.get_num_threads() == 1 else WALL


def seconds(clock: str, device: torch.device) -> Callable[[], float]:
    """The time of the clock, once the device is done with what it was given."""
    if clock == THREAD:
        return time.thread_time
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def measure(
    paths: Sequence[Path],
    places: Sequence[Place],
    rounds: int,
    now: Callable[[], float],
    progress: Callable[[str], None],
) -> Iterator[Timing]:
    """Warm up every place of a context and batch, then measure; yields as it goes."""
    if rounds < 1:
        raise ForetokenError(f"rounds is {rounds}: it must be at least 1.")
    for (context, batch), group in groupby(places, key=lambda p: (p.context, p.batch)):
        of_group = list(group)
        for path in paths:
            progress(f"context {context}, batch {batch}: filling the cache of {path.name}")
            path.open(context, batch, max(p.nodes for p in of_group))
            for place in of_group:
                _turn(path, place, 1, now)
        for place in of_group:
            progress(f"context {context}, batch {batch}: {place.nodes} nodes")
            for round_ in range(rounds):
                turn = round_ % len(paths)
                for order, path in enumerate([*paths[turn:], *paths[:turn]]):
                    took = _turn(path, place, REPEATS, now)
                    speed = path.weight_bytes / took / 1e9
                    yield Timing(path.name, path.what, place.nodes, context, batch, round_, order, took * 1e3, speed)


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


def summarise(timings: Sequence[Timing]) -> list[Row]:
    """One row a (place, path), in the order in which they came. Rounds that lack a path are left out."""
    times: dict[tuple[Place, int], dict[str, Timing]] = {}
    for t in timings:
        times.setdefault((t.place, t.round), {})[t.path] = t
    paths = list(dict.fromkeys(t.path for t in timings))
    rows = []
    for place in dict.fromkeys(t.place for t in timings):
        rounds = [of for (where, _), of in times.items() if where == place and len(of) == len(paths)]
        for path in paths if rounds else ():
            rows.append(
                Row(
                    path,
                    place.nodes,
                    place.context,
                    place.batch,
                    len(rounds),
                    _spread([of[path].ms for of in rounds]),
                    median(of[path].gb_s for of in rounds),
                    _spread([of[THEIRS].ms / of[path].ms for of in rounds]),
                    _spread([of[EAGER].ms / of[path].ms for of in rounds]),
                )
            )
    return rows


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def memory_bandwidth(device: torch.device, now: Callable[[], float]) -> float:
    """GB/s at which this process, with its threads, reads memory: the best of five sums over 256 MiB."""
    data = torch.ones(READ // 4, device=device)
    best = float("inf")
    for _ in range(5):
        begin = now()
        data.sum()
        best = min(best, now() - begin)
    return READ / best / 1e9
