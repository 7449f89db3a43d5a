"""The one loop of everything that is measured: methods take turns, each warm, in an order that rotates.

A block is what the methods are compared on, as a prompt in a round. Every method runs once on each block before any
meets the next one, so that a machine that slows down for a while slows them all; ratios are taken inside a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")
B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")
WARM_TOKENS = 16  # of a run before those that are measured
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Block:
    """A prompt in a round, by their numbers from 0. number: of the block among all of a measurement."""

    number: int
    round: int
    prompt: int
    temperature: float
    label: str

    def __str__(self) -> str:
        return self.label


def blocks(rounds: int, prompts: int, temperatures: Sequence[float]) -> list[Block]:
    """Every temperature on every prompt, round after round."""
    places = [(r, i, t) for r in range(rounds) for i in range(prompts) for t in temperatures]
    return [
        Block(number, r, i, t, f"round {r + 1}/{rounds}, prompt {i + 1}/{prompts}, temperature {t:g}")
        for number, (r, i, t) in enumerate(places)
    ]


@dataclass(frozen=True)
class Turn(Generic[B, R]):
    """What one method did on one block. order: its place among the methods there; last: whether none comes after it."""

    name: str
    block: B
    order: int
    last: bool
    result: R


def interleave(
    methods: Mapping[str, M],
    blocks: Sequence[B],
    run: Callable[[M, B], R],
    warm: Callable[[M], object] | None,
    progress: Progress,
    known: Callable[[B], bool] = lambda _: False,
) -> Iterator[Turn[B, R]]:
    """Run every method on every block in turn, and yield as it goes.

    methods: by the names that progress tells; block i begins with method i, around the end.
    run: measures one method on one block.
    warm: runs a method once before all blocks, for what the first run compiles and pages in; None: that is done.
    known: whether a block was measured before; it is passed over, and where all were, nothing is warmed up.
    """
    cold = warm is not None
    for number, block in enumerate(blocks):
        if known(block):
            continue
        if cold and warm is not None:
            for name, method in methods.items():
                progress(f"warming up {name}")
                warm(method)
            cold = False
        for order, name in enumerate(rotated(list(methods), number)):
            progress(f"[{number * len(methods) + order + 1}/{len(blocks) * len(methods)}] {block}: {name}")
            yield Turn(name, block, order, order == len(methods) - 1, run(methods[name], block))


def rotated(items: Sequence[T], first: int) -> list[T]:
    """The items from number `first` on, then those before it."""
    turn = first % len(items)
    return [*items[turn:], *items[:turn]]


def until_interrupted(found: Iterable[T], done: list[T]) -> bool:
    """Append everything to `done`; True if Ctrl-C ended it early. Before there is anything, KeyboardInterrupt."""
    try:
        for each in found:
            done.append(each)
    except KeyboardInterrupt:
        if not done:
            raise
        return True
    return False
