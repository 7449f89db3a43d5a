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
    """Return one line of JSON with the fields of the dataclass `value`, and `settings`, JSON values by name."""
    return json.dumps({**asdict(value), **settings}) + "\n"


def parsed(kind: type[T], line: str) -> tuple[T, Mapping[str, Any]]:
    """Read a dataclass of a `kind` from a `line` of JSON, whose lists become tuples; return (it, the line's entries).

    Raises ValueError, KeyError or TypeError where the line holds no such dataclass, with all its fields.
    """
    record = json.loads(line)
    values = {name: record[name] for name in signature(kind).parameters}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}), record


def check(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a file whose results were measured with other settings; raises ForetokenError.

    path: the file, for the error.
    record: what the file says.
    settings: what it must say, by name.
    """
    for key, value in settings.items():
        if record.get(key) != json.loads(json.dumps(value)):
            raise ForetokenError(
                f"{path} was measured with {key} {record.get(key)}, not {value}: name another --out to begin anew."
            )


def write_lines(path: str, records: Iterable[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write a JSONL file at `path` with a line per record; a file that exists is replaced.

    records: JSON values by name.
    header: entries that are added to every line.
    """
    text = "".join(json.dumps({**record, **header}) + "\n" for record in records)
    files.write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def whole_lines(text: str, first: str) -> tuple[str, str]:
    """Return a JSONL `text` up to its last line end, and the rest: a line that was being written as a run was stopped.

    Raises ValueError where the rest is not the beginning of a line, of which `first` is the name of the first entry.
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
            if not self.path.exists():
                return
            whole, cut_off = whole_lines(self.path.read_text(encoding="utf-8"), "name")
            records = [json.loads(line) for line in whole.splitlines()]
            self.replaces = any(record["key"] != self._key for record in records)
            self._values = {} if self.replaces else {record["name"]: record["value"] for record in records}
            if cut_off and not self.replaces:
                files.write(self.path, lambda path: path.write_text(whole, encoding="utf-8"))
        except (OSError, ForetokenError, ValueError, KeyError, TypeError, RecursionError):
            self._values, self.replaces = {}, True

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
