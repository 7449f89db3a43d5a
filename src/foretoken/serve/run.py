"""The app in a process of its own: signals, draining (the end of running requests), and the exit code."""

import asyncio
import logging
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from foretoken.engine import Engine
from foretoken.serve.app import create_app
from foretoken.serve.listen import address, listen
from foretoken.serve.logs import DRAINS, ENDS, LISTENS, log_to_stderr
from foretoken.serve.owner import Owner
from foretoken.serve.settings import Settings
from foretoken.serve.worker import Worker

log = logging.getLogger(__name__)
TELLING = 5  # seconds to answer requests that were cut off with an error, before uvicorn closes their connections
# Seconds after which an idle connection is closed: longer than clients keep one (httpx 5, node 4, aiohttp 15), since a
# client that sends a request while its connection is being closed gets no answer.
KEEP_ALIVE = 75


class Server(uvicorn.Server):
    """uvicorn with other signals: the first one lets running requests end, a second one ends the server at once.

    Requests that still run `drain` seconds after the first signal, or at the second one, are ended by the worker with
    an error that says so. The server also ends where the thread that runs the model has died.

    config: uvicorn's settings, of which one is set here: how long it waits for running requests.
    worker: decodes the jobs.
    drain: seconds that running requests have to end in.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, drain: float) -> None:
        config.timeout_graceful_shutdown = int(drain) + TELLING
        super().__init__(config)
        self.worker, self.drain = worker, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or at a second signal end at once; sig, frame: as every handler of signals is called."""
        again, self.should_exit = self.should_exit, True
        loop = asyncio.get_running_loop()  # since `end` may wait for the model's thread, as a signal must not
        loop.call_soon_threadsafe(loop.call_later, 0 if again else self.drain, self.worker.end)
        if again:
            loop.call_soon_threadsafe(loop.call_later, TELLING, setattr, self, "force_exit", True)
        log.info(ENDS if again else DRAINS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen on the bound `sockets`, and log their addresses."""
        await super().startup(sockets)
        for where in map(address, sockets or ()):
            log.info(LISTENS, where, where)

    async def on_tick(self, counter: int) -> bool:
        """Whether the server is to end; uvicorn asks it ten times a second. counter: counts the calls."""
        return await super().on_tick(counter) or self.worker.error is not None


def prepared(engine: Engine, settings: Settings, owner: Owner) -> FastAPI:
    """Return the app for a process of its own.

    Logging to stderr is set up, and a short text is generated, so that nothing is compiled during a request.

    engine, settings, owner: as for `serve`.
    """
    log_to_stderr(settings.log)
    owner.submit(lambda: engine.generate([0], max_new_tokens=8, seed=0)).result()
    return create_app(engine, settings, owner)


def serve(engine: Engine, settings: Settings, listening: socket.socket, owner: Owner) -> None:
    """Serve until a signal ends it. Exits with code 1 where the thread that runs the model died.

    Raises ForetokenError where another server has begun to listen on the port meanwhile.

    engine: the model and its drafter, with a tokenizer.
    settings: the server's options; the address in them is not used.
    listening: a bound socket.
    owner: the thread that loaded the engine, which also decodes.
    """
    app = prepared(engine, settings, owner)
    listen(listening)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE)
    worker: Worker = app.state.service.worker
    server = Server(config, worker, settings.drain)
    log.info("serves %s, drafter %s", engine.target.name, engine.drafter.name)
    server.run(sockets=[listening])
    worker.stop()
    if worker.error is not None:
        log.error("the thread that runs the model has died: %r", worker.error)
        sys.exit(1)
