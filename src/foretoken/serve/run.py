"""The app in a process of its own: signals, draining, and the exit code."""

import logging
import socket
import sys
from threading import Timer
from types import FrameType

import uvicorn
from fastapi import FastAPI

from foretoken.engine import Engine
from foretoken.serve.app import create_app
from foretoken.serve.listen import address
from foretoken.serve.logs import log_signal, log_to_stderr
from foretoken.serve.owner import Owner
from foretoken.serve.settings import Settings
from foretoken.serve.worker import Worker

log = logging.getLogger(__name__)
TELLING = 5  # seconds in which requests that were cut off are answered so, before uvicorn breaks their connections


class Server(uvicorn.Server):
    """uvicorn, but: the first signal drains and a second one ends, and a dead model thread ends it too.

    What runs longer than `drain` seconds after the first signal, or still runs at the second one, is ended by the
    worker, which tells each request so.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, drain: float) -> None:
        config.timeout_graceful_shutdown = int(drain) + TELLING
        super().__init__(config)
        self.worker = worker
        self.limit = Timer(drain, worker.end)
        self.forced = Timer(TELLING, self._force)
        self.limit.daemon = self.forced.daemon = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again, self.should_exit = self.should_exit, True
        if not again:
            self.limit.start()
        elif not self.forced.is_alive():
            Timer(0, self.worker.end).start()  # which may wait for the model's thread, as a signal must not
            self.forced.start()
        log_signal(log, again)

    def _force(self) -> None:
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("listens on %s", ", ".join(address(each) for each in sockets or ()))

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.worker.error is not None


def prepared(engine: Engine, settings: Settings, owner: Owner) -> FastAPI:
    """The app in a process that is its own: its log is set up, and what must be compiled is before a request comes.

    owner: the thread that loaded the engine.
    """
    log_to_stderr(settings.log)
    owner.submit(lambda: engine.generate([0], max_new_tokens=8, seed=0)).result()
    return create_app(engine, settings, owner)


def serve(engine: Engine, settings: Settings, listening: socket.socket, owner: Owner) -> None:
    """Serve on a bound socket until a signal ends it. Exits with code 1 where the thread that runs the model died.

    owner: the thread that loaded the engine.
    """
    app = prepared(engine, settings, owner)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    worker: Worker = app.state.service.worker
    server = Server(config, worker, settings.drain)
    log.info("serves %s, drafter %s", engine.target.name, engine.drafter.name)
    server.run(sockets=[listening])
    server.limit.cancel()
    server.forced.cancel()
    worker.stop()
    if worker.error is not None:
        log.error("the thread that runs the model has died: %r", worker.error)
        sys.exit(1)
