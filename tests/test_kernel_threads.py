"""The number of threads of a forward is the one that was measured to be the fastest."""

from collections.abc import Sequence

import numba
import numpy as np
import pytest

from foretoken.kernel import threads as module
from foretoken.kernel.compile import compilations
from foretoken.kernel.threads import SELDOM, TRIALS, ThreadChoice


class Machine:
    """A clock that a forward moves on, by what it takes in each number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.now, self.seconds, self.slowness = 0.0, seconds, dict[int, float]()
        self.choice = self.new_choice()

    def new_choice(self) -> ThreadChoice:
        return ThreadChoice(lambda: self.now, self.slowness)

    def run(
        self, calls: int, rows: int = 1, levels: int = 1, saved: Sequence[int] = (0, 0),
        choice: ThreadChoice | None = None,
    ) -> list[int | None]:  # fmt: skip
        """The numbers of threads of so many forwards, or chains of them, which save forwards of one level each in one
        thread and in more."""
        chosen, choice = [], choice or self.choice
        for _ in range(calls):
            with choice.forward(max(self.seconds), rows, levels) as run:
                run.forwards = levels - saved[run.threads != 1]
                self.now += run.forwards * self.seconds[run.threads or 1]
            chosen.append(run.threads)
        return chosen


@pytest.fixture(autouse=True)
def _enough_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "use_threads", lambda most: None if most == 1 else most)


def test_the_fastest_is_found_and_kept() -> None:
    for best in (1, 2, 4):
        chosen = Machine({n: 1.0 if n == best else 1.5 for n in (1, 2, 4)}).run(2000)
        assert sorted(set(chosen[: 3 * TRIALS])) == [1, 2, 4]
        assert chosen.count(best) > 0.97 * len(chosen)


def test_chains_count_by_their_forwards() -> None:
    """Where chains in one thread happened to take fewer forwards, that thread is no faster for it."""
    chosen = Machine({1: 1.5, 2: 1.0}).run(200, levels=8, saved=(6, 0))
    assert chosen.count(2) > 0.9 * len(chosen)


def test_another_program_on_the_machine() -> None:
    """Both cores while they are free; one core soon after the other is taken; both again once it is free."""
    machine = Machine({1: 1.8, 2: 1.0})
    assert machine.run(100)[-1] == 2
    machine.seconds = {1: 1.8, 2: 3.6}
    start = machine.now
    taken = machine.run(300)
    assert taken[:5].count(1) >= 3
    assert machine.now - start < 1.03 * 300 * machine.seconds[1]  # trials in both cost the rest
    machine.seconds = {1: 1.8, 2: 1.0}
    assert machine.run(600)[-1] == 2


@pytest.mark.parametrize("disturbed", [9.0, 2.1])
def test_a_disturbed_beginning_is_soon_made_good(disturbed: float) -> None:
    """Another program that took a core during the first forwards only costs some of them, not hundreds."""
    machine = Machine({1: 1.8, 2: disturbed})
    machine.run(2 * TRIALS)
    machine.seconds = {1: 1.8, 2: 1.0}
    assert machine.run(100).count(2) >= 73


def test_a_forward_in_which_code_is_compiled_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward in two threads takes half a minute, and two threads are no less used for it."""
    machine, count = Machine({1: 1.8, 2: 1.0}), [0]
    monkeypatch.setattr(module, "compilations", lambda: count)
    assert machine.run(2) == [2, 1]
    with machine.choice.forward(2, 1) as run:
        count[0] += 1
        machine.now += 30.0
    assert run.threads == 2
    assert machine.run(100).count(2) > 85


def test_compilations_are_counted() -> None:
    before = compilations()[0]
    loop = numba.njit(lambda x: x + 1)
    assert loop(1) == 2
    assert compilations()[0] > before
    after = compilations()[0]
    assert loop(2) == 3
    assert compilations()[0] == after


def test_where_all_cores_are_taken_trials_cost_little() -> None:
    """Two threads need a hundred times as long as one, in chains of every depth, which are learnt from together."""
    machine = Machine({1: 1.0, 2: 100.0})
    machine.run(2 * TRIALS)
    rng, start, levels = np.random.default_rng(0), machine.now, 0
    for depth in rng.integers(1, 13, 20_000):
        machine.run(1, levels=int(depth))
        levels += int(depth)
    assert machine.now - start < (1 + 3 * SELDOM) * levels


