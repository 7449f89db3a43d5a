"""Errors as answers, in the form that OpenAI's clients read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from foretoken.core.errors import ForetokenError

# pydantic's words for a JSON object
DICTIONARY = re.compile("a valid dictionary( or instance of .*| or object to extract fields from)?")
SHOULD = "Input should be "  # so pydantic begins most of its messages
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
RETRY_AFTER = 1  # seconds after which a client may try again, sent with a 429 or 503


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error.

    status: the HTTP status.
    message: one sentence that names the wrong input and says what to do.
    param: the field of the request that is wrong; None where it is no single field.
    code: a word by which programs distinguish errors, if there is one.
    headers: HTTP headers besides the usual ones; None: there are no others.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object, as JSON."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The whole response. Non-ASCII is escaped, since a field's name may be no valid Unicode."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def unavailable(status: int, message: str) -> ApiError:
    """Return the error for a request that a client may send again later.

    status: 429 where a queue is full, 503 where no more requests are taken.
    message: a sentence that says why.
    """
    code = "queue_full" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER)})


def too_long(message: str) -> ApiError:
    """Return the error 408 for a request that reached the time limit.

    It tells OpenAI's clients not to send the request again, as they do after a 408 by default: it would take as long.

    message: a sentence that says what took too long.
    """
    return ApiError(408, message, headers={"X-Should-Retry": "false"})


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """Turn a ForetokenError that the block raises into an ApiError 400. param: the field that it names."""
    try:
        yield
    except ForetokenError as error:
        raise ApiError(400, str(error), param) from error


async def on_api_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed with an ApiError, which is `error`."""
    assert isinstance(error, ApiError)
    return error.response


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the response to a request with an unknown path or method, or an unreadable body: `error` says which."""
    assert isinstance(error, HTTPException)
    base = "" if request.url.path.startswith("/v1/") else "clients need /v1 at the end of the base URL; "
    what = {
        404: f"There is nothing at {request.url.path}: {base}docs/serving.md lists the endpoints.",
        405: f"{request.url.path} does not answer to {request.method}.",
        400: "The body cannot be read: send a JSON object.",
    }
    return ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=error.headers).response


async def on_invalid(request: Request, error: Exception) -> Response:
    """Return the response to a request whose body has wrong fields, which are pydantic's `error`."""
    assert isinstance(error, RequestValidationError)
    return _invalid(error.errors(), error.body).response


def _invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """Return the ApiError 400 for a body with wrong fields: one sentence about the first of them.

    Where a field may have one of several types, pydantic reports errors for each type; the sentence is about those that
    lie deepest in the body.
    """
    found = errors[0]
    places = {id(error): _place(error, body) for error in errors if error["loc"][:2] == found["loc"][:2]}
    place = max(places.values(), key=lambda each: each.count("."))
    fitting = [error for error in errors if places.get(id(error)) == place]
    typed = [error for error in fitting if not error["type"].endswith("_type")]
    if any(error["type"] != "literal_error" for error in typed):
        fitting = typed  # one of the types is right
    kind, wanted = fitting[0]["type"], dict.fromkeys(DICTIONARY.sub("an object", error["msg"]) for error in fitting)
    if kind == "json_invalid":
        return ApiError(400, "The body is not valid JSON: send a JSON object.")
    if kind == "string_unicode" and not place:
        return ApiError(400, "The name of a field is not valid Unicode: leave the field out.")
    if not place and kind != "extra_forbidden":
        return ApiError(400, "The body is read as no JSON object: send one, with content-type: application/json.")
    if kind == "extra_forbidden":
        shown = place if place.strip() else repr(place)
        said = f"Unknown field {shown}: this server has no such field; docs/serving.md lists those that it has."
    elif kind == "missing":
        said = f"{place} is missing: it must be given."
    else:
        wants = " or ".join(wanted)
        begins = "must be" if wants.startswith(SHOULD) else "is refused:"
        said = f"{place} {begins} {wants.replace(SHOULD, '')}."
    return ApiError(400, said, place)


def _place(error: Any, body: Any) -> str:
    """Return the field that pydantic means, such as messages.0.content.

    pydantic's path also has the names of the types that a field may have; they are left out.
    """
    path, place = error["loc"][1:], []
    for key in path:
        if isinstance(body, Mapping):
            if key not in body and place and not (key == path[-1] and error["type"] == "missing"):
                continue
            place.append(str(key))
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and key < len(body):
            place.append(str(key))
            body = body[key]
    return ".".join(place)[:100]  # names of fields are the client's, of any length
