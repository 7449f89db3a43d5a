"""What stands in the place of something that fails."""

from collections.abc import Callable
from typing import Any


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises it, whatever it is called with."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call
