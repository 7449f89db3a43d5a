"""Tables whose names are known at once and whose values are imported at first use, since torch takes seconds."""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off inside `with`."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def imported(home: str) -> Any:
    """Return the object at `home`, "module:attribute" with the module's name inside `foretoken`.

    Importing torch and transformers makes a million objects, none of them garbage. The collector would search them
    three times, once per generation, a quarter of a second each. So it rests meanwhile, and then they count as old.
    """
    module, attribute = home.split(":")
    name = f"foretoken.{module}"
    if name in sys.modules:
        return getattr(import_module(name), attribute)
    with uncollected():
        found = getattr(import_module(name), attribute)
        # Where other code has frozen objects, `unfreeze` would release them. To count them takes time, so it is done
        # only here.
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # which leaves all objects in the oldest generation
        return found


class Lazy(Mapping[str, T]):
    """A read-only mapping whose values are imported at first use.

    homes: name -> "module:attribute", as `imported` takes it.
    make: makes the value of the attribute, once per name; by default the value is the attribute itself.
    """

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
