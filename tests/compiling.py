"""The processes of one run of the tests share what they compile: a loop that is not on disk is compiled by one of them,
and the others wait for it. None starts further processes that compile."""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foretoken.kernel import compile

LONGEST = 180  # seconds to wait, after which a process compiles the loop itself


def share(folder: Path) -> None:
    """From now on in this process. folder: where the locks are kept, the same for all processes of the run."""
    os.environ[compile.AT_ONCE] = "1"
    cache = compile._cache_class()
    load, save, held = cache.load_overload, cache.save_overload, dict[str, FileLock]()

    def name(loop: Any, signature: Any) -> str:
        return sha256(f"{loop._cache_file._index_path} {signature}".encode()).hexdigest()

    def load_overload(self: Any, signature: Any, target: Any) -> Any:
        found, key = load(self, signature, target), name(self, signature)
        if found is None and key not in held:
            lock = FileLock(folder / key, thread_local=False)
            with suppress(Timeout):
                lock.acquire(timeout=LONGEST)
                found = load(self, signature, target)
                if found is None:
                    held[key] = lock
                else:
                    lock.release()
        return found

    def save_overload(self: Any, signature: Any, made: Any) -> None:
        try:
            save(self, signature, made)
        finally:
            if lock := held.pop(name(self, signature), None):
                lock.release()

    cache.load_overload, cache.save_overload = load_overload, save_overload
