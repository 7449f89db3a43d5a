"""One model behind the endpoints."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from foretoken.core.messages import check_text
from foretoken.engine import Engine
from foretoken.serve.errors import too_long, unavailable
from foretoken.serve.forms import Spelling
from foretoken.serve.metrics import Metrics
from foretoken.serve.owner import Owner
from foretoken.serve.requests import Intake
from foretoken.serve.settings import Settings
from foretoken.serve.worker import Worker

T = TypeVar("T")


class Service:
    """What the endpoints and their answers share.

    engine, settings, owner: as for `create_app`.
    name: the model's name for clients.
    worker: decodes; the app starts and stops it.
    intake: turns requests into jobs, on the thread of `reader`, so that a long prompt does not delay other answers.
    spelling: how answers write single tokens.
    metrics: the server's figures for Prometheus.
    timeout: seconds that reading a request, and then its answer, may take.
    most: the most requests that may wait to be read; `being_read` is their number now.
    """

    def __init__(self, engine: Engine, settings: Settings, owner: Owner | None) -> None:
        self.name = settings.name or Path(engine.target.name).name
        check_text(self.name, "The model's name, instead of which --name can give another,")
        self.worker = Worker(engine, settings.max_batch, settings.context, settings.max_queue, owner=owner)
        own = replace(engine, tokenizer=copy.deepcopy(engine.tokenizer))
        most = settings.max_batch + settings.max_queue
        self.intake = Intake(own, self.name, self.worker.context, most)
        self.metrics = Metrics(self.name, self.worker)
        self.spelling = Spelling(copy.deepcopy(self.intake.tokenizer))
        self.reader = ThreadPoolExecutor(1, "foretoken-intake")
        self.timeout, self.most, self.being_read = settings.timeout, most, 0

    async def read(self, read: Callable[[Any], T], body: Any) -> T:
        """Return what a method of `intake` returns, called on its thread.

        read: the method.
        body: its argument, the request as the client sent it.
        Raises ApiError: 429 where too many requests wait to be read, 408 where it takes too long.
        """
        if self.being_read >= self.most:
            self.metrics.rejections.inc()
            raise unavailable(429, "Too many requests wait to be read: try again later.")
        self.being_read += 1
        try:
            reading = asyncio.get_running_loop().run_in_executor(self.reader, read, body)
            return await asyncio.wait_for(reading, self.timeout)
        except TimeoutError:
            raise too_long(f"To read the request took more than {self.timeout:g} seconds.") from None
        finally:
            self.being_read -= 1
