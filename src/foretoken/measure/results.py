"""Files of results, with the settings they were measured with; a stopped measurement goes on from them."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

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


def check(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a file whose results were measured with other settings.

    path: the file, for the error.
    record: what the file says.
    settings: what it must say, by name.

    Raises ForetokenError.
    """
    for key, value in settings.items():
        if record.get(key) != json.loads(json.dumps(value)):
            raise ForetokenError(
                f"{path} was measured with {key} {record.get(key)}, not {value}: name another --out to begin anew."
            )


def write_lines(path: str, records: Iterable[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write a JSONL file with one line per record; a file that exists is replaced.

    path: the file.
    records: JSON values by name.
    header: entries that are added to every line.
    """
    text = "".join(json.dumps({**record, **header}) + "\n" for record in records)
    files.write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def whole_lines(text: str, first: str) -> tuple[str, str]:
    """Return a JSONL text up to its last line end, and the rest: a line that was being written as a run was stopped.

    text: what the file holds.
    first: the name of the first entry of every line.

    Raises ValueError where the rest is not the beginning of such a line.
    """
    whole = text[: text.rfind("\n") + 1]
    rest, start = text[len(whole) :], f'{{"{first}": '
    if not (rest.startswith(start) or start.startswith(rest)):
        raise ValueError("not a line of results")
    return whole, rest


class Journal:
    """The JSON values of one long measurement, by name, in a file that exists only until the measurement is complete.

    path: the file.
    replaces: whether the file is of another measurement, or no journal; the first value replaces it.
    """

    def __init__(self, path: str, key: Mapping[str, Any]) -> None:
        """Read what the file at `path` has of this measurement; key: all that its values depend on, by name."""
        self.path, self.replaces = Path(path), False
        self._key = json.loads(json.dumps(key))
        self._values: dict[str, Any] = {}
        try:
            self._read()
        except (OSError, ForetokenError, ValueError, KeyError, TypeError, RecursionError):
            self._values, self.replaces = {}, True

    def _read(self) -> None:
        """Read all lines of the file. Raises an exception where one of them is not of this measurement."""
        if not self.path.exists():
            return
        whole, cut_off = whole_lines(self.path.read_text(encoding="utf-8"), "name")
        for record in map(json.loads, whole.splitlines()):
            if record["key"] != self._key:
                raise ValueError("of another measurement")
            self._values[record["name"]] = record["value"]
        if cut_off:
            files.write(self.path, lambda path: path.write_text(whole, encoding="utf-8"))

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def add(self, name: str, value: Any) -> None:
        """Append `value`, a JSON value, under `name`."""
        line = json.dumps({"name": name, "value": value, "key": self._key}) + "\n"
        if self.replaces and not self._values:
            files.write(self.path, lambda path: path.write_text(line, encoding="utf-8"))
        else:
            files.append(self.path, line)
        self._values[name] = value

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """Return the value of `name`, from the file if it is there; else call `measure`, and add what it returns."""
        if name not in self:
            self.add(name, measure())
        return self[name]

    def close(self) -> None:
        """Remove the file, since the measurement is complete."""
        self.path.unlink(missing_ok=True)
