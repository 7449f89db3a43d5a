"""What a request passes before it is read: its id and its line in the log, who asks, the key, the size of its body."""

import asyncio
import logging
import re
import time
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from urllib.parse import quote, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import ApiError

log = logging.getLogger(__name__)
OPEN = ("/", "/health", "/ready", "/metrics", "/version")  # without a key; nothing of them tells a text
EVERYWHERE = ("", "0", "0.0.0.0", "::")  # hosts to listen on that are all addresses of this machine
LINGER_S = 1.0  # for which the rest of a refused body may come
ID = re.compile(r"[\x21-\x7e]{1,128}")


class Logged:
    """The outermost: gives each request its id, X-Request-Id, logs how it ended, and answers 500 where it broke.

    What else is to be logged of it, handlers put into `scope["state"]["log"]`; never a text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
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
            await self.app(scope, receive, noted)
        except Exception:
            log.exception("Request %s failed in the server.", facts["request_id"])
            if not status:
                error = ApiError(500, f"The server failed at request {facts['request_id']}: its log tells more.")
                await error.response(scope, receive, noted)
        finally:
            record = {
                "method": scope["method"],
                "path": quote(scope["path"]),
                "status": status,
                "seconds": round(time.perf_counter() - start, 4),
                **facts,
            }
            level = logging.DEBUG if scope["path"] in OPEN[1:] else logging.INFO
            log.log(level, "request", extra={"facts": record})


class Local:
    """Refuses what other sites make a browser ask of a server that is this machine's alone, by Host and Origin.

    Any page may send requests to a loopback address; and one whose own name is turned into that address, which is DNS
    rebinding, may read the answers too. A key keeps both out: this is for servers without one.
    """

    def __init__(self, app: ASGIApp, host: str, origins: Collection[str]) -> None:
        """host: that the server listens on. origins: of pages that may ask all the same."""
        self.app, self.host, self.origins = app, host, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = (scope.get("server") or [""])[0]
        if scope["type"] == "http" and _is_loopback(address) and self.host not in EVERYWHERE:
            headers = Headers(scope=scope)
            host, origin = headers.get("host", "localhost"), headers.get("origin", "//localhost")
            said = None
            if not self._is_own(f"//{host}"):
                said = f"The Host {host[:100]!a} is not this machine: ask at localhost, or start the server with a key."
            elif not self._is_own(origin) and origin not in self.origins:
                said = f"The Origin {origin[:100]!a} is another site: start the server with --allow-origin for it."
            if said is not None:
                await ApiError(403, said).response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_own(self, url: str) -> bool:
        """Whether it names this machine."""
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in ("localhost", self.host.lower()) or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name, or the path of a socket
        return False


class Keyed:
    """Refuses requests without one of the keys, compared in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digests and scope["path"] not in OPEN and not self._allowed(scope):
            error = ApiError(
                401,
                "This server asks for a key: send one as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = sha256(key.strip(" \t").encode("latin-1")).digest()
        same = [compare_digest(given, digest) for digest in self.digests]  # all of them, whichever it is
        return scheme.lower() == "bearer" and any(same)


class Sized:
    """Reads each body whole, and refuses one that is too large or does not come in time."""

    def __init__(self, app: ASGIApp, most: int, timeout: float) -> None:
        self.app, self.most, self.timeout = app, most, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.timeout):
                body = await self._body(scope, receive)
        except ApiError as error:
            await _let_come(receive)
            await error.response(scope, receive, send)
            return
        except TimeoutError:
            await ApiError(408, "The request's body did not come in time.").response(scope, receive, send)
            return
        if body is None:
            return

        read = False

        async def replayed() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replayed, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None where the client has gone. Raises ApiError 413."""
        declared = Headers(scope=scope).get("content-length", "0")
        pieces, size = [], int(declared) if declared.isdecimal() else 0
        if size <= self.most:
            size = 0
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > self.most or not message.get("more_body", False):
                    break
        if size > self.most:
            said = f"The body has more than {self.most} bytes, the most that this server takes: send less."
            raise ApiError(413, said, headers={"Connection": "close"})
        return b"".join(pieces)


async def _let_come(receive: Receive) -> None:
    """Read the rest of a refused body, for LINGER_S at most, and keep nothing of it.

    A connection that is closed while something comes is reset, and its client may never see the answer.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
