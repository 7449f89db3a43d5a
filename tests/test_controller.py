"""The controller drafts where it pays, on machines of known costs, and finds out when that changes."""

import math
from collections import defaultdict

import numpy as np
import pytest

from foretoken.draft.acceptance import FORGET, Acceptance
from foretoken.draft.controller import ALLOWANCE, DEBT, LOOK, Controller, Costs, Experience, expected_extra
from machines import DEEPEST, EXTRA, MACHINES, NOISE, controller, depth_of, line, rates, simulate, speed


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("machine", "acceptance", "num_tokens", "best"),
    [
        *((machine, 0.03, num_tokens, 0) for machine in list(MACHINES)[:3] for num_tokens in (128, 600)),
        ("slow drafter", 0.7, 600, 2),
        ("slow drafter", 0.95, 600, 8),
        ("quick drafter", 0.7, 600, 4),
        ("quick drafter", 0.95, 600, 12),
        ("blocks of 6", 0.97, 600, 11),
        ("blocks of 6", 0.7, 600, 2),
        ("blocks of 8", 0.97, 600, 7),
        ("blocks of 8", 0.7, 600, 4),
    ],
)
def test_auto_is_at_most_5_percent_behind_the_best_fixed_depth(machine, acceptance, num_tokens, best):
    """Plain decoding is depth 0. Beyond a full block lie depths that are dearer for what they bring; the next full one
    may be the best again."""
    fixed = rates(acceptance, MACHINES[machine])
    assert int(np.argmax(fixed)) == best
    assert speed(acceptance, MACHINES[machine], num_tokens, 20 if num_tokens < 600 else 12) >= 0.95 * fixed[best]


# A drafter that says how sure it is: every draft token has a q of its own, and is accepted with probability q ** POWER.

SURE = np.array([0.999, 0.98, 0.9, 0.6, 0.3])
POWER = 0.5


def drafts(rng: np.random.Generator, num_texts: int) -> np.ndarray:
    """q of the draft tokens at each of 600 positions, those of one text behind another [texts, 600]."""
    easy = np.repeat(rng.random((num_texts, 60)) < 0.5, 10, axis=1)  # stretches of ten tokens
    return np.where(easy, rng.choice(SURE[:2], easy.shape), rng.choice(SURE, easy.shape))


def unlearnt(*_) -> None:
    """What a fixed depth learns of a step."""


def told(decide, learn, q: np.ndarray, machine: list[float], rng: np.random.Generator) -> float:
    """Plain steps that a text takes whose drafts go as far as the floors say that `decide` gives."""
    position, total = 0, 0.0
    while position < len(q):
        floors = decide(position)
        most = min(len(floors), len(q) - position - 1)
        sure = np.append(1.0, np.cumprod(q[position : position + most]))
        depth = next((d for d in range(1, most) if sure[d] < floors[d]), most)
        wrong = rng.random(depth) >= q[position : position + depth] ** POWER
        accepted = int(np.argmax(wrong)) if wrong.any() else depth
        seconds = machine[depth] * math.exp(0.1 * rng.standard_normal())
        learn(position, depth, accepted, -math.log(sure[min(accepted + 1, depth)]), seconds)
        total += seconds
        position += accepted + 1
    return total


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("machine", "least"), [("slow drafter", 1.07), ("quick drafter", 1.0)])
def test_a_drafter_that_says_how_sure_it_is_is_followed_better_than_by_any_fixed_depth(machine, least):
    """By these factors at least, the price of looking and learning included."""
    times, texts = MACHINES[machine], 12
    fixed = []
    for depth in range(DEEPEST + 1):
        rng = np.random.default_rng(0)
        fixed.append(sum(told(lambda _, d=depth: (0.0,) * d, unlearnt, q, times, rng) for q in drafts(rng, texts)))
    rng, known, total = np.random.default_rng(0), Experience(EXTRA), 0.0
    for q in drafts(rng, texts):
        deciding = controller(known)

        def decide(position, deciding=deciding):
            chosen = deciding.choose(timed=position > 0)
            return chosen[0] if chosen else ()

        def learn(position, depth, accepted, surprise, seconds, deciding=deciding):
            if depth:
                deciding.learn_acceptance([depth], [accepted], [surprise])
            if position:
                deciding.learn_cost(depth, accepted + 1.0, seconds)

        total += told(decide, learn, q, times, rng)
        deciding.leave(0)
    assert known.drafts.sharpness == pytest.approx(POWER, rel=0.3)
    assert min(fixed) / total >= least


