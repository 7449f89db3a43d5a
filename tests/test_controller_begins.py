"""The controller begins with a drafter of which it knows nothing: it is neither given up too soon nor trusted long."""

import pytest

from foretoken.draft.acceptance import Acceptance
from foretoken.draft.controller import ALLOWANCE, Controller, Costs, Experience
from machines import EXTRA, controller, depth_of


def step(deciding: Controller, accepted: bool, slower: float = 1.0) -> int:
    """Take one step as the controller decides, and return its depth.

    accepted: whether all draft tokens are accepted, else none is. slower: as many times as long as expected it takes.
    """
    depth = depth_of(deciding.choose())
    count = depth if accepted else 0
    deciding.learn_acceptance([depth], [count], [None])
    deciding.learn_cost(depth, 1.0 + count, slower * (1.0 + EXTRA[depth]))
    return depth


def test_three_rejections_at_the_start_of_a_text_do_not_end_drafting_and_ten_do():
    """After three, the acceptance is .24 by the mean, and a step with one draft token takes 1.28 plain steps."""
    deciding = controller()
    depths = [step(deciding, False) for _ in range(12)]
    assert all(depths[:4])
    assert not any(depths[10:])


def test_only_the_first_text_of_all_is_trusted_and_that_is_no_debt():
    """A retry of a useless drafter costs what plain steps have earned."""
    known = Experience(EXTRA, costs={1: Costs(EXTRA, 1.0)})
    drafted, trusted = [], []
    for _ in range(2):
        deciding = controller(known)
        for _ in range(100):
            before = known.costs[1].balance
            drafted.append(step(deciding, False) > 0)
            trusted.append(deciding.trusting)
            assert not deciding.trusting or known.costs[1].balance == before
        deciding.leave(0)
    first = drafted.index(False)
    assert 4 <= first <= 10
    assert any(trusted[:first])
    assert not any(trusted[first:])
    assert known.costs_of(2).looks == known.costs[1].looks > 1
    assert sum(drafted[first:]) <= 200 * ALLOWANCE / EXTRA[1] + 3


def test_what_is_won_after_trusted_steps_is_booked():
    deciding = controller()
    for _ in range(6):
        if not deciding.trusting:
            step(deciding, False)
    assert deciding.trusting
    before = deciding.costs.balance
    for _ in range(6):
        step(deciding, True)
    assert not deciding.trusting
    assert deciding.costs.balance > before


@pytest.mark.parametrize(("batch", "trusts"), [(1, True), (4, True), (16, False)])
def test_many_sequences_are_seldom_unlucky_together(batch, trusts):
    """The acceptance of each is .4 +- .09 so far, that of sixteen .4 +- .022; .43 is what a draft token needs."""
    deciding = Controller(Experience((0.0, 0.43), costs={batch: Costs((0.0, 0.43), 1.0, tries=[1.0])}))
    deciding.sequences = [Acceptance(12.0, 30.0) for _ in range(batch)]
    assert bool(deciding.choose()) is trusts


@pytest.mark.parametrize(("first", "steps"), [(1.0, 1), (1.3, 1), (3.0, 3)])
def test_one_draft_token_at_a_time_is_drafted_until_a_step_takes_about_what_was_expected(first, steps):
    """And never more than three times; first: by what factor steps take longer than expected."""
    deciding = controller()
    depths = [step(deciding, True, first) for _ in range(steps + 1)]
    assert depths[:steps] == [1] * steps
    assert depths[steps] > 1
