"""Files of results, with the settings they were measured with; a stopped measurement goes on from them."""

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
    """Return one line of JSON with the fields of a dataclass, and settings beside them.

    value: the dataclass.
    settings: further entries, as JSON values by name.
    """
    return json.dumps({**asdict(value), **settings}) + "\n"


def parsed(kind: type[T], line: str) -> tuple[T, Mapping[str, Any]]:
    """Read a dataclass from one line of JSON and return (it, all entries of the line). Its lists become tuples.

    kind: the dataclass; the line must have all its fields.
    line: the text.

    Raises ValueError, KeyError or TypeError where the line holds no such dataclass.
    """
    record = json.loads(line)
    values = {name: record[name] for name in signature(kind).parameters}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}), record


def check(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any], option: str | None) -> None:
    """Refuse a file whose results were measured with other settings.

    path: the file, for the error.
    record: what the file says.
    settings: what it must say, by name.
    option: the command's option by which another file or folder is named, for the error.

    Raises ForetokenError.
    """
    for key, value in settings.items():
        if record.get(key) != json.loads(json.dumps(value)):
            raise ForetokenError(
                f"{path} was measured with {key} {record.get(key)}, not {value}: name another {option} to begin anew."
            )


def write_lines(path: str, records: Iterable[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write a JSONL file with one line per record; a file that exists is replaced.

    path: the file.
    records: JSON values by name.
    header: entries that are added to every line.
    """
    text = "".join(json.dumps({**record, **header}) + "\n" for record in records)
    files.write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


class Book(Generic[T]):
    """Dataclasses of one kind in a JSONL file, to which each result adds a line.

    path: the file.
    found: all results, those of earlier runs first.
    replaces: whether the file holds something else, which the first result replaces.
    """

    def __init__(
        self, path: str, kind: type[T], settings: Mapping[str, Any], header: Mapping[str, Any], option: str | None,
        what: str = "results",
    ) -> None:  # fmt: skip
        """Open the file and read the results of earlier runs.

        path: the file.
        kind: the dataclass of one result.
        settings: what must be equal in all results of the file, as JSON values by name.
        header: what is written into every line beside them, but not compared.
        option: the command's option that names the file. None: a file of something else is replaced, and the file is
            not created before the first result.
        what: what the results are, for errors.

        Raises ForetokenError, and leaves the file as it is, where it holds something else and `option` is given.
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
        if cut_off:  # the last run stopped while it wrote this line
            files.write(self.path, lambda path: path.write_text(whole, encoding="utf-8"))

    def add(self, result: T) -> None:
        """Append `result` to the file and to `found`."""
        line = as_line(result, self._beside)
        if self.replaces and not self.found:
            files.write(self.path, lambda path: path.write_text(line, encoding="utf-8"))
        else:
            files.append(self.path, line)
        self.found.append(result)


@dataclass(frozen=True)
class Entry:
    """One line of a Journal: a JSON value and its name."""

    name: str
    value: Any


class Journal:
    """The JSON values of one long measurement, by name, in a file that exists only until the measurement is complete.

    path: the file.
    replaces: whether the file is of another measurement; the first value replaces it.
    """

    def __init__(self, path: str, key: Mapping[str, Any]) -> None:
        """Read what the file at `path` has of this measurement; key: all that its values depend on, by name."""
        self._book = Book(path, Entry, {"key": key}, {}, None)
        self.path, self.replaces = self._book.path, self._book.replaces
        self._values = {e.name: list(e.value) if isinstance(e.value, tuple) else e.value for e in self._book.found}

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def add(self, name: str, value: Any) -> None:
        """Append `value`, a JSON value, under `name`."""
        self._book.add(Entry(name, value))
        self._values[name] = value

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """Return the value of `name`, from the file if it is there; else call `measure`, and add what it returns."""
        if name not in self:
            self.add(name, measure())
        return self[name]

    def close(self) -> None:
        """Remove the file, since the measurement is complete."""
        self.path.unlink(missing_ok=True)
