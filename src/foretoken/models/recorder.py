"""The one hook for measuring a model: a context manager that is entered around the work of the model's rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

SCORING = "scoring"  # the span of all that rows do in one call: masks, cache and forward
FORWARD = "forward"  # the span of the model's own work in it
Recorder = Callable[[str], AbstractContextManager[Any]]  # name of a span -> what is entered around it
F = TypeVar("F", bound=Callable[..., Any])


def recorded(span: str) -> Callable[[F], F]:
    """Return a decorator that makes a method enter `self.recorder` around its work, unless that is None.

    span: the name with which the recorder is called, SCORING or FORWARD.
    """

    def around(method: F) -> F:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if recorder is None:
                return method(self, *args, **kwargs)
            with recorder(span):
                return method(self, *args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return around
