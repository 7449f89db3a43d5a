"""Standard input and output as they may be: closed, a full disk, a reader that has seen enough."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from foretoken.core.errors import ForetokenError


@contextmanager
def streams() -> Iterator[None]:
    """Around a whole command: what cannot be written is one sentence, and a reader that went away, as `head` does, ends
    it quietly with exit code 0."""
    _open_missing()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here: at the interpreter's end nobody could tell of a failure
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # typer has seen it, and would exit with 1
            _drop_output()
            sys.exit(0)
        raise
    except BrokenPipeError:
        _drop_output()
        sys.exit(0)
    except OSError as error:
        _drop_output()
        what = f"use {error.filename}" if error.filename else "write the output"
        raise ForetokenError(f"Cannot {what}: {error.strerror or error}.") from error


def _open_missing() -> None:
    """Python has None for a stream that was closed before it started; what reads stdin says so by itself."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise ForetokenError("Standard output is closed: leave it open, or send it to a file or to /dev/null.")
    for stream, instead in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=instead)  # of characters that the terminal lacks


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not fail on it at its end."""
    with suppress(OSError, ValueError):  # ValueError: a stream that is no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
