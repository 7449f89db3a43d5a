"""The endpoints."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from foretoken.engine import Engine
from foretoken.serve.answer import Answer, Desk
from foretoken.serve.errors import ApiError, on_api_error, on_http_error, on_invalid
from foretoken.serve.forms import CHAT, COMPLETION, Form
from foretoken.serve.guards import Keyed, Local, Logged, Sized
from foretoken.serve.logprobs import Spelling
from foretoken.serve.metrics import MEDIA_TYPE, Metrics
from foretoken.serve.owner import Owner
from foretoken.serve.requests import Asked, Intake
from foretoken.serve.running import unavailable
from foretoken.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foretoken.serve.settings import Settings
from foretoken.serve.worker import Worker
from foretoken.trace.page import composed
from foretoken.version import __version__

T = TypeVar("T")
router = APIRouter()


class Service:
    """One model behind the endpoints.

    worker: decodes; the app starts and stops it. intake: reads requests, on a thread of its own, so that a long prompt
    does not keep others' chunks waiting.
    """

    def __init__(self, engine: Engine, settings: Settings, owner: Owner | None) -> None:
        self.name = settings.name or Path(engine.target.name).name
        self.worker = Worker(engine, settings.max_batch, settings.context, settings.max_queue, owner=owner)
        own = replace(engine, tokenizer=copy.deepcopy(engine.tokenizer))
        most = settings.max_batch + settings.max_queue
        self.intake = Intake(own, self.name, self.worker.context, most)
        self.metrics = Metrics(self.name, self.worker)
        self.desk = Desk(
            self.name, self.worker, Spelling(copy.deepcopy(self.intake.tokenizer)), self.metrics, settings.timeout
        )
        self.reader = ThreadPoolExecutor(1, "foretoken-intake")
        self.timeout, self.most, self.being_read = settings.timeout, most, 0

    async def read(self, read: Callable[[Any], T], body: Any) -> T:
        """Call a method of `intake` on its thread.

        Raises ApiError: 429 where too many requests wait for it, 408 where it takes too long.
        """
        if self.being_read >= self.most:
            self.metrics.rejections.inc()
            raise unavailable(429, "Too many requests wait to be read: try again later.")
        self.being_read += 1
        try:
            reading = asyncio.get_running_loop().run_in_executor(self.reader, read, body)
            return await asyncio.wait_for(reading, self.timeout)
        except TimeoutError:
            raise ApiError(408, f"To read the request took more than {self.timeout:g} seconds.") from None
        finally:
            self.being_read -= 1

    async def answer(self, request: Request, form: Form, read: Callable[[Any], Asked], body: Any) -> Response:
        """The answer to a request for texts."""
        return Answer(self.desk, form, await self.read(read, body), request.state.log)


def create_app(engine: Engine, settings: Settings, owner: Owner | None = None) -> FastAPI:
    """The whole server as an ASGI application, to be run by uvicorn or inside another program.

    owner: as `Worker` takes it.
    """
    service = Service(engine, settings, owner)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()
        service.reader.shutdown()

    # No pages of documentation: they would load scripts from another host.
    app = FastAPI(title="Foretoken", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_middleware(Sized, most=settings.max_body, timeout=settings.timeout)
    app.add_middleware(Keyed, keys=settings.keys)
    origins = settings.allow_origin or []
    if not settings.keys:
        app.add_middleware(Local, host=settings.host, origins=origins)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Logged)  # the last one added is the outermost
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """The answer to a conversation."""
    service = _service(request)
    return await service.answer(request, CHAT, service.intake.chat, body)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """The continuation of texts."""
    service = _service(request)
    return await service.answer(request, COMPLETION, service.intake.completion, body)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The same, by its name."""
    service = _service(request)
    if name != service.name:
        raise ApiError(
            404, f"There is no model of that name here: {service.name} is served.", "model", "model_not_found"
        )
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    """As OpenAI's clients read it; the last three are ours, for the page."""
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "foretoken",
        "max_model_len": service.worker.context,
        "drafter": service.intake.engine.drafter.name,
        "tree": service.intake.engine.tree,
        "chat": bool(service.intake.tokenizer.chat_template),
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The ids of a text or a conversation."""
    service = _service(request)
    ids = await service.read(service.intake.tokenize, body)
    return JSONResponse({"count": len(ids), "max_model_len": service.worker.context, "tokens": ids})


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of some ids."""
    service = _service(request)
    return JSONResponse({"prompt": await service.read(service.intake.detokenize, body)})


@router.get("/health")
async def health(request: Request) -> Response:
    """503 where the thread that owns the model is dead."""
    if _service(request).worker.error is not None:
        raise ApiError(503, "The thread that runs the model has died: restart the server.")
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """503 where requests would be refused."""
    if not _service(request).worker.alive:
        raise ApiError(503, "The server takes no requests now.")
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(_service(request).metrics.text(), media_type=MEDIA_TYPE)


@router.get("/version")
async def version() -> Response:
    """Of foretoken."""
    return JSONResponse({"version": __version__})


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page to try it out."""
    return HTMLResponse(composed((files("foretoken.serve") / "page.html").read_text(encoding="utf-8")))
