"""Dataclasses of plain values as JSON objects in files, beside the settings they were measured with."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

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


def check(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any], option: str) -> None:
    """Refuse what was measured with other settings; `option` names another file or folder."""
    for key, value in settings.items():
        if record.get(key) != value:
            raise ForetokenError(
                f"{path} was measured with {key} {record.get(key)}, not {value}: name another {option} to begin anew."
            )
