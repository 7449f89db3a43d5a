"""Tests with many similar cases: some of them run in the fast suite, the others with make test-long."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, where all but the first and every `number`-th after it are marked as long.

    number: chosen so that the fast ones differ in every argument: it should divide no period of the cases.
    cases: the values of one argument, or tuples of those of several.
    """
    marked = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.long] * (i % number > 0)) for i, case in enumerate(marked)]
