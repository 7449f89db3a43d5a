"""The run-time controller: it chooses how far the next step drafts, by what past steps brought and cost.

    E(d)   tokens of a step of depth d, summed over the sequences: 1 + a + a^2 + .. + a^d
    a      probability that a draft token is accepted whose parent was, a running mean per sequence
    T(d)   time of a step in plain steps, T(0) = 1:   T(d) = 1 + x_d,   x_d a running mean of the steps of depth d,
           which starts from what is expected of that depth, scaled as all drafted steps together turned out

The depth is the one with the best rate E(d) / T(d), one for all sequences; d = 0 is plain decoding.

For a single sequence whose drafter gives q there is a better way: draft on while the next token is expected to bring
what its time is worth at that rate,

    a P(the path so far is accepted)  >=  rate (T(d + 1) - T(d))         (or some next tokens together)

with a as above. It is the rule by which to leave a patch for the next one (Charnov 1976, Optimal foraging,
the marginal value theorem); the rate in it is that of the best single depth, since the rule's own is not known. The
model of P is a constant hazard: a path down to which the product of q is s is accepted with probability s^c, c the
rejections per nat of -ln s so far. So the rule is a floor for s at each depth. In a batch the deepest draft sets the
time of all, and the depth stays one for all.

After plain decoding drafting is tried again on credit only: every step books what it won or lost against plain
decoding, plain steps earn ALLOWANCE, and with a negative balance nothing is tried. So a useless drafter costs that
share and the first tries, whatever the estimates of its acceptance say. Until plain steps are first measured, one draft
token is tried as long as it would pay if its acceptance were a standard deviation above the mean so far, since the
first ones may be unlucky; what these tries lose is not booked. What a draft takes is learnt from steps of one draft
token each, until one takes about as long as was expected, and from TRIES at most: so a drafter that takes tens of plain
steps per token costs few of those.

The choice depends on earlier steps alone, never on a draw of the step that it decides for: docs/theory.md.

Each constant was kept because a simulation of drafters and machines (tests/test_controller.py has its bars) became
more than 3% slower in some case without it, or missed a bar; their values matter little (docs/LOG.md, 2026-11-30).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from foretoken.draft.acceptance import HOPE, Acceptance
from foretoken.draft.reading import Lengths, Reading

ALLOWANCE = 0.02  # plain steps that a plain step earns towards a new try: the price of a useless drafter
FORGET = 0.99  # weight of the times measured before, when a step is measured: about the last 100 steps matter
CREDIT = 32.0  # plain steps: the most that gains add up to, or losses by reading a prompt, which takes many steps' time
DEBT = 4.0  # plain steps: the most that other losses add up to
EXTRA = (0.1, 0.15, 0.03)  # plain steps that an unknown drafter is expected to take: per step, per level, per node
DARING = 0.15  # share by which a depth never tried may be cheaper than expected: it is tried if that would pay
LOOK, LOOKS = 8, 5  # plain steps are measured after LOOK * 2**Costs.looks drafted ones; the last LOOKS times count
SETTLED_S, MEASURED = 0.005, 3  # the median of 3 plain steps, after 5 ms in which caches settle; 2 * LOOK at most
PACE = 0.2  # the share of a step's deviation from what was expected that is attributed to the machine's pace
OUTLIER = 1.4  # a deviation by more than this factor counts as this much: another program's doing
TRIES = 3  # steps of one draft token that a slow drafter begins with; together they are believed, whatever they took
SHORTEST = 1e-9  # seconds of a step that the clock did not see
LEAST = 1e-3  # plain steps that a draft is expected to take at least, by which is divided


def expected_extra(sizes: Sequence[int], extra: tuple[float, float, float] = EXTRA) -> tuple[float, ...]:
    """Return what a step of each depth is expected to take beyond a plain one, in plain steps [largest depth + 1].

    sizes: nodes of the tree at most when it is cut at depth 0, 1, .., the root left out.
    extra: plain steps per drafted step, per level and per node.
    """
    step, level, node = extra
    return (0.0, *(step + level * depth + node * sizes[depth] for depth in range(1, len(sizes))))


@dataclass
class Costs:
    """What steps cost at one batch size, by the machine's pace, and whether drafting paid there.

    Other programs slow down every step alike: times are in units of `pace_s` seconds, which follows the machine. What
    pays for one text may not pay for sixteen: each batch size has Costs of its own, which rest while others are in use.

    extra: what a step of each depth is expected to take beyond a plain one, as from `expected_extra`.
    pace_s: seconds of one unit now, about a plain step; None before the first step.
    plain: what a plain step takes, in units.
    since_look: drafted steps since plain ones were last measured.
    looked: seconds of the plain steps since the last drafted one, while plain steps are measured.
    looks: how often plain steps were measured, plus 1, LOOKS at most.
    seen: per depth the number of its steps and the sum of what they took beyond one unit; older ones count less.
    drafted: what all drafted steps took beyond one unit, and what was expected of them; older ones count less.
    number: the number of drafted steps; older ones count less.
    tries: by what factors the first drafted steps took longer than expected, TRIES at most.
    drafting: whether drafting paid lately.
    balance: plain steps won, or lost if negative; kept between texts, since a text on which drafting does not pay is no
        reason to read the next one's prompt with the drafter too.
    borrowed: whether `extra` comes from another batch size, where a step may cost a fraction of what it costs here.
    reading: what reading texts with the drafter takes.
    """

    extra: Sequence[float]
    pace_s: float | None = None
    plain: float = 1.0
    since_look: int = 0
    looked: list[float] = field(default_factory=list)
    looks: int = 1
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    drafted: tuple[float, float] = (0.0, 0.0)
    number: float = 0.0
    tries: list[float] = field(default_factory=list)
    drafting: bool = True
    balance: float = 0.0
    borrowed: bool = False
    reading: Reading = field(default_factory=Reading)

    def learn(self, depth: int, seconds: float) -> None:
        """Learn from one step that took so many `seconds`; depth: the levels that it drafted, 0 for a plain one."""
        if depth:
            self.looked.clear()
        elif self.since_look:
            self.looked.append(seconds)
            if len(self.looked) < 2 * LOOK and sum(self.looked[:-MEASURED]) < SETTLED_S:
                return
            seconds = median(self.looked[-MEASURED:])
        expected = self._paces(depth, self._scale)
        if self.pace_s is None:
            self.pace_s = max(seconds, SHORTEST) / expected
        off = max(seconds, SHORTEST) / (self.pace_s * expected)
        known = min(max(off, 1 / OUTLIER), OUTLIER)
        paced = known
        if depth and len(self.tries) < TRIES:
            self.tries.append(off)
            if len(self.tries) == TRIES:
                known = max(known, min(self.tries))
        if depth and self.borrowed and not self.seen:  # what is expected was measured at another batch size
            known = max(off, known)
        if depth:
            self.since_look += 1
            took = known * expected - 1
            self.drafted = _faded(self.drafted, took, self.extra[depth])
            self.number = FORGET * self.number + 1
            self.seen[depth] = _faded(self.seen.get(depth, (0.0, 0.0)), 1.0, took)
        elif self.since_look:
            self.looks = min(self.looks + 1, LOOKS)
            self.plain *= known ** (1 / self.looks)
            self.since_look = 0
        self.pace_s *= paced**PACE if off > 1 / OUTLIER else off  # only what is slow can be another program's doing

    @property
    def tried(self) -> bool:
        """Whether it is known how long drafted steps take: one took about what was expected, or TRIES took longer."""
        return len(self.tries) == TRIES or min(self.tries, default=math.inf) <= OUTLIER

    @property
    def due(self) -> bool:
        """Whether plain steps should be measured now."""
        return self.pace_s is None or self.since_look >= LOOK * 2**self.looks

    def steps(self, depth: int) -> float:
        """T, the time of a step of this depth in plain steps."""
        return self._paces(depth, self._scale) / self.plain

    def hope(self, depth: int) -> float:
        """What T of this depth may come down to, as a share of it: the fewer steps were measured, the less."""
        return 1 - DARING / (1 + self.seen.get(depth, (0.0, 0.0))[0]) ** 0.5

    def times(self) -> list[float]:
        """T of every depth from 0 on, in plain steps."""
        scale = self._scale
        return [self._paces(depth, scale) / self.plain for depth in range(len(self.extra))]

    @property
    def drafted_step(self) -> float:
        """The mean time of a step that drafts, in plain steps; before the first, that of the deepest one."""
        if not self.number:
            return self.steps(len(self.extra) - 1)
        return (1 + self.drafted[0] / self.number) / self.plain

    def plain_steps(self, seconds: float) -> float:
        """How many plain steps take so many seconds now; for costs that have a pace."""
        assert self.pace_s is not None
        return seconds / (self.pace_s * self.plain)

    def _paces(self, depth: int, scale: float) -> float:
        """What a step of this depth takes, in units; scale: the value of `_scale` now."""
        if not depth:
            return self.plain
        count, took = self.seen.get(depth, (0.0, 0.0))
        return 1 + (took + scale * self.extra[depth]) / (count + 1)

    @property
    def shown(self) -> list[float]:
        """What was expected of each depth, scaled as all drafted steps together turned out."""
        scale = self._scale
        return [scale * extra for extra in self.extra]

    @property
    def _scale(self) -> float:
        """What drafted steps took beyond one unit, as a share of what was expected, which weighs as one step itself."""
        once = max(sum(self.extra) / max(len(self.extra) - 1, 1), LEAST)
        return max((self.drafted[0] + once) / (self.drafted[1] + once), 0.0)

    def like(self) -> "Costs":
        """Return the costs that another batch size starts from; it takes over a debt, but no more than DEBT.

        A larger debt comes from reading a prompt, which the next batch size need not pay for again.
        """
        debt = max(-DEBT, min(self.balance, 0.0))
        return Costs(
            self.shown, plain=self.plain, looks=self.looks, drafting=self.drafting, balance=debt, borrowed=True,
            reading=replace(self.reading),
        )  # fmt: skip


def _faded(sums: tuple[float, float], first: float, second: float) -> tuple[float, float]:
    """Two running sums after one more step."""
    return FORGET * sums[0] + first, FORGET * sums[1] + second


@dataclass
class Experience:
    """What was learnt from earlier texts, where the next one starts.

    extra: as from `expected_extra`; a depth for which it has no number is never drafted.
    drafts: the acceptance in all texts.
    costs: Costs by batch size.
    lengths: how long texts are.
    known: whether `extra` was measured before, for this drafter on this machine.
    """

    extra: tuple[float, ...]
    drafts: Acceptance = field(default_factory=Acceptance)
    costs: dict[int, Costs] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    known: bool = False

    def costs_of(self, batch: int) -> Costs:
        """Return the costs at a batch size. Until something was drafted there, what is expected of it is what the
        nearest batch size with drafted steps shows by now."""
        costs = self.costs.get(batch)
        if costs is not None and (costs.seen or not costs.borrowed):
            return costs
        sizes = sorted((size for size in self.costs if size != batch), key=lambda size: abs(size - batch))
        if costs is None:
            costs = self.costs[batch] = self.costs[sizes[0]].like() if sizes else Costs(self.extra)
        drafted = next((self.costs[size] for size in sizes if self.costs[size].seen), None)
        if drafted is not None:
            costs.extra = drafted.shown
        return costs


@dataclass
class Controller:
    """Chooses how far each step of one batch drafts.

    experience: what was learnt from earlier texts; it is updated.
    sequences: the acceptance of each sequence of the batch.
    waiting: whether the present step is plain because the texts are not worth reading with the drafter yet.
    trusting: whether the present step drafts although that may not pay, see `_may_pay`.
    """

    experience: Experience
    sequences: list[Acceptance] = field(default_factory=list)
    waiting: bool = False
    trusting: bool = False

    @property
    def costs(self) -> Costs:
        """The costs at the present batch size."""
        return self.experience.costs_of(len(self.sequences))

    @property
    def deepest(self) -> int:
        """The depth of the largest tree."""
        return len(self.experience.extra) - 1

    def join(self) -> None:
        """Add a sequence at the end."""
        drafts = self.experience.drafts
        self.sequences.append(drafts.new(drafts.mean))

    def leave(self, index: int) -> None:
        """Remove the sequence at `index`; the last one takes its place."""
        self.sequences[index] = self.sequences[-1]
        self.sequences.pop()

    def choose(
        self, timed: bool = True, limits: Sequence[int] | None = None, unread: Sequence[int] = (),
        left: Sequence[float] = (),
    ) -> list[tuple[float, ...]]:  # fmt: skip
        """Choose how far the next step drafts: per sequence one floor for each level of its next tree.

        So the depth of a tree is the number of its floors. The list is empty for a plain step.

        timed: whether this step's time can be measured.
        limits: the most draft tokens that each sequence's next tree may have on a path; None where there is no limit.
        unread: per sequence the number of ids that the drafter must read first; empty where there are none.
        left: per sequence how many tokens it is expected to have yet; empty as `unread` is, or where all of it is 0.
        """
        costs = self.costs
        self.waiting = self.trusting = False
        if not costs.drafting and costs.balance < 0:
            return []
        limits = limits or [self.deepest] * len(self.sequences)
        if any(unread):  # a sequence that is not worth reading is left out
            each = zip(limits, unread, left, strict=True)
            kept = [limit if limit and self.worth_reading(ids, tokens) else 0 for limit, ids, tokens in each]
            self.waiting = any(limits) and not any(kept)
            limits = kept
        if self.waiting:
            costs.reading.credit += ALLOWANCE
            return []
        if not costs.drafting:
            return [floors if limit else () for floors, limit in zip(self._try_again(costs), limits, strict=False)]
        if timed and costs.due:
            return []
        times = costs.times()
        alone = self.sequences[0] if len(self.sequences) == 1 and self.sequences[0].tells else None
        each = zip(self.sequences, limits, strict=True)
        tokens = map(sum, zip(*(sequence.expected(limit, self.deepest) for sequence, limit in each), strict=True))
        rates = [expected / time for expected, time in zip(tokens, times, strict=True)]
        if max(rates[1:]) <= rates[0]:
            self.trusting = costs.tried and costs.looks == 1 and self._may_pay(times[1], limits)
            if self.trusting:
                return [(0.0,) if limit else () for limit in limits]
            costs.drafting = costs.since_look > 0  # not before a look at what a plain step takes now
            return []
        tried = self.experience.known or costs.borrowed or costs.tried
        if alone is not None and tried:
            return [alone.floors([max(rates) * price for price in prices(times, alone.mean)])[: limits[0]]]
        depth = max(range(1, len(rates)), key=lambda depth: rates[depth] / costs.hope(depth))
        return [(0.0,) * (depth if tried else 1) if limit else () for limit in limits]

    def _may_pay(self, time: float, limits: Sequence[int]) -> bool:
        """Return whether one draft token would pay if its acceptance were a standard deviation above the mean so far.

        Of a drafter of which six in ten draft tokens are accepted, the first three are rejected in one text of sixteen.
        Mean and deviation are those of all sequences together, for many are seldom unlucky at once. A sequence that may
        not draft counts too: it waits for the drafts of the others, which bring it nothing.

        time: that of a step with one draft token, in plain steps.
        limits: as in `choose`.
        """
        drafting = [each for each, limit in zip(self.sequences, limits, strict=True) if limit]
        hoped = sum(each.mean for each in drafting) + math.hypot(*(each.deviation for each in drafting))
        return 1 + hoped / len(self.sequences) > time

    def worth_reading(self, unread: int, left: float) -> bool:
        """Return whether reading a sequence with the drafter takes less than what drafting saves it.

        All sequences wait for it. As long as nothing is known of drafts, and after plain decoding, the most that they
        could save counts.

        unread: the number of ids to read.
        left: how many tokens the sequence is expected to have yet.
        """
        if not unread:
            return True
        costs, expected, rate = self.costs, 1.0, 1.0
        acceptance = self.experience.drafts.mean if costs.drafting and costs.seen else 1.0
        for depth, time in enumerate(costs.times()[1:], 1):
            expected += acceptance**depth
            rate = max(rate, expected / time)
        saved = left * (1 - 1 / rate)  # if nothing, drafting is given up for that, and not for what reading takes
        cost = len(self.sequences) * costs.reading.cost(unread)
        return rate == 1.0 or cost <= saved + costs.reading.credit

    def _try_again(self, costs: Costs) -> list[tuple[float, ...]]:
        """Choose one draft token per sequence if drafting pays at any acceptance, else none."""
        if not any(depth + 1 > costs.steps(depth) for depth in range(1, len(self.experience.extra))):
            # Drafting would not pay if everything were accepted. Only drafted steps can show that it has become
            # cheaper: so it is tried again as if it had lost DEBT and its costs were unknown.
            costs.balance = -DEBT
            costs.seen, costs.drafted, costs.number, costs.tries = {}, (0.0, 0.0), 0.0, []
            return []
        costs.drafting = True
        drafts = self.experience.drafts
        self.sequences = [drafts.new(max(HOPE, drafts.mean)) for _ in self.sequences]
        return [(0.0,) for _ in self.sequences]

    def learn_acceptance(
        self, limits: Sequence[int], accepted: Sequence[int], surprises: Sequence[float | None]
    ) -> None:
        """Learn from the draft of each sequence at one step.

        limits, accepted: the most tokens that could be accepted, and those that were; with limit 0 nothing is learnt.
        surprises: of the tried tokens, as in `Acceptance`; None where q is unknown.
        """
        for sequence, limit, count, surprise in zip(self.sequences, limits, accepted, surprises, strict=True):
            if limit == 0:  # nothing was to be drafted for it
                continue
            sequence.learn(limit, count, surprise)
            self.experience.drafts.learn(limit, count, surprise)

    def learn_cost(self, depth: int, tokens: float, seconds: float | None, read: int = 0) -> None:
        """Learn from the time of one step.

        depth, tokens: the levels that it drafted, and the mean number of tokens that it emitted per sequence.
        seconds: its time; None where there is no clock: it took what was expected.
        read: the number of ids with which the drafter caught up after plain steps: such a step is booked, but does not
            predict the next one.
        """
        costs = self.costs
        if not read and seconds is not None:
            costs.learn(depth, seconds)
        if depth == 0:
            if not costs.drafting:
                costs.balance += ALLOWANCE
        elif costs.pace_s is not None or seconds is None:
            # Booked is the learnt mean of such steps, not this step's time: a slower machine is no loss of drafting.
            one_off, spent = None, costs.steps(depth)
            if read and seconds is not None:
                took = costs.plain_steps(seconds)
                costs.reading.learn(read, took - spent)
                one_off = spent = min(took, CREDIT + tokens)
            if self.trusting and one_off is None:  # what an unknown drafter's unlucky start loses is no debt
                return
            least = min(costs.balance, -DEBT if one_off is None else -CREDIT)
            costs.balance = max(least, min(CREDIT, costs.balance + tokens - spent))


def prices(times: Sequence[float], mean: float) -> list[float]:
    """Return what levels 2, 3, .. take, in plain steps: each its own time, or the mean time of some levels from it on
    if that is less, each level weighed by how likely it is reached from the first of them. For the next node may begin
    a block that the nodes after it share.

    times: of steps of depth 0, 1, .., in plain steps. What the first level takes is no part of it: with it comes what a
        drafted step takes once.
    mean: the acceptance of a draft token.
    """
    found = []
    for depth in range(1, len(times) - 1):
        brought, reach, least = 0.0, 1.0, math.inf
        for time in times[depth + 1 :]:
            brought += reach
            reach *= mean
            least = min(least, (time - times[depth]) / brought)
        found.append(max(least, 0.0))
    return found
