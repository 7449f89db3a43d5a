"""The HTTP endpoints, and the application that has them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from foretoken.engine import Engine
from foretoken.serve.answer import Answer
from foretoken.serve.errors import ApiError, on_api_error, on_http_error, on_invalid
from foretoken.serve.forms import CHAT, COMPLETION, Form
from foretoken.serve.guards import digest, from_other_site, guarded, logged, sized, without_key
from foretoken.serve.metrics import MEDIA_TYPE
from foretoken.serve.owner import Owner
from foretoken.serve.requests import Asked
from foretoken.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foretoken.serve.service import Service
from foretoken.serve.settings import Settings
from foretoken.serve.worker import DIED
from foretoken.trace.page import composed
from foretoken.version import __version__

router = APIRouter()


def create_app(engine: Engine, settings: Settings, owner: Owner | None = None) -> FastAPI:
    """Return the whole server as an ASGI application, to be run by uvicorn or inside another program.

    engine: the model and its drafter, with a tokenizer.
    settings: the server's options; the address in them is that of the listening socket, which is not opened here.
    owner: the thread that loaded the engine; None: a new thread decodes.
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
    app.add_middleware(sized, most=settings.max_body, timeout=settings.timeout)
    keys, origins = [digest(key.encode()) for key in settings.keys], settings.allow_origin or []
    find = partial(without_key, keys) if keys else partial(from_other_site, settings.host, origins)
    app.add_middleware(guarded, find=find)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(logged)  # the last one added is the outermost
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer the conversation in the body of the request."""
    return await _answer(request, CHAT, _service(request).intake.chat, body)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue the texts in the body of the request."""
    return await _answer(request, COMPLETION, _service(request).intake.completion, body)


async def _answer(request: Request, form: Form, read: Callable[[Any], Asked], body: Any) -> Response:
    """Return the response to a request for texts. read: the method of `Intake` that turns the body into jobs."""
    service = _service(request)
    return Answer(service, form, await service.read(read, body), request.state.log)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the models that a request can name: the one that is served."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe the model that the request names; any other name than that of the one served is answered with 404."""
    service = _service(request)
    if name != service.name:
        raise ApiError(
            404, f"There is no model of that name here: {service.name} is served.", "model", "model_not_found"
        )
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    """Return the description of the model that OpenAI's clients read; the last three fields are ours, for the page."""
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "foretoken",
        "max_model_len": service.worker.context,
        "drafter": "+".join(Path(part).name for part in service.intake.engine.drafter.name.split("+")),
        "tree": service.intake.engine.tree,
        "chat": bool(service.intake.tokenizer.chat_template),
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of the text or the conversation in the body of the request."""
    service = _service(request)
    ids = await service.read(service.intake.tokenize, body)
    return JSONResponse({"count": len(ids), "max_model_len": service.worker.context, "tokens": ids})


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of the token ids in the body of the request."""
    service = _service(request)
    return JSONResponse({"prompt": await service.read(service.intake.detokenize, body)})


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Answer a request with 200, or with 503 where the thread that runs the model has died."""
    if _service(request).worker.error is not None:
        raise ApiError(503, DIED)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer a request with 200, or with 503 where requests for texts would be refused."""
    if not _service(request).worker.alive:
        raise ApiError(503, "The server takes no requests now.")
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer a request of Prometheus with the server's figures."""
    return Response(_service(request).metrics.text(), media_type=MEDIA_TYPE)


@router.get("/version")
async def version() -> Response:
    """Return the version of foretoken."""
    return JSONResponse({"version": __version__})


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the page on which the model can be tried in a browser."""
    return HTMLResponse(composed((files("foretoken.serve") / "page.html").read_text(encoding="utf-8")))
