"""How many threads a forward runs in: as many as it was measured to be fastest in.

More threads are not always faster. Those of a small model wait longer for each other than they compute. Where another
program takes one of the cores, every step of a layer ends only when the thread beside that program is done. So forwards
are timed as they run, and a number of threads that has become slow is given up for one that was faster when last tried.
Results do not depend on the number of threads: threads share out columns and heads, never the terms of a sum.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretoken.kernel.compile import compilations, use_threads

TRIALS = 3  # forwards in each number of threads before one is chosen: the first may find weights not in the cache
# A number of threads that is not chosen is tried again when the trial is expected to cost this share of the time since
# its last one. The share is a quarter at first, so that a number that another program slowed down in the beginning is
# tried again soon. It halves with every trial, down to 1% in the long run: where other programs take all cores, two
# threads may need a hundred times as long as one, since in every step of every layer each waits until the other gets a
# core again. A size in which a number was not among the first trials begins with the share that others have come to.
SOON, SELDOM = 0.25, 0.01
NEWEST = 0.25  # weight of the newest time in the estimate, where it is not faster
# A number of threads that took so many times as long as the best is not tried at first for other sizes: 4 times where
# it is the larger number, which may pay in larger forwards; 1.5 times where it is the smaller one. Without the
# second, a first prompt of 2,000 tokens took 11.7 instead of 9.4 s (Qwen2.5-Coder-1.5B, two cores).
HOPELESS, TOO_FEW = 4.0, 1.5


@dataclass
class Trials:
    """Times of forwards of one size in one number of threads.

    count: number of these forwards.
    last: the time that forwards of the size had taken when the last of these ended, in any number of threads, in
        seconds.
    seconds: the estimated time of a forward, in seconds.
    share: while another number is chosen, this one is tried again when that costs no more than this share of the time
        of all forwards of the size since `last`. It counts once the number has run TRIALS times.
    """

    count: int = 0
    last: float = 0.0
    seconds: float = float("inf")
    share: float = SOON


@dataclass
class Run:
    """One run of compiled code that is timed.

    threads: how many threads it must use; None where there is one at most.
    forwards: how many forwards it runs, one after the other; whoever runs fewer sets it.
    """

    threads: int | None
    forwards: int


@dataclass
class Size:
    """Forwards of about the same number of rows; guesses (chain.py) are not counted as rows.

    by_threads: what is known of each number of threads.
    seconds: time that all of these forwards have taken so far.
    least: the time of the fastest of them, in any number of threads.
    """

    by_threads: dict[int, Trials]
    seconds: float = 0.0
    least: float = float("inf")


SLOWNESS: dict[int, float] = {}  # shared by all models of this process


@dataclass
class ThreadChoice:
    """The choice of a number of threads for the forwards of one model.

    clock: gives seconds of time as it passes, whatever runs.
    slowness: per number of threads, how many times as long as in the best number forwards took lately, of whichever
        size and model: another program slows down all of them alike.
    own: the same of this model alone, which counts where it is known: a small model gains less by threads.
    sizes: the forwards so far, by the bit length of their number of rows.
    shares: per number of threads the least share of all sizes, which counts where the number has run fewer times.
    """

    clock: Callable[[], float] = time.perf_counter
    slowness: dict[int, float] = field(default_factory=lambda: SLOWNESS)
    own: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, Size] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)

    @contextmanager
    def forward(self, most: int, rows: int, levels: int = 1) -> Iterator[Run]:
        """Yield a Run and time what the caller does with it, which must run in its threads.

        most: the largest number of threads; with 1 there is nothing to choose, and compiled loops get None.
        rows: nodes of the forward.
        levels: number of forwards, more than 1 for a chain that is drafted by forwards one after the other. A caller
            that ran fewer sets `forwards` of the Run.
        """
        started = use_threads(most)
        if started is None:
            yield Run(None, levels)
            return
        numbers = [started >> halvings for halvings in range(started.bit_length())]
        size = self.sizes.setdefault(rows.bit_length(), Size({threads: Trials() for threads in numbers}))
        threads, start = self._choose(size, levels), self.clock()
        compiled = compilations()[0]
        run = Run(threads, levels)  # one thread is 1 here, since for None all would be compiled anew
        yield run
        seconds = self.clock() - start
        size.seconds += seconds
        if compilations()[0] != compiled:  # compiling took longer than any forward: the time says nothing
            return
        trials, each = size.by_threads[threads], seconds / run.forwards
        trials.last, trials.count, size.least = size.seconds, trials.count + 1, min(size.least, each)
        # A faster forward counts at once, since other programs make forwards slower only; a slower one for a part.
        trials.seconds = each if each < trials.seconds else trials.seconds + NEWEST * (each - trials.seconds)
        slowness = trials.seconds / min(known.seconds for known in size.by_threads.values())
        self.slowness[threads] = self.own[threads] = slowness

    def _choose(self, size: Size, levels: int) -> int:
        """Return the number of threads in which the next forwards run.

        size: what is known of forwards of their size. levels: number of these forwards.
        """
        slowness = {**self.slowness, **self.own}
        usual = min(slowness, key=lambda threads: slowness[threads], default=0)
        untried = {
            threads: trials.count
            for threads, trials in size.by_threads.items()
            if trials.count < TRIALS and slowness.get(threads, 1.0) < (TOO_FEW if threads < usual else HOPELESS)
        }
        if untried:  # in turn, so that another program slows down all numbers alike
            return min(untried, key=lambda threads: untried[threads])
        expected = {
            threads: trials.seconds if trials.count else slowness[threads] * size.least
            for threads, trials in size.by_threads.items()
        }
        best = min(expected, key=lambda threads: expected[threads])
        for threads, trials in size.by_threads.items():
            of_model = self.shares.get(threads, SOON)
            share = trials.share if trials.count >= TRIALS else of_model
            if threads != best and levels * expected[threads] <= share * (size.seconds - trials.last):
                trials.share = max(share / 2, SELDOM)
                self.shares[threads] = min(of_model, trials.share)
                return threads
        return best
