"""The command `foretoken`. Results go to stdout, progress and statistics to stderr; bad input exits with 2."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Annotated, Any

import typer

from foretoken.cli import audit, bench, chat, demo, fetch, generate, serve, train, tune, vocab
from foretoken.core.errors import ForetokenError
from foretoken.core.interrupts import end_as_by_ctrl_c, exit_code
from foretoken.version import __version__

# The exception for what typer finds wrong with a command line, which has no public name in typer. One without a message
# is raised where help was printed.
UsageError: Any = typer.BadParameter.__base__
CTRL_C = 130  # what a command returns where typer has caught KeyboardInterrupt

app = typer.Typer(
    help="Generate faster from a causal language model, with exactly the same output distribution.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(audit.audit)
app.add_typer(bench.app, name="bench")
app.command()(tune.tune)
app.command()(vocab.vocab)
app.command()(fetch.fetch)
app.command()(demo.demo)
app.command()(train.train)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        print(f"foretoken {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = None,
) -> None:
    """Take the options that stand before a command. version: whether to print the version and end."""


def main() -> None:
    """Run the command line of this process."""
    run(partial(app, prog_name="foretoken", standalone_mode=False))


def run(command: Callable[[], object]) -> None:
    """Run a command of typer's; what goes wrong becomes one sentence on stderr, and an exit code.

    command: runs it with typer's standalone_mode=False: it returns an exit code or nothing, and raises an exception
        for wrong options.
    """
    warn = cache(lambda said: print(f"foretoken: warning: {said}", file=sys.stderr))  # each text once
    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    logging.getLogger("foretoken").handlers = [Notices(logging.INFO)]
    logging.getLogger("foretoken").setLevel(logging.INFO)
    end_as_by_ctrl_c()
    try:
        with _streams():
            code = command()
        if isinstance(code, int):
            sys.exit(exit_code() if code == CTRL_C else code)
    except UsageError as error:
        if said := error.format_message():
            where = f" See {error.ctx.command_path} --help." if error.ctx else ""
            print(f"foretoken: {said.rstrip('.')}{'' if said.endswith('?') else '.'}{where}", file=sys.stderr)
        sys.exit(2)
    except ForetokenError as error:
        print(f"foretoken: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:  # the end of an input that was asked for
        print("foretoken: Aborted: the input ended.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(exit_code())


class Notices(logging.Handler):
    """Prints the package's log messages on stderr, such as that something takes long."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a log record."""
        print(f"foretoken: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def _streams() -> Iterator[None]:
    """Handle what may be wrong with the standard streams of a whole command: one is closed, or its disk is full.

    Output that cannot be written becomes a ForetokenError. Where the reader of the output went away, as `head` does,
    the command ends quietly with exit code 0.
    """
    _open_missing()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, since a failure at the interpreter's end could not be reported
    except (BrokenPipeError, SystemExit) as leaving:
        gone = leaving if isinstance(leaving, BrokenPipeError) else leaving.__context__
        if not isinstance(gone, BrokenPipeError):
            raise
        _drop_output()
        sys.exit(0)  # typer, if it has seen the error, would exit with 1
    except OSError as error:
        _drop_output()
        if error.errno is None:  # raised by a library, whose message says more
            raise ForetokenError(f"{type(error).__name__}: {str(error).removesuffix('.')}.") from error
        what = f"use {error.filename}" if error.filename else "write the output"
        raise ForetokenError(f"Cannot {what}: {error.strerror}.") from error


def _open_missing() -> None:
    """Mend output streams that were closed before Python started: it has None for them.

    stderr goes nowhere then, and a closed stdout is refused. Code that reads stdin checks it by itself. Notices that
    cannot be written, since the log's disk is full or its reader went away, do not end the work that they tell of.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif sys.stderr is sys.__stderr__:
        raw = _Lossy(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), sys.stderr.encoding, line_buffering=True)
    if sys.stdout is None:
        raise ForetokenError("Standard output is closed: leave it open, or send it to a file or to /dev/null.")
    for stream, instead in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=instead)  # for characters that the terminal's encoding lacks


class _Lossy(io.FileIO):
    """A file that leaves out what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, and return how many were dealt with."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _drop_output() -> None:
    """Discard output that is still buffered, so that the interpreter does not fail on it at its end."""
    with suppress(OSError, ValueError):  # ValueError: a stream that is no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
