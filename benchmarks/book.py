"""A file of results to which each one adds a line; a run that was stopped goes on from it."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from foretoken.core import files
from foretoken.core.errors import ForetokenError
from foretoken.measure.results import as_line, check, parsed, whole_lines

T = TypeVar("T")


class Book(Generic[T]):
    """Dataclasses of one kind in a JSONL file, to which each result adds a line.

    path: the file.
    found: all results, those of earlier runs first.
    """

    def __init__(
        self, path: str, kind: type[T], settings: Mapping[str, Any], header: Mapping[str, Any], what: str = "results"
    ) -> None:
        """Open the file and read the results of earlier runs.

        path: the file.
        kind: the dataclass of one result.
        settings: what must be equal in all results of the file, as JSON values by name.
        header: what is written into every line beside them, but not compared.
        what: what the results are, for errors.

        Raises ForetokenError, and leaves the file as it is, where it holds something else.
        """
        self.path = Path(path)
        self.found: list[T] = []
        self._beside = {**settings, **header}
        files.append(self.path, "")  # refused now, not after minutes of measuring
        foreign = ForetokenError(f"{self.path} holds no {what}: name another --out.")
        try:
            text = self.path.read_text(encoding="utf-8")
            whole, cut_off = whole_lines(text, fields(kind)[0].name)  # pyright: ignore[reportArgumentType]
            records = [parsed(kind, line) for line in whole.splitlines()]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise foreign from error
        for found, record in records:
            check(self.path, record, settings)
            self.found.append(found)
        if cut_off:
            files.write(self.path, lambda path: path.write_text(whole, encoding="utf-8"))

    def add(self, result: T) -> None:
        """Append `result` to the file and to `found`."""
        files.append(self.path, as_line(result, self._beside))
        self.found.append(result)
