"""Tables whose names are known at once and whose things are imported when asked for, since torch takes seconds."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """homes: name -> "module:attribute", the module as below `foretoken`. make: from that attribute to the thing, once;
    by default it is the attribute itself."""

    def __init__(self, homes: Mapping[str, str], make: Callable[[Any], T] = lambda found: found) -> None:
        self._homes = homes
        self._make = make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            module, attribute = self._homes[name].split(":")
            self._made[name] = self._make(getattr(import_module(f"foretoken.{module}"), attribute))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
