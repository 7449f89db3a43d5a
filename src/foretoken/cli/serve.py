"""`foretoken serve`: an OpenAI-compatible server for one model."""

from dataclasses import replace
from importlib.util import find_spec

from foretoken.cli.command import command
from foretoken.cli.options import EngineOptions
from foretoken.core.errors import ForetokenError
from foretoken.serve.listen import bound
from foretoken.serve.settings import Settings

EXTRA = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@command
def serve(model: str | None = None, /, *, engine: EngineOptions, server: Settings) -> None:
    """Serve a model to OpenAI's clients, and to a browser; see docs/serving.md.

    The first SIGTERM or Ctrl-C lets running requests end, a second one ends at once.

    model: The same as --target.
    """
    if model is not None and engine.target is not None:
        raise ForetokenError(f"Both {model} and --target {engine.target} are given: name one of them.")
    if any(find_spec(name) is None for name in EXTRA):
        raise ForetokenError("The server needs further packages: pip install -e '.[serve]'.")
    options = engine if model is None else replace(engine, target=model)
    with bound(server.host, server.port) as listening:
        loaded = options.load(None, server.max_batch)
        from foretoken.serve.run import serve as run

        run(loaded, server, listening)
