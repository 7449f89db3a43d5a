"""What a request passes before it is read: its id and line in the log, its origin, its key, the size of its body.

The functions that take an `app` return an ASGI application around it, which hands on the requests that pass.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from urllib.parse import quote, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import ApiError, too_long

log = logging.getLogger(__name__)
OPEN = ("/", "/health", "/ready", "/metrics", "/version")  # answer without a key; none of them shows a text
EVERYWHERE = ("0", "0.0.0.0", "::")  # hosts to listen on that stand for all addresses of this machine
LINGER_S = 1.0  # seconds for which a client that is sent an error may still send its body, or read
ID = re.compile(r"[\x21-\x7e]{1,128}")  # an X-Request-Id of the client's that is taken over


def logged(app: ASGIApp) -> ASGIApp:
    """Return an application that gives each request its id, X-Request-Id, and logs how `app` answered it.

    It answers with 500 where the server failed. What else is to be logged of a request is put into
    `scope["state"]["log"]` by the endpoints; never a text.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        given = Headers(scope=scope).get("x-request-id", "")
        facts = {"request_id": given if ID.fullmatch(given) else uuid4().hex}
        scope.setdefault("state", {})["log"] = facts

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = facts["request_id"]
            await send(message)

        try:
            await app(scope, receive, noted)
        except Exception:
            log.exception("Request %s failed in the server.", facts["request_id"])
            if not status:
                error = ApiError(500, f"The server failed at request {facts['request_id']}: its log tells more.")
                await error.response(scope, receive, noted)
        finally:
            seconds = round(time.perf_counter() - start, 4)
            record = {"method": scope["method"], "path": quote(scope["path"]), "status": status, "seconds": seconds}
            level = logging.DEBUG if scope["path"] in OPEN[1:] else logging.INFO
            log.log(level, "request", extra={"facts": {**record, **facts}})

    return answer


def guarded(app: ASGIApp, find: Callable[[Scope], ApiError | None]) -> ASGIApp:
    """Return an application that hands on to `app` the requests for which `find` returns no error.

    app: the application inside.
    find: returns the error that is the answer, before the body is read; None for a request that may pass.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        error = find(scope) if scope["type"] == "http" else None
        await (app if error is None else error.response)(scope, receive, send)

    return answer


def from_other_site(own: str, origins: Collection[str], scope: Scope) -> ApiError | None:
    """Return the error for a request that a page of another site made a browser send, None for any other request.

    It matters for a server without a key on a loopback address. A page of any site can make a browser send requests
    there. By DNS rebinding, where the page's own host name is made to resolve to that address, it can read the answers
    too. Such requests are found by their Host and Origin headers. A server on all addresses refuses none.

    own: the host that the server listens on.
    origins: the sites whose pages may send requests all the same.
    scope: what ASGI says of the request.
    """
    if own in EVERYWHERE or not _is_loopback((scope.get("server") or [""])[0]):
        return None
    headers = Headers(scope=scope)
    host, origin = headers.get("host", "localhost"), headers.get("origin", "//localhost")
    if not _is_own(f"//{host}", own):
        said = f"The Host {host[:100]!a} is not this machine: ask at localhost, or start the server with a key."
    elif not _is_own(origin, own) and origin not in origins:
        said = f"The Origin {origin[:100]!a} is another site: start the server with --allow-origin for it."
    else:
        return None
    return ApiError(403, said)


def _is_own(url: str, own: str) -> bool:
    """Whether the host in a URL is this machine. own: the host that the server listens on."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return name in ("localhost", own.lower()) or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name, or the path of a socket
        return False


def digest(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key, which is compared in place of the key."""
    return sha256(key).digest()


def without_key(digests: Collection[bytes], scope: Scope) -> ApiError | None:
    """Return the error for a request without a valid key, None for one with a key, or to a path that needs none.

    digests: what `digest` returns for each valid key; they are compared in constant time.
    scope: what ASGI says of the request.
    """
    if scope["path"] in OPEN:
        return None
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    given = digest(key.strip(" \t").encode("latin-1"))
    same = [compare_digest(given, known) for known in digests]  # all are compared, also after a match
    if scheme.lower() == "bearer" and any(same):
        return None
    said, headers = "This server asks for a key: send one as Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
    return ApiError(401, said, code="invalid_api_key", headers=headers)


def sized(app: ASGIApp, most: int, timeout: float) -> ASGIApp:
    """Return an application that reads the whole body of each request, and refuses one that is too large or late.

    app: the application inside, which gets the body in one piece.
    most: the largest body, in bytes.
    timeout: seconds in which the body must come.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(timeout):
                came = [{"type": "http.request", "body": await _body(scope, receive, most), "more_body": False}]
        except ClientDisconnect:
            return
        except ApiError as error:
            await _let_come(receive)
            await error.response(scope, receive, send)
            return
        except TimeoutError:
            await too_long("The request's body did not come in time.").response(scope, receive, send)
            return

        async def replayed() -> Message:
            return came.pop() if came else await receive()

        await app(scope, replayed, send)

    return answer


async def _body(scope: Scope, receive: Receive, most: int) -> bytes:
    """Return the whole body. Raises ApiError 413 for one of more than `most` bytes, and ClientDisconnect."""
    request = Request(scope, receive)
    declared, body = request.headers.get("content-length", "0"), bytearray()
    said = f"The body has more than {most} bytes, the most that this server takes: send less."
    too_large = ApiError(413, said, headers={"Connection": "close"})
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large
    return bytes(body)


async def _let_come(receive: Receive) -> None:
    """Read the rest of a refused body, for LINGER_S seconds at most, and keep nothing of it.

    A connection that is closed while data arrives is reset, and its client may never see the answer.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