def test_the_floors_are_those_of_the_acceptance_that_pays():
    """A level that pays where .2 tokens come of it, of which .8 are accepted where it is reached, pays on a path that
    is accepted with probability .25: with one rejection in two nats, down to a product of q of .25 ** 2."""
    known = Acceptance(accepted=8.0, tried=10.0, surprise=4.0, tells=True)
    assert known.sharpness == pytest.approx(0.5)
    assert known.floors([0.2, 0.4, 0.9, 0.1]) == pytest.approx((0.0, 0.25**2, 0.5**2))
    assert known.floors([0.9]) == (0.0,)
    assert Acceptance(accepted=8.0, tried=8.0, surprise=4.0, tells=True).floors([0.2]) == (0.0, 0.0)
    assert Acceptance(accepted=0.0, tried=8.0, surprise=4.0, tells=True).floors([0.0, 0.2]) == (0.0,)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("name", ["slow drafter", "quick drafter"])
def test_a_batch_drafts_as_deep_as_pays_for_all(name, batch, tells):
    """The deepest draft sets the time of all, however sure a drafter is of its own: all draft alike."""
    machine, rng = MACHINES[name], np.random.default_rng(0)
    known, tokens, total = Experience(EXTRA, costs={batch: Costs(EXTRA, 1.0)}), 0, 0.0
    deciding = Controller(known)
    for _ in range(batch):
        deciding.join()
    for _ in range(600):
        chosen = deciding.choose()
        assert len({*chosen}) <= 1
        depth = depth_of(chosen)
        accepted = [int(np.argmin([*(rng.random(depth) < 0.8), False])) for _ in range(batch)]
        seconds = machine[depth] * math.exp(0.1 * rng.standard_normal())
        if depth:
            surprises = [0.5 * min(n + 1, depth) if tells else None for n in accepted]
            deciding.learn_acceptance([depth] * batch, accepted, surprises)
        deciding.learn_cost(depth, 1 + sum(accepted) / batch, seconds)
        tokens, total = tokens + batch + sum(accepted), total + seconds
    assert tokens / batch / total >= 0.93 * max(rates(0.8, machine))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("stretch", "least"), [(20, 0.7), (100, 0.85)])
@pytest.mark.parametrize(("machine", "acceptance"), [("quick drafter", 0.7), ("blocks of 6", 0.85)])
def test_a_machine_whose_speed_changes_is_no_reason_not_to_draft(acceptance, machine, stretch, least):
    """Other programs take the half of it and more, for some steps at a time; where they come and go every twenty,
    looks are disturbed too."""
    got = speed(acceptance, MACHINES[machine], 1200, 8, slower=2.5, stretch=stretch)
    assert got >= least * max(rates(acceptance, MACHINES[machine]))


@pytest.mark.usefixtures("unchecked")
def test_a_text_that_changes_is_followed():
    """Nothing to gain in the first 300 tokens, much in the next 300, and again."""

    def easy(position: int) -> bool:
        return position // 300 % 2 == 1

    rng, machine = np.random.default_rng(1), MACHINES["quick drafter"]
    depths = defaultdict(list)
    total, texts = 0.0, 120  # the shares of 40 texts lie between .83 and 1.00, whichever the controller
    for _ in range(texts):
        seconds, path = simulate(lambda p: 0.9 if easy(p) else 0.03, machine, 1200, Experience(EXTRA), rng)
        total += seconds
        for position, depth in path:
            if position % 300 >= 100:  # time to notice
                depths[easy(position)].append(depth)
    assert sum(d > 0 for d in depths[False]) / len(depths[False]) < 0.1
    assert sum(d >= 4 for d in depths[True]) / len(depths[True]) > 0.9
    ideal = texts * NOISE * (600 + 600 / max(rates(0.9, machine)))
    assert total / ideal < 1.15


