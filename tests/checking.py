"""Functions check the types and the shapes that they declare at some of their calls: at all of them it is most of the
time of the tests."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from types import CodeType
from typing import Any

import jaxtyping

FIRST = 1  # call of every test that is checked,
EVERY = 211  # and one in so many of those that follow

_every_call = jaxtyping.jaxtyped
_calls: dict[tuple[str, str, CodeType], list[int]] = {}


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Make the decorator that jaxtyping's import hook writes above all functions, so that it checks some calls.

    A function is made ready for checking at its first call: most tests call few of all.
    """

    def decorate(declared: Any) -> Any:
        if is_dataclass(declared) and "__init__" in vars(declared):
            declared.__init__ = decorate(declared.__init__)
            return declared
        if not inspect.isfunction(declared):
            return _every_call(declared, typechecker=typechecker)
        name = declared.__module__, declared.__qualname__  # generated functions of classes may have equal code
        calls, ready = _calls.setdefault((*name, declared.__code__), [0]), []

        @functools.wraps(declared)
        def call(*arguments: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            calls[0] += 1
            if calls[0] > FIRST and calls[0] % EVERY:
                return declared(*arguments, **named)
            if not ready:
                ready.append(_every_call(declared, typechecker=typechecker))
            return ready[0](*arguments, **named)

        return call

    return decorate


def begin_test() -> None:
    """Count calls from 0 again."""
    for calls in _calls.values():
        calls[0] = 0
