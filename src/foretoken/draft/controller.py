"""How deep to draft at the next step, from what past steps brought and cost: the run-time controller.

    choose the depth d that maximises   E(d) / T(d),   E(d) = sum over sequences of 1 + a_1 + a_1 a_2 + .. + a_1..a_d
    a_i    probability that a path that reached depth i - 1 reaches depth i, a running mean of each sequence
    T(d)   time of a step in plain steps, T(0) = 1; running least squares:   T ~ 1 + r . (1, d, drafted nodes),
           and for each depth what its steps took beside that line, since forwards come in blocks of nodes. Every
           step shows the pace of the machine, that all are measured by; plain ones among drafted ones, how they compare

A depth is taken to be cheaper the fewer of its steps were measured: so it is tried, if drafting pays as it is known.

d = 0 is plain decoding. From there a new try is made on credit only: every step books what it won or lost against
plain decoding, plain steps earn ALLOWANCE, and who is in debt does not try. So a useless drafter costs that share and
the first tries, whatever the estimates say.

The choice depends on earlier steps alone, never on a draw of the step that it decides for: docs/losslessness.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.draft.running_fit import RunningFit

ALLOWANCE = 0.02  # plain steps that a plain step earns, to find out whether drafting pays again
CREDIT, DEBT = 32.0, 4.0  # plain steps: the most that gains, or losses, add up to; gains outlast a bad stretch
AWAKE = 8  # plain steps before a new try that are measured again, to know the machine's pace
READING = 64.0  # and losses where the drafter had a text to read first, which takes it as long as many short steps
FORGET = 0.97  # a step, for acceptance: the last 30 steps count
FORGET_LONG = FORGET_COST = 0.99  # for acceptance in the long run, and for costs: the last 100
HOPE, HOPE_WEIGHT = 0.7, 2.0  # acceptance assumed of an unknown drafter, and its weight in trials
KNOWN_WEIGHT, FADE = 16.0, 100.0  # the weight it grows to in earlier texts, and the trials half-way there
TRY, TRY_WEIGHT = 0.6, 1.0  # acceptance assumed at a new try
ALIKE = 10.0  # trials by which depths share one acceptance
ON_LINE = 2.0  # steps of a depth by which it lies on the line of all depths
STAY = 0.05  # share by which plain decoding must seem the better before drafting ends: few steps tell, and then none
DARING = 0.2  # share by which a depth never tried may be cheaper than the line says
EXTRA = (0.1, 0.15, 0.03)  # r of an unknown pair, with the weight of one step
LOOK = 8  # steps, times 2 for every look so far, after which the next is due: what plain steps cost now
RUN = 8  # plain steps of a look, of which the last is measured: the first find the caches as drafting left them
PACE = 0.2  # the share of what a step took beside what was expected that is the machine's pace now
MEMORY = 5  # looks that count
SHORTEST = 1e-9  # seconds: of a step that the clock did not see
OUTLIER = 1.4  # times what was expected, or 1 / that; what is further off counts as so much: an accident


@dataclass
class Costs:
    """What steps cost at one batch size, by the machine's pace: other programs slow down every step alike.

    pace_s: seconds that 1 stands for now, None before the first step; plain: a plain step in those; fit: of r above.
    since_plain: steps since the last look; run: plain steps of this one; looks: 1 and their number, MEMORY at most.
    seen: by depth, the number of its steps and the sums of what they took beyond 1 and of their nodes, older ones less.
    """

    pace_s: float | None = None
    plain: float = 1.0
    since_plain: int = 0
    run: int = 0
    looks: int = 1
    fit: RunningFit = field(default_factory=lambda: RunningFit(EXTRA, FORGET_COST))
    seen: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def learn(self, depth: int, nodes: float, seconds: float) -> None:
        """nodes: drafted, a sequence."""
        self.run = 0 if depth else self.run + 1
        if self.since_plain and 0 < self.run < RUN:
            return
        seconds = max(seconds, SHORTEST)
        known = self.paces(depth, nodes)
        if self.pace_s is None:
            self.pace_s = seconds / known
        off = min(OUTLIER, seconds / (self.pace_s * known))
        if depth:
            off = max(off, 1 / OUTLIER)
            self._learn_drafted(depth, nodes, off * known - 1)
        elif self.since_plain:
            self.looks = min(self.looks + 1, MEMORY)
            self.plain *= off ** (1 / self.looks)
            self.since_plain = 0
        self.pace_s *= off ** (PACE if off >= 1 / OUTLIER else 1.0)  # only what is slow can be an accident

    def _learn_drafted(self, depth: int, nodes: float, extra: float) -> None:
        self.since_plain += 1
        self.fit.learn((1.0, float(depth), nodes), extra)
        count, extras, num_nodes = self.seen.get(depth, (0.0, 0.0, 0.0))
        self.seen[depth] = FORGET_COST * count + 1, FORGET_COST * extras + extra, FORGET_COST * num_nodes + nodes

    @property
    def due(self) -> bool:
        """Whether plain steps should be measured now."""
        return self.pace_s is None or self.since_plain >= LOOK * 2**self.looks

    def seconds(self, depth: int, nodes: float) -> float:
        return (self.pace_s or 1.0) * self.paces(depth, nodes)

    def steps(self, depth: int, nodes: float) -> float:
        """T, in plain steps."""
        return self.paces(depth, nodes) / self.plain

    def hope(self, depth: int) -> float:
        """What T of a depth may come down to, as a share."""
        return 1 - DARING / (1 + self.seen.get(depth, (0.0,))[0]) ** 0.5

    def paces(self, depth: int, nodes: float) -> float:
        """T, where 1 takes pace_s."""
        if not depth:
            return self.plain
        once, level, node = self.fit.coefficients
        found = 1 + once + level * depth + node * nodes
        if depth in self.seen:
            count, extras, num_nodes = self.seen[depth]
            found += (extras - count * (once + level * depth) - node * num_nodes) / (count + ON_LINE)
        return found

    def forget(self) -> None:
        """What drafted steps cost."""
        self.fit, self.seen = RunningFit(EXTRA, FORGET_COST), {}

    def like(self) -> "Costs":
        """A start for another batch size."""
        return Costs(plain=self.plain, looks=self.looks, fit=RunningFit(self.fit.coefficients, FORGET_COST))


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

    def expected(self) -> list[float]:
        """E(d) for d = 0, 1, .."""
        assumed = ALIKE * (sum(self.hits) + self.mean * self.weight) / (sum(self.trials) + self.weight)
        reach, total, found = 1.0, 1.0, [1.0]
        for hits, trials in zip(self.hits, self.trials, strict=True):
            reach *= (hits + assumed) / (trials + ALIKE)
            total += reach
            found.append(total)
        return found


@dataclass
class Experience:
    """What earlier texts taught: where the next one starts. acceptance: their mean. costs: by batch size.

    drafting: whether it paid lately. balance: plain steps won, or lost, since a text that pays nothing is no reason to
    read the next one's prompt with the drafter too. rest: plain steps ahead of which nothing will be asked or learnt.
    """

    acceptance: float = HOPE
    weight: float = HOPE_WEIGHT
    costs: dict[int, Costs] = field(default_factory=dict)
    drafting: bool = True
    balance: float = 0.0
    rest: int = 0

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
    resting: bool = False  # at this step, of which nothing is to be learnt
    clocked: bool = True  # whether the seconds told are measured: if not, costs stay what they are

    def join(self) -> None:
        self.rows.append(self._new(self.experience.acceptance, self.experience.weight))

    def leave(self, row: int) -> None:
        self.experience.learn(self.rows[row].long_run, self.rows[row].long_trials)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def _new(self, mean: float, weight: float) -> Acceptance:
        deepest = len(self.sizes) - 1
        return Acceptance(mean, weight, [0.0] * deepest, [0.0] * deepest, mean * weight, weight)

    def choose(self, timed: bool = True) -> int:
        """The depth of the next step, one for all rows: a forward is as long as its longest. timed: it may look."""
        self.resting = self.experience.rest > 0
        if self.resting:
            self.experience.rest -= 1
            return 0
        costs = self.experience.costs_of(len(self.rows))
        if not self.experience.drafting:
            if self.experience.balance < 0:
                return 0
            if not self._could_pay(costs):
                if self.clocked:
                    self.experience.balance = -DEBT  # to be tried again as if it had lost so much, and were not known:
                    costs.forget()  # only drafted steps could tell that it has become cheaper
                return 0
            self.experience.drafting = True
            for row in self.rows:
                row.try_again()
            return 1
        if timed and self.clocked and costs.due:
            return 0
        tokens = map(sum, zip(*(row.expected() for row in self.rows), strict=True))
        rates = [n / costs.paces(d, self.fill * self.sizes[d]) for d, n in enumerate(tokens)]
        if (1 + STAY) * max(rates[1:]) <= rates[0]:
            # Not before a look at what a plain step takes now.
            self.experience.drafting = self.clocked and costs.since_plain > 0
            return 0
        return max(range(1, len(rates)), key=lambda d: rates[d] / costs.hope(d))

    def _earn(self) -> None:
        """The allowance of a plain step; and of those ahead, if there are many until the next try, which may rest then:
        to ask and to learn takes a twentieth of a small model's step."""
        experience = self.experience
        if experience.rest:  # paid ahead already
            return
        experience.rest = max(int(-experience.balance / ALLOWANCE) - AWAKE, 0)
        experience.balance += ALLOWANCE * (1 + experience.rest)

    def _could_pay(self, costs: Costs) -> bool:
        """Whether drafting would win if everything were accepted."""
        return any(d + 1 > costs.steps(d, float(n)) for d, n in enumerate(self.sizes) if d)

    def predicted(self, depth: int, nodes: float) -> float:
        """Seconds of a step, where they are not measured."""
        return self.experience.costs_of(len(self.rows)).seconds(depth, nodes)

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
        if self.resting:
            return
        costs = self.experience.costs_of(len(self.rows))
        if usual:
            costs.learn(depth, nodes, seconds)
        if depth == 0:
            if not self.experience.drafting:
                self._earn()
        elif costs.pace_s is not None:
            # By what such steps are known to take: a machine that became slower is no loss of drafting.
            spent = costs.steps(depth, nodes) if usual else min(seconds / costs.seconds(0, 0.0), READING + tokens)
            least = min(self.experience.balance, -DEBT if usual else -READING)
            self.experience.balance = max(least, min(CREDIT, self.experience.balance + tokens - spent))