def test_a_useless_drafter_is_tried_again_when_plain_steps_have_earned_it():
    known = Experience(EXTRA, Acceptance(0.03, 1.0), {1: Costs(EXTRA, 1.0, drafting=False, balance=-1.0)})
    deciding, steps = controller(known), 0
    while not deciding.choose():
        steps += 1
        deciding.learn_cost(0, 1.0, 1.0)
    assert steps == pytest.approx(1 / ALLOWANCE, abs=1)


@pytest.mark.usefixtures("unchecked")
def test_a_drafter_with_as_many_weights_as_its_target_drafts_nothing():
    """What is expected of it shows that it could not pay, and a try would have to read the text first."""
    known, rng = Experience(expected_extra(range(DEEPEST + 1), (0.1, 1.0, 0.03))), np.random.default_rng(0)
    for _ in range(5):
        assert not any(depth for _, depth in simulate(lambda _: 0.99, line(0.1, 1.0), 400, known, rng)[1])


def test_what_pays_for_one_text_is_not_forgotten_while_many_are_decoded():
    """Each batch size has an account of its own: a full batch where nothing pays says nothing of one text."""
    extra = (0.0, 0.2, 0.3, 0.4)
    known = Experience(extra, Acceptance(0.8, 8.0))

    def steps(batch: int, times: dict[int, float], count: int) -> list[int]:
        deciding, depths = Controller(known), []
        for _ in range(batch):
            deciding.join()
        for _ in range(count):
            depth = depth_of(deciding.choose())
            if depth:
                deciding.learn_acceptance([depth] * batch, [depth - 1] * batch, [None] * batch)
            deciding.learn_cost(depth, float(max(depth, 1)), times[min(depth, 1)])
            depths.append(depth)
        return depths

    assert sum(map(bool, steps(1, {0: 1.0, 1: 1.2}, 100))) > 60
    assert sum(map(bool, steps(16, {0: 4.0, 1: 40.0}, 400)[-100:])) <= 2  # tries
    assert steps(1, {0: 1.0, 1: 1.2}, 20)[0] > 0


def test_one_step_shows_that_a_full_batch_does_not_pay():
    """What a draft token costs one text says little of sixteen: their forwards wait for arithmetic, not for memory."""
    extra = tuple(0.37 * depth for depth in range(13))
    known = Experience(extra, Acceptance(95.0, 100.0), {1: Costs(extra, 0.01)})
    deciding, drafted = Controller(known), 0
    for _ in range(16):
        deciding.join()
    for _ in range(100):
        depth = depth_of(deciding.choose())
        if depth:
            drafted += 1
            deciding.learn_acceptance([depth] * 16, [depth] * 16, [None] * 16)
        deciding.learn_cost(depth, depth + 1.0, 0.022 * (1 + 1.6 * depth))
    assert 1 <= drafted <= 2


def test_a_batch_size_where_nothing_was_drafted_expects_what_the_nearest_one_shows_by_now():
    extra = tuple(0.37 * depth for depth in range(13))
    known = Experience(extra, Acceptance(95.0, 100.0), {1: Costs(extra, 0.01)})
    known.costs[1].seen = {4: (1.0, 4 * 0.37)}
    for size in range(2, 33):  # a server fills up before a step of any size is drafted
        known.costs_of(size).learn(0, 0.01 + 0.001 * size)
    known.costs_of(16).learn(9, 0.026 * (1 + 1.6 * 9))
    assert known.costs_of(32).steps(9) > 9
    assert known.costs_of(2).steps(9) == pytest.approx(known.costs_of(1).steps(9), rel=0.2)


def test_a_batch_that_becomes_smaller_does_not_try_again_what_was_useless():
    """A new batch size owes what the one before it owes."""
    for balance, debt in ((-3.0, -3.0), (5.0, 0.0), (-60.0, -DEBT)):
        known = Experience(EXTRA, Acceptance(0.03, 1.0), {8: Costs(EXTRA, 1.0, drafting=False, balance=balance)})
        assert known.costs_of(7).balance == pytest.approx(debt)
        deciding, steps = Controller(known), 0
        for _ in range(7):
            deciding.join()
        while not deciding.choose():
            steps += 1
            deciding.learn_cost(0, 1.0, 1.0)
        assert steps == pytest.approx(-debt / ALLOWANCE, abs=1)


