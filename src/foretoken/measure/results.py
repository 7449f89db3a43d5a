"""Results in files that a stopped measurement goes on from, beside the settings they were measured with."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any, Generic, TypeVar

from foretoken.core import files
from foretoken.core.errors import ForetokenError

T = TypeVar("T")


def as_line(value: Any, settings: Mapping[str, Any]) -> str:
    """One line of JSON: the fields of a dataclass, and the settings."""
    return json.dumps({**asdict(value), **settings}) + "\n"


def parsed(kind: type[T], line: str) -> tuple[T, Mapping[str, Any]]:
    """(value, all that stands there); ValueError, KeyError or TypeError where it is no `kind`. Lists become tuples."""
    record = json.loads(line)
    values = {name: record[name] for name in signature(kind).parameters}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}), record


def check(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any], option: str | None) -> None:
    """Refuse what was measured with other settings; `option` names another file or folder."""
    for key, value in settings.items():
        if record.get(key) != json.loads(json.dumps(value)):
            raise ForetokenError(
                f"{path} was measured with {key} {record.get(key)}, not {value}: name another {option} to begin anew."
            )


def write_lines(path: str, records: Iterable[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """A JSONL file, replaced if it exists: a line per record, each with the header."""
    text = "".join(json.dumps({**record, **header}) + "\n" for record in records)
    files.write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


class Book(Generic[T]):
    """Dataclasses of one kind in a JSONL file that grows by a line per result.

    found: all results, those of earlier runs first.
    replaces: whether there is a file of something else, which the first result replaces.
    """

    def __init__(
        self, path: str, kind: type[T], settings: Mapping[str, Any], header: Mapping[str, Any], option: str | None,
        what: str = "results",
    ) -> None:  # fmt: skip
        """settings: what must be equal for results to be of use together; they and the header stand in every line.

        option: of the command, names the file. None: a file of something else is replaced, and not made before it is
        needed. what: the results, as an error calls them.
        Raises ForetokenError, and leaves the file alone, where it holds something else and is not to be replaced.
        """
        self.path = Path(path)
        self.found: list[T] = []
        self.replaces = False
        self._beside = {**settings, **header}
        if option is not None:
            files.append(self.path, "")  # refused now, not after minutes of measuring
        try:
            self._read(kind, settings, option, what)
        except ForetokenError:
            if option is not None:
                raise
            self.found, self.replaces = [], True

    def _read(self, kind: type[T], settings: Mapping[str, Any], option: str | None, what: str) -> None:
        foreign = ForetokenError(f"{self.path} holds no {what}: name another {option}.")
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise foreign from error
        whole = text[: text.rfind("\n") + 1]
        cut_off, start = text[len(whole) :], f'{{"{fields(kind)[0].name}": '  # pyright: ignore[reportArgumentType]
        if cut_off and not (cut_off.startswith(start) or start.startswith(cut_off)):
            raise foreign
        for line in whole.splitlines():
            try:
                found, record = parsed(kind, line)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise foreign from error
            check(self.path, record, settings, option)
            self.found.append(found)
        if cut_off:  # by the last run's stop
            files.write(self.path, lambda path: path.write_text(whole, encoding="utf-8"))

    def add(self, result: T) -> None:
        line = as_line(result, self._beside)
        if self.replaces and not self.found:
            files.write(self.path, lambda path: path.write_text(line, encoding="utf-8"))
        else:
            files.append(self.path, line)
        self.found.append(result)


@dataclass(frozen=True)
class Entry:
    name: str
    value: Any


class Journal:
    """JSON values by name, of one long measurement, in a file that is there only while something is unfinished.

    key: what is measured; a file of another one is replaced, and `replaces` tells so.
    """

    def __init__(self, path: str, key: Mapping[str, Any]) -> None:
        self._book = Book(path, Entry, {"key": key}, {}, None)
        self.path, self.replaces = self._book.path, self._book.replaces
        self._values = {e.name: list(e.value) if isinstance(e.value, tuple) else e.value for e in self._book.found}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def add(self, name: str, value: Any) -> None:
        self._book.add(Entry(name, value))
        self._values[name] = value

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """The value of this name, a JSON value: from the file if it is known already, else measured."""
        if name not in self:
            self.add(name, measure())
        return self[name]

    def close(self) -> None:
        """All is done."""
        self.path.unlink(missing_ok=True)
