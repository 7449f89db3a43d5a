"""Names that are known at once, of things that are imported when they are asked for, since torch takes seconds."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector rests meanwhile, and what was made counts as old for it from then on.

    Importing torch and transformers makes a million objects, none of them garbage. To search them takes a quarter of a
    second, and comes once for each of the three generations.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # nobody else's are frozen
            gc.freeze()
            gc.unfreeze()  # which leaves all of them in the oldest generation
        gc.enable()


def imported(home: str) -> Any:
    """The thing at "module:attribute", the module as below `foretoken`."""
    module, attribute = home.split(":")
    with uncollected():
        return getattr(import_module(f"foretoken.{module}"), attribute)


class Lazy(Mapping[str, T]):
    """homes: name -> "module:attribute", see `imported`. make: from that attribute to the thing, once; by default it is
    the attribute itself."""

    def __init__(self, homes: Mapping[str, str], make: Callable[[Any], T] = lambda found: found) -> None:
        self._homes = homes
        self._make = make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            self._made[name] = self._make(imported(self._homes[name]))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
