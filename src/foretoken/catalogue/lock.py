"""One process at a time makes a part of the cache directory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock inside `with`; where another process has it, say so and wait.

    path: the lock's file.
    what: what the other process does, such as "fetches a model".
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logging.getLogger("foretoken").info(f"another process {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
