"""What a long measurement has done so far, in a file, so that an interrupted one goes on where it stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from foretoken.profile import write_json

T = TypeVar("T")


class Journal:
    """path: the file, which is there only while something is unfinished. key: what is measured; with another one the
    file begins anew. replaces: there is a file, which is of no use."""

    def __init__(self, path: str, key: dict[str, Any]) -> None:
        self.path = Path(path)
        self._record: dict[str, Any] = {"key": key, "done": {}}
        self.replaces = False
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.replaces = found["key"] != json.loads(json.dumps(key)) or not isinstance(found["done"], dict)
            if not self.replaces:
                self._record = found
        except OSError:
            return  # nothing there
        except (ValueError, KeyError, TypeError, RecursionError):
            self.replaces = True

    def __len__(self) -> int:
        return len(self._record["done"])

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """The result of `measure`, a JSON value: from the file if it is known already."""
        done = self._record["done"]
        if name not in done:
            done[name] = measure()
            write_json(str(self.path), self._record)
        return done[name]

    def close(self) -> None:
        """All is done."""
        self.path.unlink(missing_ok=True)
