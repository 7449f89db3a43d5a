"""The one loop of all measurements: methods take turns, after a warm-up, in an order that rotates.

A block is what the methods are compared on, for example one prompt in one round. All methods run once on a block before
the next block begins, so that a machine that slows down for a while slows them all. Ratios are taken inside a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")
B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")
WARM_TOKENS = 16  # new tokens of a warm-up run
Progress = Callable[[str], None]  # shows a line about what is done now


@dataclass(frozen=True)
class Block:
    """One prompt in one round at one sampling temperature.

    number: the block's place among all blocks of a measurement, from 0.
    round, prompt: the places of its round and of its prompt, from 0.
    temperature: the sampling temperature.
    label: the block in words, for progress.
    """

    number: int
    round: int
    prompt: int
    temperature: float
    label: str

    def __str__(self) -> str:
        return self.label


def blocks(rounds: int, prompts: int, temperatures: Sequence[float]) -> list[Block]:
    """Return the blocks of a measurement in order: in each round all prompts, and each at all `temperatures`.

    rounds, prompts: the numbers of rounds and of prompts.
    """
    places = [(r, i, t) for r in range(rounds) for i in range(prompts) for t in temperatures]
    return [
        Block(number, r, i, t, f"round {r + 1}/{rounds}, prompt {i + 1}/{prompts}, temperature {t:g}")
        for number, (r, i, t) in enumerate(places)
    ]


@dataclass(frozen=True)
class Turn(Generic[B, R]):
    """The result of one method on one block.

    order: its place among the methods on this block, from 0.
    last: whether it was the last of them.
    """

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
    """Run every method on every block in turn, and yield each result at once.

    methods: {name: method}; block i begins with method i, modulo their number.
    blocks: in the order in which they are measured.
    run: measures one method on one block.
    warm: runs a method once before all blocks, so that nothing is compiled or loaded in a measured run; None where that
        is not needed.
    progress: shows which method runs on which block.
    known: whether a block was measured before. Such a block is passed over, and if all are known nothing is warmed up.
    """
    for number, block in enumerate(blocks):
        if known(block):
            continue
        if warm is not None:
            for name, method in methods.items():
                progress(f"warming up {name}")
                warm(method)
            warm = None
        for order, name in enumerate(rotated(list(methods), number)):
            progress(f"[{number * len(methods) + order + 1}/{len(blocks) * len(methods)}] {block}: {name}")
            yield Turn(name, block, order, order == len(methods) - 1, run(methods[name], block))


def rotated(items: Sequence[T], first: int) -> list[T]:
    """Return `items` from index `first` (modulo their number) on, then those before it."""
    turn = first % len(items)
    return [*items[turn:], *items[:turn]]


def until_interrupted(found: Iterable[T], done: list[T]) -> bool:
    """Append what `found` yields while it is measured to a list; returns whether Ctrl-C ended that early.

    done: the list; where it is still empty, KeyboardInterrupt is raised.
    """
    try:
        for each in found:
            done.append(each)
    except KeyboardInterrupt:
        if not done:
            raise
        return True
    return False
