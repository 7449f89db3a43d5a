"""How many threads a forward runs in: as many as it was measured to be fastest in.

More threads are not always faster. Small models wait longer for each other than they compute, and where another program
takes one of the cores, every step of a layer ends only when the thread beside that program is done. So forwards are
timed as they run, and a number of threads that has become slow is given up for one that was faster when last tried.
Results do not depend on it: threads share out columns and heads, never the terms of a sum.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretoken.kernel.compile import compilations, use_threads

TRIALS = 3  # forwards in each number of threads before one is chosen: the first may find cold caches
# A number that is not chosen is tried once more when the trial is expected to cost this share of the time since its
# last one: a quarter at first, so that one that another program disturbed in the beginning comes back soon, and 1% in
# the long run. Where other programs take all cores, two threads may need a hundred times as long as one: in every step
# of every layer each waits until the other gets a core again.
SOON, SELDOM = 0.25, 0.01
NEWEST = 0.25  # weight of the newest time where it is not faster
HOPELESS = 4.0  # times the best: a number that is so slow for one size is not tried for another meanwhile


@dataclass
class Trials:
    """What forwards of one size took in one number of threads.

    count: of these forwards. last: the seconds of all forwards of the size until the last of these ended.
    seconds: what one takes now. share: the cost of the next trial beside what is done until then, while another number
    is chosen; it halves with every trial.
    """

    count: int = 0
    last: float = 0.0
    seconds: float = float("inf")
    share: float = SOON

    def learn(self, seconds: float, now: float) -> None:
        """seconds: of one forward. now: of all forwards of this size so far.

        A faster forward counts at once, since other programs make forwards slower only; a slower one counts for a part.
        """
        self.last, self.count = now, self.count + 1
        faster = seconds < self.seconds
        self.seconds = seconds if faster else self.seconds + NEWEST * (seconds - self.seconds)


@dataclass
class Run:
    """One call. threads: in how many it is to run, None where there is nothing to choose.

    forwards: how many it ran, one after the other.
    """

    threads: int | None
    forwards: int


@dataclass
class Size:
    """Forwards of about the same number of rows, without guesses (chain.py). seconds: that all of them took so far."""

    by_threads: dict[int, Trials]
    seconds: float = 0.0

    def choose(self, levels: int, slowness: Mapping[int, float]) -> int:
        """The number of threads of the next forwards, `levels` of them. slowness: of each number, for any size."""
        untried = {
            threads: trials.count
            for threads, trials in self.by_threads.items()
            if trials.count < TRIALS and slowness.get(threads, 1.0) < HOPELESS
        }
        if untried:  # in turn, so that a disturbance meets all numbers
            return min(untried, key=lambda threads: untried[threads])
        best = min(self.by_threads, key=lambda threads: self.by_threads[threads].seconds)
        for threads, trials in self.by_threads.items():
            seconds = trials.seconds if trials.count else slowness[threads] * self.by_threads[best].seconds
            cost = levels * seconds
            if threads != best and cost <= trials.share * (self.seconds - trials.last):
                trials.share = max(trials.share / 2, SELDOM)
                return threads
        return best


SLOWNESS: dict[int, float] = {}  # of all models of this process


@dataclass
class ThreadChoice:
    """The choice for the forwards of one model.

    clock: seconds that go by, whatever runs.
    slowness: how many times as long as in the best number forwards took lately in each number of threads, of whichever
    size and model: what another program does to one it does to all.
    """

    clock: Callable[[], float] = time.perf_counter
    slowness: dict[int, float] = field(default_factory=lambda: SLOWNESS)
    sizes: dict[int, Size] = field(default_factory=dict)

    @contextmanager
    def forward(self, most: int, rows: int, levels: int = 1) -> Iterator[Run]:
        """Time what is done inside, which is to run in the threads of the Run that this yields.

        most: threads at most; with 1 there is nothing to choose, and compiled loops get None.
        rows: nodes of the forward. levels: of a chain that is drafted by forwards one after the other;
        what is inside says in the Run if they were fewer.
        """
        started = use_threads(most)
        if started is None:
            yield Run(None, levels)
            return
        numbers = [started >> halvings for halvings in range(started.bit_length())]
        size = self.sizes.setdefault(rows.bit_length(), Size({threads: Trials() for threads in numbers}))
        threads, start = size.choose(levels, self.slowness), self.clock()
        compiled = compilations()[0]
        run = Run(threads, levels)  # one thread as 1 and not as None, for which everything would be compiled anew
        yield run
        seconds = self.clock() - start
        size.seconds += seconds
        if compilations()[0] != compiled:  # that took longer than any forward
            return
        size.by_threads[threads].learn(seconds / run.forwards, size.seconds)
        best = min(trials.seconds for trials in size.by_threads.values())
        self.slowness[threads] = size.by_threads[threads].seconds / best
