"""How many threads a forward runs in: as many as it was measured to be fastest in.

More threads are not always faster. Small models wait longer for each other than they compute, and where another program
takes one of the cores, every step of a layer ends only when the thread beside that program is done. So forwards are
timed as they run, and a number of threads that has become slow is given up for one that was faster when last tried.
Results do not depend on it: threads share out columns and heads, never the terms of a sum.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretoken.kernel.compile import use_threads

TRIALS = 3  # forwards in each number of threads before one is chosen: the first may find cold caches
# Forwards after which the others are tried once more, at first and in the long run. So a number that another program
# disturbed at first comes back soon, and in the end a trial at twice the time costs 0.5%.
SOON, AGAIN = 25, 200
NEWEST = 0.25  # weight of the newest time where it is not faster


@dataclass
class Trials:
    """What forwards of one size took in one number of threads.

    count: of these forwards. last: number of the last one among all of the size. seconds: what one takes now.
    wait: forwards until it is tried again while another number is chosen; it doubles with every trial.
    """

    count: int = 0
    last: int = 0
    seconds: float = float("inf")
    wait: int = SOON

    def learn(self, seconds: float, now: int) -> None:
        """seconds: of one forward. now: the number of forwards of this size so far.

        A faster forward counts at once, since other programs make forwards slower only; a slower one counts for a part.
        """
        self.last, self.count = now, self.count + 1
        faster = seconds < self.seconds
        self.seconds = seconds if faster else self.seconds + NEWEST * (seconds - self.seconds)


@dataclass
class Size:
    """Forwards of about the same number of rows and the same number of levels."""

    by_threads: dict[int, Trials]
    forwards: int = 0

    def choose(self) -> int:
        """The number of threads of the next forward."""
        threads, fewest = min(self.by_threads.items(), key=lambda each: each[1].count)
        if fewest.count < TRIALS:  # in turn, so that a disturbance meets all numbers
            return threads
        for threads, trials in self.by_threads.items():
            if self.forwards - trials.last >= trials.wait:
                trials.wait = min(2 * trials.wait, AGAIN)
                return threads
        return min(self.by_threads, key=lambda threads: self.by_threads[threads].seconds)


@dataclass
class ThreadChoice:
    """The choice for the forwards of one model.

    clock: seconds that go by, whatever runs.
    """

    clock: Callable[[], float] = time.perf_counter
    sizes: dict[tuple[int, int], Size] = field(default_factory=dict)

    @contextmanager
    def forward(self, most: int, rows: int, levels: int = 1) -> Iterator[int | None]:
        """Time what is done inside, which is to run in the number of threads that this yields.

        most: threads at most; with 1 there is nothing to choose, and compiled loops get None.
        rows: nodes of the forward. levels: of a chain that is drafted by forwards one after the other.
        """
        started = use_threads(most)
        if started is None:
            yield None
            return
        size = self.sizes.setdefault(
            (rows.bit_length(), levels), Size({threads: Trials() for threads in _numbers(started)})
        )
        threads, start = size.choose(), self.clock()
        yield threads  # one thread as 1 and not as None, for which everything would be compiled anew
        size.forwards += 1
        size.by_threads[threads].learn(self.clock() - start, size.forwards)


def _numbers(most: int) -> list[int]:
    """`most` and what is left of it by halving."""
    numbers = [most]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    return numbers
