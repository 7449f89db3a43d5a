"""`foretoken serve`: an OpenAI-compatible server for one model."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

from foretoken.cli.command import command
from foretoken.cli.options import EngineOptions, RayOptions
from foretoken.core.errors import ForetokenError
from foretoken.serve.listen import bound
from foretoken.serve.owner import Owner
from foretoken.serve.settings import Settings

EXTRA = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@command
def serve(
    model: str | None = None,
    /,
    *,
    engine: EngineOptions,
    server: Settings,
    cluster: RayOptions,
    max_replicas: int | None = None,
) -> None:
    """Serve a model to OpenAI's clients, and to a browser; see docs/serving.md.

    The first SIGTERM or Ctrl-C lets running requests end, a second one ends at once.

    model: Model folder (Hugging Face), GGUF file, hub id, or a name that `foretoken fetch` lists: the same as --target.
    max_replicas: With --ray: most engines; their number follows the requests. Default: as many as --ray says, always.
    """
    options = engine.of(model)
    if any(find_spec(name) is None for name in EXTRA):
        raise ForetokenError("The server needs further packages: pip install -e '.[serve]'.")
    if cluster.ray is not None:
        resources = cluster.resources(options.device)
        from foretoken.cluster.app import replicas, serve_replicas

        load = partial(options.anywhere().load, None, server.max_batch)
        with bound(server.host, server.port) as listening:
            serve_replicas(replicas(load, server, cluster.ray, max_replicas, **resources), server, listening)
        return
    if max_replicas is not None:
        raise ForetokenError("--max-replicas needs --ray: how many engines there are at the least.")
    with bound(server.host, server.port) as listening, _ended_at_once():
        owner = Owner()
        loading = owner.submit(lambda: options.load(None, server.max_batch))
        while not loading.done():  # a signal that comes just before a wait is handled when the wait ends
            wait([loading], timeout=0.2)
        loaded = loading.result()
        from foretoken.serve.run import serve as run

        run(loaded, server, listening, owner)


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end the process at once, until the server handles signals itself.

    KeyboardInterrupt would not do: it was swallowed now and then, and Python crashes in its own shutdown while the
    model's thread is executing C++.
    """
    ends = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, lambda number, frame: os._exit(128 + number)) for number in ends]
    try:
        yield
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
