"""The command `foretoken`. Results go to stdout, progress and statistics to stderr; bad input exits with 2."""

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from foretoken.cli import audit, bench, chat, demo, fetch, generate, train, tune, vocab
from foretoken.cli.streams import streams
from foretoken.core.errors import ForetokenError
from foretoken.version import __version__

app = typer.Typer(
    help="Generate faster from a causal language model, with exactly the same output distribution.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("audit")(audit.audit)
app.add_typer(bench.app, name="bench")
app.command("tune")(tune.tune)
app.command("vocab")(vocab.vocab)
app.command("fetch")(fetch.fetch)
app.command("demo")(demo.demo)
app.command("train")(train.train)


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
    """Generate faster from a causal language model, with exactly the same output distribution."""


def main() -> None:
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command of typer's: what goes wrong is one sentence on stderr, and an exit code."""
    warnings.showwarning = _one_line_warning
    logging.getLogger("foretoken").handlers = [Notices(logging.INFO)]
    logging.getLogger("foretoken").setLevel(logging.INFO)
    try:
        with streams():
            command()
    except ForetokenError as error:
        print(f"foretoken: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


class Notices(logging.Handler):
    """What takes long says so on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"foretoken: {record.getMessage()}", file=sys.stderr, flush=True)


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"foretoken: warning: {message}", file=sys.stderr)