def test_a_sequence_that_may_not_draft_counts_for_no_depth():
    known = Experience((0.0, 0.9, 1.0), Acceptance(90.0, 100.0), {2: Costs((0.0, 0.9, 1.0), 1.0, tries=[1.0])})
    deciding = Controller(known)
    deciding.join()
    deciding.join()
    assert depth_of(deciding.choose(True, [2, 2])) > 0
    assert not deciding.choose(True, [2, 0])  # 1 + 2.71 tokens in 2 plain steps: fewer than the 2 of each plain one


def looked(costs: Costs, plain: float = 1.0) -> int:
    """How many plain steps are looked at, if that is due."""
    steps = 0
    while costs.due:
        costs.learn(0, plain)
        steps += 1
    return steps


def learn(costs: Costs, num_steps: int, took: float) -> None:
    """Steps of depth 3, and looks at plain ones where they are due."""
    for _ in range(num_steps):
        looked(costs)
        costs.learn(3, took)


def test_an_accident_teaches_little_and_a_slow_drafter_is_found_out():
    costs = Costs(EXTRA, 1.0)
    learn(costs, 30, 2.0)
    before = costs.steps(3)
    assert before == pytest.approx(2.0, rel=0.05)
    learn(costs, 2, 30.0)
    assert costs.steps(3) == pytest.approx(before, rel=0.05)
    learn(costs, 5, 2.0)
    assert costs.plain_steps(2.0) == pytest.approx(2.0, rel=0.1), "the machine's pace is what it was"
    costs = Costs(EXTRA, 1.0)
    learn(costs, 2, 30.0)
    learn(costs, 40, 8.0)
    assert costs.steps(3) > 4, "more than three draft tokens and a bonus token can ever win back"


@pytest.mark.parametrize(("times", "least"), [(2, 0.95), (5, 0.93), (10, 0.88), (30, 0.87)])
@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_a_drafter_many_times_slower_than_its_target_is_found_out_within_a_few_steps(acceptance, times, least):
    assert speed(acceptance, line(0.2, times), 400, 5) >= least


@pytest.mark.parametrize("first", [0.0, 0.08])
def test_a_machine_that_becomes_slower_says_nothing_of_drafting(first):
    """Nor do the first plain steps after a draft, each of which takes more than the one after it: docs/LOG.md.

    first: the part by which every one of a look's first five steps takes longer than the next.
    """
    plain_s = 1e-3
    costs = Costs(EXTRA, plain_s)
    for slower in (1.0, 2.5, 1.0):
        for _ in range(60):
            costs.learn(3, 2.0 * plain_s * slower)
        place = 0
        while costs.due:
            costs.learn(0, plain_s * slower * (1.0 + first * max(5 - place, 0)))
            place += 1
        assert costs.steps(3) == pytest.approx(2.0, rel=0.1)
        assert costs.plain_steps(plain_s * slower) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("plain_s", "expected"), [(0.0, 2 * LOOK), (1e-3, 8), (2e-3, 6), (0.04, 4)])
def test_a_look_at_plain_steps_lasts_until_the_caches_have_settled(plain_s, expected):
    """A large model reads more than the caches hold in one step, so that its second plain step is a usual one. Of steps
    that the clock does not see there are sixteen."""
    costs = Costs(EXTRA, max(plain_s, 1e-6))
    for _ in range(2 * LOOK):
        costs.learn(3, 2.0 * plain_s)
    assert looked(costs, plain_s) == expected


def test_one_slow_step_at_the_end_of_a_look_says_nothing():
    costs = Costs(EXTRA, 1.0)
    learn(costs, 2 * LOOK, 2.0)
    for plain in (1.0, 1.0, 1.0, 3.0):  # the last one while another program had the core
        costs.learn(0, plain)
    assert not costs.due
    assert costs.steps(3) == pytest.approx(2.0, rel=0.05)


