"""A drafter made of several, of which each step uses the one that was measured to be the fastest.

Two vocabularies are the case: strings that are matched exactly (slem) or common tokens with their probabilities (tli).
Which is faster depends on the text, the temperature and the models. Steps come in blocks; in each block one drafter
drafts for all sequences, and its tokens per second are noted. Most blocks are given to the drafter that was the fastest
so far, some to another. In the words of the field it is a bandit, and its drafters are the arms.

The choice depends on earlier steps alone, so that every step is lossless as a step of its drafter.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.core.interfaces import DraftSession, Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.draft.auto import AutoDrafter

# Chosen by simulating the cases of tests/test_fastest.py: half or double of one gains at most 3% in any of them.
BLOCK = 8  # steps: some twenty tokens, a fifth of a short answer
KEEP = 0.9  # per block: the last ten or so count
SHARE = 0.02  # of the time, what tries of slower arms may lose


@dataclass
class Speed:
    """Tokens and seconds of the steps of one arm; older blocks count less."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Choice:
    """Which of `count` arms drafts the next block of steps. The first is the one that is expected to be the fastest.

    speeds: of each arm.
    current: the arm of this block.
    left: steps of the block still to come. After a change of arms there is one more, which is not measured: the new arm
        first reads what it did not follow.
    took: seconds of this block.
    since: seconds of blocks of the fastest arm since another was tried.
    """

    count: int
    speeds: list[Speed] = field(init=False)
    current: int = 0
    left: int = BLOCK + 1
    took: float = 0.0
    since: float = 0.0

    def __post_init__(self) -> None:
        self.speeds = [Speed() for _ in range(self.count)]

    @property
    def best(self) -> int:
        """The arm that was the fastest so far."""
        return max(range(self.count), key=lambda arm: self.speeds[arm].per_second)

    def next(self) -> int:
        """The arm of the next step."""
        if self.left == 0:
            before, self.current = self.current, self._next_block()
            self.left, self.took = BLOCK + (self.current != before), 0.0
        self.left -= 1
        return self.current

    @property
    def measured(self) -> bool:
        """Whether the present step tells how fast its arm is."""
        return self.left < BLOCK

    def learn(self, tokens: int, seconds: float) -> None:
        """The present step emitted so many tokens, of all sequences together, in so many seconds."""
        self.speeds[self.current].tokens += tokens
        self.speeds[self.current].seconds += seconds
        self.took += seconds

    def _next_block(self) -> int:
        """The arm of the next block: one that was never tried, a slower one if a try costs little, or the fastest."""
        for speed in self.speeds:  # also of the others, so that a new try outweighs what is long ago
            speed.tokens *= KEEP
            speed.seconds *= KEEP
        best = self.best
        self.since += self.took if self.current == best else 0.0
        others = [arm for arm in range(self.count) if arm != best]
        for arm in sorted(others, key=lambda arm: self.speeds[arm].seconds):  # the one least known first
            speed = self.speeds[arm].per_second
            if not speed or self.took * (self.speeds[best].per_second / speed - 1) <= SHARE * self.since:
                self.since = 0.0
                return arm
        return best


@dataclass(frozen=True)
class FastestDrafter:
    """Several drafters of one target, each under a controller of its own depth, of which the fastest one drafts.

    drafters: the first is the one that is expected to be the fastest.
    choices: what was measured of them, kept from one text to the next: at temperature 0 and above it.
    """

    drafters: tuple[AutoDrafter, ...]
    choices: dict[bool, Choice] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.drafters[0].name

    @property
    def laws(self) -> tuple[Law, ...]:
        """Those of the drafters whose draft tokens have a q: any walk matches draft tokens without one exactly."""
        priced = [arm.laws for arm in self.drafters if not any(isinstance(law, Opaque) for law in arm.laws)]
        return tuple(law for laws in priced or [arm.laws for arm in self.drafters] for law in laws)

    @property
    def max_nodes(self) -> int:
        return max(arm.max_nodes for arm in self.drafters)

    @property
    def outlook(self) -> tuple[float, float]:
        """As AutoDrafter has it, of the drafter that was the fastest at the first temperature that was asked for."""
        return self.drafters[next((choice.best for choice in self.choices.values()), 0)].outlook

    def open(self, batch: int, slots: int) -> "FastestSession":
        sessions = [arm.open(batch, slots) for arm in self.drafters]
        return FastestSession(sessions, self.choices, self.drafters[0].session_clock() or time.perf_counter)


class FastestSession:
    """The sessions of all drafters. Those that do not draft fall behind the text, and catch up when they are asked."""

    def __init__(self, sessions: Seq[DraftSession], choices: dict[bool, Choice], clock: Callable[[], float]) -> None:
        self._sessions, self._choices, self._clock = sessions, choices, clock
        self._choice = Choice(len(sessions))
        self._began, self._new = 0.0, False

    def join(self) -> None:
        for session in self._sessions:
            session.join()
        self._new = True

    def leave(self, row: int) -> None:
        for session in self._sessions:
            session.leave(row)

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        greedy = all(seq.sampling.temperature == 0 for seq in sequences)
        self._choice = self._choices.setdefault(greedy, Choice(len(self._sessions)))
        self._began = self._clock()
        return self._sessions[self._choice.next()].propose(sequences)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        self._sessions[self._choice.current].observe(sequences, trees, paths)
        if self._choice.measured and not self._new:  # the step after a join reads a prompt
            self._choice.learn(sum(map(len, paths)), self._clock() - self._began)
        self._new = False
