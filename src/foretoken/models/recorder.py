"""The one hook for whoever measures a model: it is entered around the work of the model's rows, span by span."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

SCORING = "scoring"  # all that rows do for one call: masks, cache and forward
FORWARD = "forward"  # the model's own work in it
Recorder = Callable[[str], AbstractContextManager[Any]]  # by the name of the span that begins
F = TypeVar("F", bound=Callable[..., Any])


def recorded(span: str) -> Callable[[F], F]:
    """Makes a method of rows enter their model's recorder, where it has one."""

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