def test_a_look_that_a_drafted_step_ends_begins_anew():
    """Behind the draft the caches have to settle again."""
    costs = Costs(EXTRA, 1.0)
    learn(costs, 2 * LOOK, 2.0)
    for _ in range(3):
        costs.learn(0, 1.0)
    costs.learn(3, 2.0)
    assert looked(costs) == 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("slow", "took"), [(2, 30.0), (2, 2.5), (12, 30.0)])
@pytest.mark.parametrize("deepest", [1, 5])
def test_a_slow_start_does_not_end_drafting_for_good(deepest, slow, took):
    """A perfect drafter whose first steps another program slowed down."""
    extra = EXTRA[: deepest + 1]
    deciding, drafted = controller(Experience(extra, costs={1: Costs(extra, 1.0)})), 0
    for _ in range(4000):
        depth = depth_of(deciding.choose())
        drafted += depth > 0
        if depth:
            deciding.learn_acceptance([depth], [depth], [None])
        deciding.learn_cost(depth, 1.0 + depth, (took if drafted <= slow else 1.0 + 0.2 * depth) if depth else 1.0)
    assert drafted > 2000


def test_without_a_clock_nothing_is_looked_at():
    deciding = controller(Experience(EXTRA, Acceptance(0.9, 1.0), known=True))
    depths = []
    for _ in range(600):
        depths.append(depth_of(deciding.choose(timed=False)))
        deciding.learn_acceptance([depths[-1]], [depths[-1]], [None])
        deciding.learn_cost(depths[-1], 2.0, None)
    assert min(depths) > 1, "what is known is not tried first"


def test_a_clock_that_did_not_tick_is_no_division_by_zero():
    costs = Costs(EXTRA)
    for seconds in (0.0, 0.0, 0.0156, 0.0):
        costs.learn(0, seconds)
        costs.learn(2, seconds)
    assert math.isfinite(costs.steps(2))


def test_drafts_that_seem_to_take_no_time_are_no_division_by_zero():
    """Of a lookup, say. Another batch size starts from what they took."""
    known = Experience(EXTRA, costs={1: Costs(EXTRA, 1.0, drafted=(-10.0, 10.0), seen={3: (10.0, -1.0)})})
    assert not any(known.costs[1].shown)
    other = known.costs_of(2)
    learn(other, 40, 2.0)
    assert other.steps(3) == pytest.approx(2.0, rel=0.1)


def test_a_useless_drafter_does_not_read_every_prompt():
    """What a try at a new text costs above a draft, its prompt, is booked and kept from text to text."""
    known = Experience(EXTRA, Acceptance(0.03, 1.0), {1: Costs(EXTRA, 1.0, drafting=False)})
    read = 0
    for _ in range(40):
        deciding, behind = controller(known), True
        for _ in range(50):
            depth = depth_of(deciding.choose())
            if depth:
                read += behind
                deciding.learn_acceptance([depth], [0], [None])
            seconds = 1.0 + (0.6 + 10.0 * behind if depth else 0.0)
            deciding.learn_cost(depth, 1.0, seconds, 300 if depth and behind else 0)
            behind = behind and not depth
        deciding.leave(0)
    assert 1 <= read <= 5, "2,000 plain steps earn 30, a prompt costs 10"


def test_what_a_drafter_tells_is_learnt_from_those_that_drafted():
    deciding = controller(Experience(EXTRA, Acceptance(9.0, 10.0)))
    deciding.join()
    deciding.learn_acceptance([5, 0], [3, 0], [0.5, None])
    drafts = deciding.experience.drafts
    assert drafts.tells
    assert (drafts.accepted, drafts.tried) == pytest.approx((FORGET * 9 + 3, FORGET * 10 + 4))
    assert [sequence.tells for sequence in deciding.sequences] == [True, False]
    deciding.join()
    assert deciding.sequences[2].tells


def test_a_drafted_step_takes_what_such_steps_took_on_average():
    """Depths that are rare count as rarely as they are drafted."""
    costs = Costs(EXTRA, 1.0)
    assert costs.drafted_step == costs.steps(DEEPEST)
    for step in range(4000):
        depth = 12 if step % 40 == 0 else 3
        costs.learn(depth, 4.0 if depth == 12 else 1.5)
    costs.pace_s = 1.0
    assert costs.drafted_step == pytest.approx(1.5 + 2.5 / 40, rel=0.1)
