"""How deep to draft at the next step, from what past steps brought and cost: the run-time controller.

    choose the depth d that maximises   E(d) / T(d),   E(d) = sum over sequences of 1 + a_1 + a_1 a_2 + .. + a_1..a_d
    a_i    probability that a path that reached depth i - 1 reaches depth i, a running mean of each sequence
    T(d)   time of a step in plain steps, T(0) = 1; running least squares:   T = 1 + r . (1, d, drafted nodes),
           and for each depth what its steps took beside that line, since forwards come in blocks of nodes

d = 0 is plain decoding. From there a new try is made on credit only: every step books what it won or lost against
plain decoding, plain steps earn ALLOWANCE, and who is in debt does not try. So a useless drafter costs that share and
the first tries, whatever the estimates say.

The choice depends on earlier steps alone, never on a draw of the step that it decides for: docs/losslessness.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.draft.running_fit import RunningFit

ALLOWANCE = 0.015  # plain steps that a plain step earns, to find out whether drafting pays again
CREDIT, DEBT = 32.0, 4.0  # plain steps: the most that gains, or losses, add up to; gains outlast a bad stretch
READING = 12.0  # and losses where the drafter had a text to read first
FORGET, FORGET_LONG = 0.97, 0.99  # a step, for acceptance: the last 30 steps count, the last 100 in the long run
FORGET_COST = 0.98
HOPE, HOPE_WEIGHT = 0.7, 2.0  # acceptance assumed of an unknown drafter, and its weight in trials
KNOWN_WEIGHT, FADE = 16.0, 100.0  # the weight it grows to in earlier texts, and the trials half-way there
TRY, TRY_WEIGHT = 0.6, 1.0  # acceptance assumed at a new try
ALIKE = 10.0  # trials by which depths share one acceptance
STEEP = 2  # a step may go this much deeper than the tokens accepted lately
ON_LINE = 20.0  # steps of a depth by which it lies on the line of all depths
EXTRA = (0.1, 0.15, 0.03)  # r of an unknown pair, with the weight of one step
LOOK_FIRST, LOOK = 16, 256  # steps after which one plain step is made to see what it costs now
MEMORY = 10  # plain steps that count
OUTLIER = 1.5  # times what was expected; more counts as so much
ACCIDENTS = 2  # drafted steps in a row that may take more and teach nothing: another program had the core


@dataclass
class Costs:
    """What steps cost at one batch size.

    plain_s: seconds of a plain step, None before the first; fit: of r above. since_plain: steps since a plain one was
    measured, look: after how many the next is due. accidents: drafted steps in a row that took far too long. beside:
    by depth, the sum of what its steps took beside the line, and their number.
    """

    plain_s: float | None = None
    num_plain: int = 0
    since_plain: int = 0
    look: int = LOOK_FIRST
    accidents: int = 0
    fit: RunningFit = field(default_factory=lambda: RunningFit(EXTRA, FORGET_COST))
    beside: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, depth: int, nodes: float, seconds: float) -> None:
        """nodes: drafted, a sequence."""
        if depth == 0:
            self._learn_plain(seconds)
        elif self.plain_s is not None:
            self.since_plain += 1
            most = OUTLIER * self.steps(depth, nodes)
            self.accidents = self.accidents + 1 if seconds / self.plain_s > most else 0
            if 0 < self.accidents <= ACCIDENTS:
                return
            extra = min(seconds / self.plain_s, most) - 1
            self.fit.learn((1.0, float(depth), nodes), extra)
            off, count = self.beside.get(depth, (0.0, 0.0))
            more = 1 + extra - self._line(depth, nodes)
            self.beside[depth] = (FORGET_COST * off + more, FORGET_COST * count + 1)

    def _learn_plain(self, seconds: float) -> None:
        if self.plain_s is None or seconds * OUTLIER < self.plain_s:  # only what is slow can be an accident
            self.plain_s = seconds
        self.num_plain = min(self.num_plain + 1, MEMORY)
        self.plain_s += (min(seconds, OUTLIER * self.plain_s) - self.plain_s) / self.num_plain
        if self.since_plain >= self.look:
            self.look = min(2 * self.look, LOOK)
        self.since_plain = 0

    @property
    def due(self) -> bool:
        """Whether a plain step should be measured now."""
        return self.plain_s is None or self.since_plain >= self.look

    def steps(self, depth: int, nodes: float) -> float:
        """T, in plain steps."""
        if not depth:
            return 1.0
        off, count = self.beside.get(depth, (0.0, 0.0))
        return self._line(depth, nodes) + off / (count + ON_LINE)

    def _line(self, depth: int, nodes: float) -> float:
        once, level, node = self.fit.coefficients
        return 1 + once + level * depth + node * nodes

    def like(self) -> "Costs":
        """A start for another batch size."""
        return Costs(fit=RunningFit(self.fit.coefficients, FORGET_COST))


@dataclass
class Acceptance:
    """Of one sequence, by depth; what is older counts less. mean, weight: what is assumed before any trial.

    long_hits, long_trials: of all depths, over a longer time.
    """

    mean: float
    weight: float
    hits: list[float]
    trials: list[float]
    long_hits: float = 0.0
    long_trials: float = 0.0

    @property
    def long_run(self) -> float:
        return self.long_hits / self.long_trials if self.long_trials else self.mean

    def try_again(self) -> None:
        """Forget what was seen lately."""
        self.mean, self.weight = max(TRY, self.long_run), TRY_WEIGHT
        self.hits = [0.0] * len(self.hits)
        self.trials = [0.0] * len(self.trials)

    def learn(self, limit: int, accepted: int) -> None:
        """A step that could accept `limit` tokens accepted so many."""
        self.hits = [FORGET * x for x in self.hits]
        self.trials = [FORGET * x for x in self.trials]
        self.weight *= FORGET
        for i in range(min(accepted, limit)):
            self.hits[i] += 1
            self.trials[i] += 1
        if accepted < limit:
            self.trials[accepted] += 1
        self.long_hits = FORGET_LONG * self.long_hits + min(accepted, limit)
        self.long_trials = FORGET_LONG * self.long_trials + min(accepted + 1, limit)

    @property
    def over_all_depths(self) -> float:
        return (sum(self.hits) + self.mean * self.weight) / (sum(self.trials) + self.weight)

    @property
    def within_reach(self) -> float:
        """The deepest that the next step may go: a drafter that is not known yet has to earn its depth."""
        return STEEP + sum(self.hits) + self.mean * self.weight / 2

    def expected(self, deepest: int) -> list[float]:
        """E(d) for d = 0 .. deepest."""
        assumed = ALIKE * self.over_all_depths
        reach, total, found = 1.0, 1.0, [1.0]
        for hits, trials in zip(self.hits[:deepest], self.trials, strict=False):
            reach *= (hits + assumed) / (trials + ALIKE)
            total += reach
            found.append(total)
        return found


@dataclass
class Experience:
    """What earlier texts taught: where the next one starts. acceptance: their mean. costs: by batch size.

    drafting: whether it paid lately. balance: plain steps won, or lost, since a text that pays nothing is no reason to
    read the next one's prompt with the drafter too.
    """

    acceptance: float = HOPE
    weight: float = HOPE_WEIGHT
    costs: dict[int, Costs] = field(default_factory=dict)
    drafting: bool = True
    balance: float = 0.0

    def costs_of(self, batch: int) -> Costs:
        if batch not in self.costs:
            nearest = min(self.costs, key=lambda known: abs(known - batch), default=None)
            self.costs[batch] = Costs() if nearest is None else self.costs[nearest].like()
        return self.costs[batch]

    def learn(self, acceptance: float, trials: float) -> None:
        share = trials / (trials + FADE)
        self.acceptance += share * (acceptance - self.acceptance)
        self.weight += share * (KNOWN_WEIGHT - self.weight)


@dataclass
class Controller:
    """sizes[d]: drafted nodes of the tree cut at depth d, at most; sizes[0] = 0. rows: the sequences decoded."""

    sizes: Sequence[int]
    experience: Experience = field(default_factory=Experience)
    rows: list[Acceptance] = field(default_factory=list)
    fill: float = 1.0  # nodes really drafted, as a share of `sizes`

    def join(self) -> None:
        self.rows.append(self._new(self.experience.acceptance, self.experience.weight))

    def leave(self, row: int) -> None:
        self.experience.learn(self.rows[row].long_run, self.rows[row].long_trials)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def _new(self, mean: float, weight: float) -> Acceptance:
        deepest = len(self.sizes) - 1
        return Acceptance(mean, weight, [0.0] * deepest, [0.0] * deepest, mean * weight, weight)

    def choose(self) -> int:
        """The depth of the next step, the same for all rows: a batched forward is as long as its longest row."""
        costs = self.experience.costs_of(len(self.rows))
        if not self.experience.drafting:
            if self.experience.balance < 0 or not self._could_pay(costs):
                return 0
            self.experience.drafting = True
            for row in self.rows:
                row.try_again()
            return 1
        if costs.due:
            return 0
        deepest = min(len(self.sizes) - 1, int(max(row.within_reach for row in self.rows)))
        tokens = map(sum, zip(*(row.expected(deepest) for row in self.rows), strict=True))
        rates = [n / costs.steps(d, self.fill * self.sizes[d]) for d, n in enumerate(tokens)]
        best = max(range(1, deepest + 1), key=rates.__getitem__)
        if rates[best] <= rates[0]:
            # Not before a look at what a plain step takes now: the machine may have become slower for both.
            self.experience.drafting = costs.since_plain > 0
            return 0
        return best

    def _could_pay(self, costs: Costs) -> bool:
        """Whether drafting would win if everything were accepted."""
        return any(d + 1 > costs.steps(d, float(n)) for d, n in enumerate(self.sizes) if d)

    def predicted(self, depth: int, nodes: float) -> float:
        """Seconds of a step, where they are not measured."""
        costs = self.experience.costs_of(len(self.rows))
        return (costs.plain_s or 1.0) * costs.steps(depth, nodes)

    def learn_acceptance(self, limits: Sequence[int], nodes: Sequence[int], accepted: Sequence[int]) -> None:
        """Of a drafted step, by sequence: the most that it could accept, nodes drafted, tokens accepted."""
        for row, limit, n in zip(self.rows, limits, accepted, strict=True):
            row.learn(limit, n)
        most = self.sizes[max(limits)]
        if most:
            self.fill += 0.1 * (max(nodes) / most - self.fill)

    def learn_cost(self, depth: int, nodes: float, tokens: float, seconds: float, usual: bool) -> None:
        """nodes, tokens: drafted and emitted, a sequence. usual: False where the drafter caught up after plain steps,
        which is paid for, but is no measure of the next step."""
        costs = self.experience.costs_of(len(self.rows))
        if usual:
            costs.learn(depth, nodes, seconds)
        if depth == 0:
            self.experience.balance += 0 if self.experience.drafting else ALLOWANCE
        elif costs.plain_s is not None:
            # By what such steps are known to take: a machine that became slower is no loss of drafting.
            spent = costs.steps(depth, nodes) if usual else min(seconds / costs.plain_s, READING + tokens)
            balance = self.experience.balance + tokens - spent
            self.experience.balance = max(-DEBT if usual else -READING, min(CREDIT, balance))
