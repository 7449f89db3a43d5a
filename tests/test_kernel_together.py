"""Parts of one forward meet and wait for each other, and one does the work of all where they cannot."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from foretoken.kernel.compile import compiled
from foretoken.kernel.together import ALONE, GATE, LATE, TOGETHER, meet, wait


def gate() -> np.ndarray:
    return np.zeros(GATE, np.int64)


def test_a_part_that_comes_too_late_leaves_the_work_to_one() -> None:
    """Parts one after the other in one thread, as where a process may have no second one."""
    for parts in (2, 3):
        one = gate()
        assert [meet(one.ctypes.data, parts, 0) for _ in range(parts)] == [ALONE] + [LATE] * (parts - 1)
    assert meet(gate().ctypes.data, 1, 0) == TOGETHER


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_in_threads_agree_on_who_works(parts: int) -> None:
    """Whether they meet goes by the clock; that all do, or that one alone works, does not."""
    with ThreadPoolExecutor(parts) as threads:
        for _ in range(200):
            one = gate()
            found = sorted(threads.map(meet, [one.ctypes.data] * parts, [parts] * parts, [10**8] * parts))
            assert found in ([TOGETHER] * parts, [ALONE] + [LATE] * (parts - 1))


@compiled
def passed_on(at, numbers, part, parts, rounds):
    """Each part in its turn adds 1 to what the one before it wrote, and they wait for each other after each."""
    for turn in range(rounds):
        if turn % parts == part:
            numbers[turn + 1] = numbers[turn] + 1
        wait(at, parts, turn + 1)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_one_part_wrote_the_others_read_behind_a_wait(parts: int) -> None:
    one, numbers = gate(), np.zeros(501, np.int64)
    passed_on(gate().ctypes.data, np.zeros(1, np.int64), 0, 1, 0)  # is compiled by one thread
    with ThreadPoolExecutor(parts) as threads:
        list(threads.map(lambda part: passed_on(one.ctypes.data, numbers, part, parts, 500), range(parts)))
    assert numbers.tolist() == list(range(501))
