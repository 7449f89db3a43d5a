"""What is called while a test runs."""

from typing import Any

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of each call of a function from now on, which does what it did.

    owner, name: the module, class or object that has the function, and its name there.
    """
    calls, real = list[tuple[Any, ...]](), getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return real(*given, **named)

    monkeypatch.setattr(owner, name, watched)
    return calls