def test_what_disturbs_one_size_is_not_tried_for_another_until_it_has_gone() -> None:
    machine = Machine({1: 1.0, 2: 100.0})
    machine.run(2 * TRIALS)
    of_drafter = machine.new_choice()
    assert set(machine.run(50, levels=12, choice=of_drafter)) == {1}
    machine.seconds = {1: 1.0, 2: 0.6}
    assert machine.run(500, levels=12, choice=of_drafter)[-1] == 2
    assert machine.run(2000)[-1] == 2


@pytest.mark.parametrize("numbers", [{1: 1.9, 2: 1.0}, {1: 1.0, 2: 1.9}])
def test_fewer_threads_that_were_slower_are_not_tried_at_first_in_larger_forwards(numbers: dict[int, float]) -> None:
    """More threads may pay in larger forwards, so they are tried; fewer are not, until a trial costs little."""
    machine = Machine(numbers)
    machine.run(2 * TRIALS)
    first = machine.run(6, rows=256)
    assert set(first) == ({2} if numbers[1] > numbers[2] else {1, 2})
    machine.seconds = {1: 1.0, 2: 3.0}
    assert machine.run(100, rows=256)[-1] == 1


def test_what_was_tried_in_one_size_is_tried_less_in_the_others() -> None:
    machine = Machine({1: 1.9, 2: 1.0})
    chosen = [threads for rows in (1, 2, 4, 8, 16) for threads in machine.run(40, rows=rows)]
    assert chosen.count(1) <= 5


def test_a_disturbed_beginning_of_one_size_is_soon_made_good_after_trials_in_another() -> None:
    """Two threads pay in prompts alone, and another program took a core while the first prompt was read."""
    machine = Machine({1: 1.0, 2: 1.3})
    machine.run(500)
    machine.seconds = {1: 180.0, 2: 600.0}
    machine.run(2 * TRIALS, rows=192)
    machine.seconds = {1: 180.0, 2: 100.0}
    assert machine.run(100, rows=192).count(2) >= 73


def test_a_number_that_was_not_tried_in_a_size_is_taken_when_the_others_become_slow() -> None:
    """Another program takes a core while a long prompt is read, whose forwards have only run in two threads."""
    machine = Machine({1: 1.8, 2: 1.0})
    for rows in (1, 2, 4, 8, 16):
        machine.run(100, rows=rows)
    assert set(machine.run(40, rows=192)) == {2}
    machine.seconds = {1: 1.8, 2: 10.0}
    assert machine.run(40, rows=192).count(1) >= 37


def test_another_model_that_gains_nothing_by_threads_does_not_have_one_thread_tried() -> None:
    """A drafter takes as long in one thread, at every step before its target reads the next prompt."""
    machine = Machine({1: 1.9, 2: 1.0})
    machine.run(2 * TRIALS)
    machine.seconds = {1: 1.0, 2: 1.0}
    machine.run(20, choice=machine.new_choice())
    machine.seconds = {1: 1.9, 2: 1.0}
    assert set(machine.run(5, rows=64)) == {2}


@pytest.mark.parametrize("slower", [1.1, 1.5])
def test_noise_changes_little(slower: float) -> None:
    """Times vary by a tenth, and one forward in twenty takes twice as long: the best number runs most."""
    rng, times = np.random.default_rng(0), {1: slower, 2: 1.0}
    machine, chosen = Machine(times), []
    for _ in range(2000):
        machine.seconds = {n: x * rng.lognormal(0, 0.1) * (1 + (rng.random() < 0.05)) for n, x in times.items()}
        chosen += machine.run(1)
    assert chosen.count(2) > (0.9 if slower > 1.2 else 0.6) * len(chosen)


def test_sizes_have_choices_of_their_own() -> None:
    few, many = Machine({1: 1.0, 2: 2.0}), Machine({1: 3.0, 2: 2.0})
    choice = ThreadChoice(lambda: few.now + many.now, {})
    for _ in range(20):
        last = few.run(1, rows=1, choice=choice)[0], many.run(1, rows=64, choice=choice)[0]
    assert last == (1, 2)


def test_one_thread_is_no_choice() -> None:
    assert set(Machine({1: 1.0}).run(5)) == {None}
