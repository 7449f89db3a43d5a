"""Names that are known at once, of things that are imported when they are asked for, since torch takes seconds."""

import gc
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def imported(home: str) -> Any:
    """The thing at "module:attribute", the module as below `foretoken`.

    Importing torch and transformers makes a million objects, none of them garbage. To search them again and again
    takes a second, so the garbage collector rests meanwhile.
    """
    module, attribute = home.split(":")
    collecting = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(f"foretoken.{module}"), attribute)
    finally:
        if collecting:
            gc.enable()


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
